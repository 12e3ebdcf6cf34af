"""Reads stacks: which frame is the user's, and what a thread waits for. Pure.

A frame is [file, line, function, source line]; a thread's frames begin with the innermost.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .events import StackDump

# Files, by the end of their path, whose functions wait for other ranks.
_WAITS = ("torch/distributed/distributed_c10d.py", "launchpad/collectives/mpi/work.py")
_NO_WAITS = {"wrapper", "init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper"}
# The frames outside of a rank's own program.
RANK_CODE = ("/launchpad/rank/", "/launchpad/forkserver/", "/launchpad/testing/")
_OURS = (*RANK_CODE, "/launchpad/collectives/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", *_OURS)

# mpi4py's blocking calls are in C and have no Python frame.
_MPI_CALLS = (
    *("recv", "Recv", "send", "Send", "ssend", "Ssend", "sendrecv", "Sendrecv", "probe", "Probe", "mprobe", "Mprobe"),
    *("barrier", "Barrier", "bcast", "Bcast", "gather", "Gather", "Gatherv", "scatter", "Scatter", "Scatterv"),
    *("allgather", "Allgather", "Allgatherv", "alltoall", "Alltoall", "Alltoallv", "reduce", "Reduce", "allreduce"),
    *("Allreduce", "scan", "Scan", "exscan", "Exscan", "Reduce_scatter", "Reduce_scatter_block", "wait", "Wait"),
    *("waitall", "Waitall", "waitany", "Waitany", "Fence", "Lock", "Split", "Dup", "Create_group", "Disconnect"),
)


class Where(NamedTuple):
    """Where a thread is, in short."""

    waits_in: str  # the operation in which it waits for other ranks; "" if it does not seem to wait
    function: str  # the innermost function of the user's code
    file: str
    line: int
    text: str  # the source line
    innermost: str  # the innermost function of all, if that is a library's


def is_library(file: str) -> bool:
    """Whether a file belongs to a library rather than to the user's program."""
    return file.startswith("<frozen") or any(part in file for part in _LIBRARIES)


def user_frame(frames: Sequence[Sequence[Any]]) -> Sequence[Any] | None:
    """The innermost frame of the user's code, or else of any code."""
    found = next((frame for frame in frames if not is_library(frame[0])), None)
    return found if found is not None or not frames else frames[0]


def where(frames: Sequence[Sequence[Any]], mpi: bool) -> Where:
    """Where a thread with these frames is. `mpi`: its process has loaded mpi4py."""
    own = user_frame(frames)
    if own is None:
        return Where("", "", "", 0, "", "")
    file, line, function, text = own
    above = frames[: next(index for index, frame in enumerate(frames) if frame is own)]
    innermost = above[0][2] if above else ""
    return Where(_operation(above, text, mpi), function, file, line, text, innermost)


def _operation(above: Sequence[Sequence[Any]], text: str, mpi: bool) -> str:
    """The operation that waits. `above`: the library frames called by the user's code, innermost first."""
    waits = [frame for frame in above if frame[0].endswith(_WAITS) and not frame[2].startswith("<")]
    if waits:
        names = [frame[2] for frame in waits if frame[2] not in _NO_WAITS]
        return str(names[-1] if names else waits[-1][2])
    if above and above[0][2] == "_engine_run_backward":
        return ""
    if not above:
        if mpi:
            return next((name for name in _MPI_CALLS if f".{name}(" in text), "")
        if ".wait(" in text and "work" in text.lower():
            return "wait"
    return ""


def main_frames(dump: StackDump) -> list[Any]:
    """The main thread's frames."""
    return dump.threads[0]["frames"] if dump.threads else []
