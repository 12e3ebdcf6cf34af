"""`--detach`: forks the head, which leaves the user's terminal for good when its job is about to begin."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

# A job's id is shorter.
_MOST_BYTES = 64


class Departure:
    """The head's side of it."""

    def __init__(self, parent: int) -> None:
        """`parent`: a pipe to the process that the user waits for."""
        self._parent = parent

    def leave(self, job: str) -> None:
        """Leave the terminal and its session, and have the parent print the job's id and exit."""
        os.setsid()
        if os.isatty(0):
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        try:
            os.write(self._parent, job.encode())
        except BrokenPipeError:  # it was killed; `launchpad jobs` lists the job
            pass
        os.close(self._parent)


class Departed(NamedTuple):
    """What the parent has learned."""

    job: str  # its id; "" if the head ended before it had begun
    code: int  # the parent's exit code


def depart() -> Departure | Departed:
    """Fork the head: returns in both processes. Call it before there are threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        return Departure(writer)
    os.close(writer)
    for signum in (signal.SIGINT, signal.SIGQUIT):  # the terminal sends them to the child too
        signal.signal(signum, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _: os.kill(child, number))
    job = os.read(reader, _MOST_BYTES).decode()
    return Departed(job, 0 if job else _exit_code(child))


def _exit_code(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code
