"""One rank of a small all_reduce over all hosts, in the ranks' interpreter: a fork of a kept image where one fits."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...image import Cold, keeper_control
from ...image.keeper_link import ForkRequest, connect_at
from ...protocol.defaults import defaults_for
from ...protocol.health import Imported, Reduced
from .software import environment, where

# Torch may have to be loaded over a network; then the head decides how long to wait.
IMPORT_SECONDS = 20

# It has a line from us: the port of the store. It prints the port of its own one, or 0, then a line for each backend.
_RANK = """
import json, os, signal, sys, time
from datetime import timedelta
rank, size, address, interface, alarm, limits = sys.argv[1:]
signal.alarm(int(alarm))  # leave nothing behind even if nobody is left to kill us
rank, size = int(rank), int(size)
limits = {backend: timedelta(seconds=seconds) for backend, seconds in json.loads(limits).items()}
limit = next(iter(limits.values()))
os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
import torch
import torch.distributed as dist
store = dist.TCPStore(address, 0, size, True, timeout=limit, wait_for_workers=False) if rank == 0 else None
print("port", store.port if store else 0, flush=True)
port = int(sys.stdin.readline())
store = store or dist.TCPStore(address, port, size, False, timeout=limit)
for backend, limit in limits.items():
    try:
        store.set_timeout(limit)
        own = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
        tensor = torch.full((1,), rank + 1.0, device="cuda" if backend == "nccl" else "cpu")
        for _ in range(2):
            began = time.perf_counter()
            mine = tensor.clone()
            dist.all_reduce(mine)
            total = mine.item()
        seconds = time.perf_counter() - began
        wrong = "" if total == size * (size + 1) / 2 else f"the sum is {total}, which is wrong"
        print("failed" if wrong else "done", wrong or seconds, flush=True)
        dist.destroy_process_group()
    except Exception as error:
        print("failed", " ".join(str(error).split())[:200], flush=True)
        break
if store and rank == 0:
    sys.stdin.readline()  # the others may still use it
"""


class TrialRank:
    """The rank of this host."""

    def __init__(self, keeper: str) -> None:
        """`keeper`: where the keeper of images would listen."""
        self._keeper = keeper
        self._process: subprocess.Popen[bytes] | None = None  # unless it is the fork of an image
        self._pidfd = -1
        self._begun = False

    def begin(self, request: dict[str, Any]) -> Imported:
        """Import torch: {"rank", "size", "address", "interface", "backends", "cwd", "environ"}.

        "backends" has the seconds within which each has to answer.
        """
        # It gives up a little sooner, and says why.
        limits = {backend: seconds - 1 for backend, seconds in request["backends"].items()}
        alarm = IMPORT_SECONDS + int(sum(request["backends"].values()))
        words = [*(request[name] for name in ("rank", "size", "address", "interface")), alarm, json.dumps(limits)]
        program = [_RANK, *map(str, words)]
        pipes = [os.pipe() for _ in range(3)]
        ends = pipes[0][0], pipes[1][1], pipes[2][1]
        self._stdin = open(pipes[0][1], "w")  # noqa: SIM115
        self._stdout, self._stderr = (open(pipe[0]) for pipe in pipes[1:])  # noqa: SIM115
        try:
            kept = self._forked(program, request, ends)
            self._pidfd = self._executed(program, request, ends) if kept is None else kept
        finally:
            for fd in ends:
                os.close(fd)
        for line in self._stdout:
            word, _, rest = line.partition(" ")
            if word == "port":
                return Imported(int(rest), kept is not None)
        raise OSError(self._last_words())

    def _forked(self, program: Sequence[str], request: dict[str, Any], ends: tuple[int, int, int]) -> int | None:
        """Have a kept image run the program. As it is short, any number of threads will do."""
        environ = {name: value for name, value in os.environ.items() if name}
        with suppress(Cold):
            for image in keeper_control.ready(self._keeper):
                keeper = connect_at(self._keeper) if "torch" in image["preload"] else None
                if keeper is None:
                    continue
                preload, threads = tuple(image["preload"]), {**defaults_for(1), "OMP_NUM_THREADS": image["threads"]}
                keeper.want(ForkRequest(sys.executable, preload, request["environ"], threads, False, program))
                try:
                    keeper.ask_to_fork(*ends, None, [sys.executable, "-c", *program], environ, where(request))
                    return keeper.forked()
                except Cold:
                    continue
                finally:
                    keeper.close()
        return None

    def _executed(self, program: Sequence[str], request: dict[str, Any], ends: tuple[int, int, int]) -> int:
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", *program],
            stdin=ends[0],
            stdout=ends[1],
            stderr=ends[2],
            cwd=where(request),
            env={**environment(request), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return os.pidfd_open(self._process.pid)

    def finish(self, request: dict[str, Any]) -> Reduced:
        """Do it with the next backend: {"port": the store's}."""
        if not self._begun:
            self._begun = True
            self._stdin.write(f"{request['port']}\n")
            self._stdin.flush()
        word, _, text = self._stdout.readline().strip().partition(" ")
        if word == "done":
            return Reduced(float(text), "")
        return Reduced(-1.0, text or self._last_words())

    def _last_words(self) -> str:
        lines = self._stderr.read().strip().splitlines()
        return lines[-1][:200] if lines else "its process ended without a word"

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._pidfd < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(1000):
            if self._process is not None:
                self._process.wait()
            for stream in (self._stdin, self._stdout, self._stderr):
                stream.close()
            os.close(self._pidfd)
