"""The vocabulary of stacks: what an agent answers when it is asked to Examine its ranks, and how to read it.

A frame is [file, line, function, text of the line]; a thread is {"name": …, "frames": […]}, its innermost frame first;
the main thread is the first of a rank's. A collective is an entry {"group", "number", "what", "sizes", "types", "done",
"frames"}: the `number`-th of its process group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Why there are no stacks of a Python rank that launchpad has made ready to tell them.
NO_HANDLER = "no handler of ours is there: the interpreter is on its way out, or the program took it away"
SILENT = "it did not answer"

# Event: agent -> head.


class Examined(NamedTuple):
    """One rank, as it was found. Also said of a rank that can't be asked: `threads` is empty, and `why` says why."""

    time: int
    rank: int
    number: int  # of the question
    pid: int
    why: str  # there are no stacks; "" where there are
    threads: list[Any]
    state: str  # the main thread's, a letter as in proc(5)
    wchan: str  # the kernel's function that the main thread sleeps in; "" where it is not told
    cpu: float  # seconds of processor time that the rank and its children have used
    busy: bool  # one of their threads ran, or waited for a processor
    moved: int  # bytes that they have read and written
    beats: int  # rises when the main thread has run Python code since the last question; -1: not known
    # {"counts": {group: number}, "waiting": int}, and when asked "entries", "groups"; where the thread that answers is
    # kept waiting, "unanswered": the number of the first question since.
    collectives: dict[str, Any]
    native: str


# Events of the head's own making.


class StacksAsked(NamedTuple):
    """Somebody wants to know where the ranks are."""

    time: int
    asker: int  # who gets the answer; 0: it is shown
    native: bool
    full: bool


class StacksTaken(NamedTuple):
    """The ranks' places."""

    time: int
    why: str  # "asked", "timeout", "stall"
    asker: int
    full: bool
    ranks: list[int]  # that ran
    examined: list[Examined]  # of those that have answered


class Stalled(NamedTuple):
    """No rank has written, or got on, for `seconds`."""

    time: int
    seconds: float


# Reading a stack.

# Functions that wait for other ranks, by the end of their file's name: where one stands in a stack, the rank waits.
_WAITS = ("torch/distributed/distributed_c10d.py", "launchpad/collectives/mpi/work.py")
_NO_WAITS = {"wrapper", "init_process_group", "new_group", "_new_group_with_tag", "_new_process_group_helper"}
NURSERY = "/launchpad/nursery/"  # what calls a rank's program
_OURS = (NURSERY, "/launchpad/collectives/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", *_OURS)

# mpi4py's calls that block have no frame of their own: they are C.
_MPI_CALLS = (
    *("recv", "Recv", "send", "Send", "ssend", "Ssend", "sendrecv", "Sendrecv", "probe", "Probe", "mprobe", "Mprobe"),
    *("barrier", "Barrier", "bcast", "Bcast", "gather", "Gather", "Gatherv", "scatter", "Scatter", "Scatterv"),
    *("allgather", "Allgather", "Allgatherv", "alltoall", "Alltoall", "Alltoallv", "reduce", "Reduce", "allreduce"),
    *("Allreduce", "scan", "Scan", "exscan", "Exscan", "Reduce_scatter", "Reduce_scatter_block", "wait", "Wait"),
    *("waitall", "Waitall", "waitany", "Waitany", "Fence", "Lock", "Split", "Dup", "Create_group", "Disconnect"),
)


class Where(NamedTuple):
    """Where a thread is, in a few words."""

    waits_in: str  # the operation in which it waits for other ranks; "" where it doesn't, as far as one can see
    function: str  # the innermost function of the user's code
    file: str
    line: int
    text: str  # of that line
    innermost: str  # the innermost function of all, where that is a library's


def is_library(file: str) -> bool:
    """Whether a file is no program's own."""
    return file.startswith("<frozen") or any(part in file for part in _LIBRARIES)


def user_frame(frames: Sequence[Sequence[Any]]) -> Sequence[Any] | None:
    """The innermost frame of the user's code; of any code, where none is."""
    found = next((frame for frame in frames if not is_library(frame[0])), None)
    return found if found is not None or not frames else frames[0]


def where(frames: Sequence[Sequence[Any]], mpi: bool) -> Where:
    """Read a thread's frames. `mpi`: its process has loaded mpi4py."""
    own = user_frame(frames)
    if own is None:
        return Where("", "", "", 0, "", "")
    file, line, function, text = own
    above = frames[: next(place for place, frame in enumerate(frames) if frame is own)]
    innermost = above[0][2] if above else ""
    return Where(_operation(above, text, mpi), function, file, line, text, innermost)


def _operation(above: Sequence[Sequence[Any]], text: str, mpi: bool) -> str:
    """`above`: the frames of libraries that the user's code has called, the innermost first."""
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


def main_frames(examined: Examined) -> list[Any]:
    """The main thread's frames."""
    return examined.threads[0]["frames"] if examined.threads else []
