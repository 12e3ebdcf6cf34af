"""One rank of a small all_reduce over all hosts, in the ranks' interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from ...protocol.health import Imported, Reduced
from .software import environment, where

# Torch may have to be loaded over a network; then the head decides how long to wait.
IMPORT_SECONDS = 20

# It has a line from us: the port of the store. It prints the port of its own one, or 0, then a line for each backend.
_RANK = """
import json, signal, sys, time
from datetime import timedelta
rank, size, address, alarm, limits = sys.argv[1:]
signal.alarm(int(alarm))  # leave nothing behind even if nobody is left to kill us
rank, size = int(rank), int(size)
limits = {backend: timedelta(seconds=seconds) for backend, seconds in json.loads(limits).items()}
limit = next(iter(limits.values()))
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

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._begun = False

    def begin(self, request: dict[str, Any]) -> Imported:
        """Import torch: {"rank", "size", "address", "interface", "backends", "cwd", "environ"}.

        "backends" has the seconds within which each has to answer.
        """
        environ = environment(request)
        environ.setdefault("GLOO_SOCKET_IFNAME", request["interface"])
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={request['interface']}")
        environ["OMP_NUM_THREADS"] = "1"
        # It gives up a little sooner, and says why.
        limits = {backend: seconds - 1 for backend, seconds in request["backends"].items()}
        alarm = IMPORT_SECONDS + int(sum(request["backends"].values()))
        words = [request["rank"], request["size"], request["address"], alarm, json.dumps(limits)]
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", _RANK, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=where(request),
            env=environ,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.partition(" ")
            if word == "port":
                return Imported(int(rest))
        raise OSError(self._last_words())

    def finish(self, request: dict[str, Any]) -> Reduced:
        """Do it with the next backend: {"port": the store's}."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._begun:
            self._begun = True
            process.stdin.write(f"{request['port']}\n")
            process.stdin.flush()
        word, _, text = process.stdout.readline().strip().partition(" ")
        if word == "done":
            return Reduced(float(text), "")
        return Reduced(-1.0, text or self._last_words())

    def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        lines = self._process.stderr.read().strip().splitlines()
        return lines[-1][:200] if lines else "its process ended without a word"

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.communicate(timeout=1)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
