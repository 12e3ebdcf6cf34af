"""`--sync`: copies the working folder to every remote node. The copy is kept there, and only changes are sent."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.folder_listing import SyncedFile, name_of_copy
from launchpad.head.sender import PIECE_BYTES, STUCK_SECONDS, send
from launchpad.head.shared_reader import SharedReader
from launchpad.protocol.commands import Sync
from launchpad.protocol.events import Synced, Wanted
from launchpad.protocol.wire import encoded


class Taken(NamedTuple):
    """How much of what it wants a host has accepted."""

    size: int
    of_size: int
    files: int
    of_files: int


Progress = Callable[[str, Taken], None]  # is told of a host

Of = TypeVar("Of")
Made = TypeVar("Made")


def sync(
    bringup: BringUp, nodes: Sequence[int], folder: str, files: Sequence[SyncedFile], progress: Progress
) -> dict[int, str]:
    """Bring the nodes' copies of the folder, which has these files, up to date. Returns the path of each copy.

    `progress` is called as hosts accept bytes. Raises NodeError with a line for each node that can't store the copy.
    """
    request = Sync(name_of_copy(folder), [list(file) for file in files], [])
    remedy = "leave it out with .gitignore"
    sources = [SourceFile(os.path.join(folder, file.path), file.size, remedy) for file in files]
    return mirror(bringup, nodes, request, sources, "--sync", progress)


class SourceFile(NamedTuple):
    """Where the bytes of a file to send are."""

    path: str
    size: int
    remedy: str  # if it can't be read


def mirror(
    bringup: BringUp,
    nodes: Sequence[int],
    request: Sync,
    sources: Sequence[SourceFile],
    option: str,
    progress: Progress,
    seconds: float = STUCK_SECONDS,
) -> dict[int, str]:
    """Have the nodes store the files of the request, of which they are sent what they lack. Returns the folders.

    `option` asked for it. `seconds`: how long a node may take to find out what it lacks. Raises NodeError with a line
    for each node that can't store them.
    """
    answers: dict[int, Wanted] = dict(
        zip(nodes, bringup.ask(dict.fromkeys(nodes, encoded(request)), Wanted, seconds), strict=True)
    )
    problems = {bringup.nodes.name(node): one.problem for node, one in answers.items() if one.problem}
    if problems:
        raise _not_stored(problems, bringup, option)
    runs = {node: tuple((first, end) for first, end in one.files) for node, one in answers.items()}
    places = _shared(runs, lambda several: tuple(place for run in several for place in range(*run)))
    ends = _shared(places, lambda files: list(accumulate(sources[place].size for place in files)))
    sent = dict.fromkeys(places, 0)
    reader = SharedReader(places, lambda place, start: _read(sources[place], option, start), bringup.clock)

    def taken(node: int, size: int) -> None:
        reader.taken(node)
        sent[node] += size
        files, all_sizes = bisect_right(ends[node], sent[node]), (ends[node] or [0])[-1]
        progress(bringup.nodes.name(node), Taken(sent[node], all_sizes, files, len(ends[node])))

    for node in places:
        taken(node, 0)
    pieces = {node: reader.chunks(node) for node in places}
    ended: dict[int, Synced] = send(bringup, pieces, "the folder", until=Synced, taken=taken)
    if problems := {bringup.nodes.name(node): one.problem for node, one in ended.items() if one.problem}:
        raise _not_stored(problems, bringup, option)
    return {node: one.folder for node, one in answers.items()}


def _shared(of_nodes: Mapping[int, Of], make: Callable[[Of], Made]) -> dict[int, Made]:
    """What is made of something of each node: one object for all that have the same."""
    made: dict[Of, Made] = {}
    for one in of_nodes.values():
        if one not in made:
            made[one] = make(one)
    return {node: made[one] for node, one in of_nodes.items()}


def _not_stored(problems: Mapping[str, str], bringup: BringUp, option: str) -> NodeError:
    told = {name: f"the copy can't be stored: {problem}" for name, problem in problems.items()}
    remedy = f"free some space there, let yourself write there, or sync less: see {option}"
    return NodeError(failed_hosts(told, host_count(bringup), remedy))


def host_count(bringup: BringUp) -> int:
    """How many hosts the nodes are on: roles may have several on one."""
    return len({bringup.nodes.name(node) for node in range(len(bringup.nodes))})


def _read(source: SourceFile, option: str, start: int = 0) -> Iterator[bytes]:
    left = source.size - start
    if left == 0:
        return
    try:
        with open(source.path, "rb", buffering=0, opener=_open_now) as opened:
            if start:
                opened.seek(start)
            while left and (data := opened.read(min(left, PIECE_BYTES))):
                left -= len(data)
                yield data
    except OSError as error:
        raise UsageError(f"{option}: {source.path} can't be read: {error.strerror}; {source.remedy}") from None
    if left:
        raise UsageError(f"{option}: {source.path} shrank while it was being sent; run the command again")


def _open_now(path: str, flags: int) -> int:
    """Open what was a file: it may have become a pipe, and nobody need ever write to that."""
    return os.open(path, flags | os.O_NONBLOCK)
