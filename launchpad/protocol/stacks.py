"""Reads stacks: which frame is the user's, and what a thread waits for. Pure.

A frame is [file, line, function, source line]; a thread's frames begin with the innermost.
"""

import json
from collections.abc import Sequence
from typing import Any

from ..named import NamedTuple
from .events import Awaited, ChildStack, Entered, StackDump, StackDumps, ThreadStack
from .typed import typed

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


def together(dumps: Sequence[StackDump]) -> StackDumps:
    """The dumps of ranks of a node, at least one, as they travel."""
    threads: dict[str, int] = {}
    collectives: dict[str, int] = {}
    waits: dict[str, int] = {}
    ranks = []
    for one in dumps:
        places = (
            _place(one.threads, threads),
            _place(one.collectives, collectives),
            _place([one.awaits, one.children], waits),
        )
        figures = one.state, one.wchan, one.cpu, one.busy, one.moved, one.beats
        ranks.append((one.rank, *places, one.pid, one.why, *figures, one.native))
    return StackDumps(dumps[-1].time, dumps[-1].number, list(threads), list(collectives), list(waits), ranks)


def _place(value: Any, known: dict[str, int]) -> int:
    return known.setdefault(json.dumps(value), len(known))


def separate(message: StackDumps, known: dict[str, Any]) -> list[StackDump]:
    """The dump of each rank. Equal stacks are the same object: `known`, at first empty, has those that came before.

    Raises LookupError, TypeError, ValueError or RecursionError if they are not what they should be.
    """
    threads = [_decoded(one, list[ThreadStack], known) for one in message.threads]
    collectives = [_decoded(one, Entered, known) for one in message.collectives]
    waits = [_decoded(one, tuple[Awaited, list[ChildStack]], known) for one in message.waits]
    return [
        StackDump(
            *(message.time, rank, message.number, pid, why, threads[stack], state, wchan, cpu, busy, moved, beats),
            *(collectives[entered], native, *waits[wait]),
        )
        for rank, stack, entered, wait, pid, why, state, wchan, cpu, busy, moved, beats, native in message.ranks
    ]


def _decoded(text: str, hint: Any, known: dict[str, Any]) -> Any:
    if text not in known:
        known[text] = typed(hint, json.loads(text))
    return known[text]


def main_frames(dump: StackDump) -> list[Any]:
    """The main thread's frames."""
    return dump.threads[0]["frames"] if dump.threads else []
