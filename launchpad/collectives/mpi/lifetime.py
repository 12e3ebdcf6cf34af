"""Joins MPI's world and leaves it. A process that fails aborts the whole world, as the others would hang."""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import sys
import termios
import time
from types import TracebackType
from typing import TextIO

from mpi4py import MPI

from launchpad.collectives.mpi.work import progress

ALONE = (
    "WORLD_SIZE is {} but MPI sees only one rank: this process was not started by an MPI launcher; "
    "use `launchpad run --backend mpi`, or the mpiexec of the MPI that mpi4py has loaded ({})"
)

# How long to wait for the readers of stdout and stderr before an abort.
DRAIN_SECONDS = 1.0


class Failure:
    """Why the world must be aborted when this process exits; None if it must not."""

    reason: str | None = None


_joined = False


def join() -> MPI.Intracomm:
    """Initialise MPI if necessary and return its world."""
    global _joined
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised in this process and can't be initialised again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if MPI.COMM_WORLD.size == 1 and size > 1:
        raise RuntimeError(ALONE.format(size, MPI.Get_library_version().split(",")[0].split("\n")[0].strip()))
    if not _joined:
        _joined = True
        _watch_for_failure()
    return MPI.COMM_WORLD


def _watch_for_failure() -> None:
    previous = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        Failure.reason = f"rank {MPI.COMM_WORLD.rank} failed with {kind.__name__}"
        previous(kind, error, trace)

    # Don't abort in the hook: torch's hook wraps this one and prints only after it. MPI_Finalize runs after atexit.
    sys.excepthook = failed
    atexit.register(_leave)


def _leave() -> None:
    progress.stop()
    if Failure.reason is None or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    print(f"mpi: {Failure.reason}; aborting the other ranks, which would wait forever", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        _drain(stream)
    MPI.COMM_WORLD.Abort(1)


def _drain(stream: TextIO) -> None:
    """If the stream is a pipe, wait until its reader has emptied it: launchers stop reading after an abort."""
    deadline = time.monotonic() + DRAIN_SECONDS
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return
        while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.001)
    except (OSError, ValueError):  # the stream is closed
        pass
