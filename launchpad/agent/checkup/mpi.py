"""Which MPI the ranks' Python would use, and one rank of a small MPI world over all hosts, formed as a job's is."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ... import mpi_library
from ...protocol.commands import Command, MpiWorld
from ...protocol.events import Event
from ...protocol.health import MpiThere, Reduced
from ..mpi.node_worlds import NodeWorlds
from ..poll import Poll
from ..ranks import rundir
from .software import environment, where

# A network file system may be slow.
IMPORT_SECONDS = 20

# The library says so itself, without MPI_Init. Where the one that was to be loaded can't be, mpi4py takes another.
_VERSION = """
import ctypes, json, mpi4py, re, sys
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
version = MPI.Get_library_version().rstrip(chr(0)).splitlines()[0].partition(",")[0]
paths = [line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")]
path = next((path for path in paths if re.search("/libmpi(ch)?[.]so", path)), sys.argv[1])
try:
    ctypes.CDLL(sys.argv[1])
    problem = ""
except OSError as error:
    problem = str(error)
print(json.dumps([version, path, problem]))
"""

_RANK = """
import signal, sys, time
signal.alarm(30)  # leave nothing behind even if nobody is left to kill us
from mpi4py import MPI
world, size = MPI.COMM_WORLD, int(sys.argv[1])
if world.size != size:
    sys.exit(f"its ranks have formed worlds of {world.size}, not one of {size}")
for _ in range(2):
    began = time.perf_counter()
    total = world.allreduce(world.rank + 1)
seconds = time.perf_counter() - began
if total != size * (size + 1) // 2:
    sys.exit(f"the sum is {total}, which is wrong")
print("done", seconds, flush=True)
"""


# How the libraries name themselves. Others than these are MPICH with another name.
_NAMES = {"Open MPI": "Open MPI", "Intel(R) MPI": "Intel MPI"}


def look(request: dict[str, Any]) -> MpiThere:
    """Find the MPI that mpi4py loads: {"cwd", "environ"}."""
    environ = environment(request)
    found = mpi_library.of_python(sys.executable, environ)
    if not found.library:
        return MpiThere("", "", "", found.why if found.why != mpi_library.NO_MPI4PY else "")
    wanted = mpi_library.NAMES[found.library]
    done = subprocess.run(
        [sys.executable, "-B", "-c", _VERSION, found.path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=IMPORT_SECONDS,
        cwd=where(request),
        env=environ,
        check=False,
    )
    if done.returncode:
        return MpiThere(wanted, "", found.path, _last_line(done.stderr))
    version, path, problem = json.loads(done.stdout.splitlines()[-1])
    library = next((name for words, name in _NAMES.items() if words in version), "MPICH")
    if library == wanted:
        problem = ""
    elif problem:
        problem = f"{version} is loaded, as {wanted} can't be: {problem}"
    else:
        problem = f"{version} is loaded, not {wanted} ({found.path})"
    return MpiThere(library, version, path, problem[:300])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1][:200]


class TrialWorld:
    """This host's part of the world: its rank, and what answers the rank's MPI library."""

    def __init__(self, say: Callable[[Event], None]) -> None:
        """`say` sends the head what concerns the other hosts."""
        self.say = say
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: give up
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._running = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._over = False

    def hear(self, command: Command | None) -> None:
        """From the head: what the other hosts have said."""
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    def kill(self) -> None:
        """End the rank, and wait a moment until nothing is left of it."""
        self.hear(None)
        self._running.acquire(timeout=1)

    def run(self, request: dict[str, Any]) -> Reduced:
        """Form the world and add up: {"world": fields of MpiWorld, "seat": the rank's variables, "cwd", "environ"}."""
        with self._running:
            folder = rundir.create()
            poll = Poll()
            worlds = NodeWorlds(poll, self, folder)
            try:
                return self._run(request, poll, worlds)
            finally:
                worlds.close()
                poll.close()
                rundir.remove(folder)

    def _run(self, request: dict[str, Any], poll: Poll, worlds: NodeWorlds) -> Reduced:
        world, cwd = MpiWorld(*request["world"]), where(request)
        argv = [sys.executable, "-B", "-c", _RANK, str(world.size)]
        environ = environment(request)
        worlds.add(world)
        worlds.prepare(environ)
        worlds.serve(environ, argv, cwd)
        if worlds.why_not:
            return Reduced(-1.0, worlds.why_not)
        poll.watch(self._wake, lambda _: self._obey(worlds))
        worlds.when_ready(
            0, lambda: self._begin(argv, {**environ, **request["seat"]}, cwd, poll, worlds, world.ranks[0])
        )
        while not self._over:
            poll.wait(None)
        if self._process is None:
            return Reduced(-1.0, "given up")
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        said, problem = self._process.communicate()
        word, _, text = said.strip().partition(" ")
        return Reduced(float(text), "") if word == "done" else Reduced(-1.0, _last_line(problem))

    def _obey(self, worlds: NodeWorlds) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                self._over = True
            else:
                worlds.on(command)

    def _begin(
        self, argv: list[str], environ: dict[str, str], cwd: str, poll: Poll, worlds: NodeWorlds, rank: int
    ) -> None:
        link = worlds.open(rank)
        environ = {**environ, **worlds.environ(rank)}
        if link >= 0:
            environ["PMI_FD"] = str(link)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environ,
            pass_fds=[link] if link >= 0 else [],
            start_new_session=True,
        )
        if link >= 0:
            os.close(link)
        self._ended = os.pidfd_open(self._process.pid)
        poll.watch(self._ended, lambda _: self._end(poll))

    def _end(self, poll: Poll) -> None:
        poll.unwatch(self._ended)
        os.close(self._ended)
        self._over = True
