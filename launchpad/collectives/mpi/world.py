"""How a process joins MPI's world and leaves it: one that fails takes the others along, which would hang."""

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
    "WORLD_SIZE is {} but MPI knows of one rank only: this process was not started by an MPI launcher; "
    "use `launchpad run --backend mpi` or mpiexec, of the MPI that mpi4py has loaded ({})"
)


READ_SECONDS = 1.0


class Ending:
    """Why the world must be aborted when this process ends; None for no reason."""

    reason: str | None = None


_joined = False


def join() -> MPI.Intracomm:
    """MPI's world, initialised."""
    global _joined
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised in this process and can't be started again")
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
    show = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        Ending.reason = f"rank {MPI.COMM_WORLD.rank} failed with {kind.__name__}"
        show(kind, error, trace)

    # Not aborted in the hook: torch's own hook, around this one, prints only after it. MPI_Finalize comes after atexit.
    sys.excepthook = failed
    atexit.register(_leave)


def _leave() -> None:
    progress.stop()
    if Ending.reason is None or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    print(f"mpi: {Ending.reason}; aborting the other ranks, which would wait for it", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        _until_read(stream)
    MPI.COMM_WORLD.Abort(1)


def _until_read(stream: TextIO) -> None:
    """Wait until a pipe's reader has taken all that is in it: after an abort launchers read no more."""
    deadline = time.monotonic() + READ_SECONDS
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return
        while any(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.001)
    except (OSError, ValueError):  # it is closed
        pass
