"""Reads files that several nodes want, each once, and keeps in memory only what some of those have yet to accept.

What is kept are the frames that are sent, so the memory is the same for any number of nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launchpad.head.sender import PIECE_BYTES
from launchpad.protocol.commands import FileChunk
from launchpad.protocol.wire import encoded

# The most bytes in memory: so far may the fastest node be ahead of the slowest.
KEPT_BYTES = 16 << 20

# If the nodes together take longer than this for KEPT_BYTES, the slowest go on alone, up to this number.
PATIENCE_SECONDS = 10.0
MOST_ALONE = 4


class _Piece(NamedTuple):
    """Bytes of a file, and who wants it."""

    file: int
    start: int
    data: bytes
    nodes: frozenset[int]


class _SharedChunk(NamedTuple):
    """A chunk that not all nodes have accepted."""

    file: int  # where it begins
    start: int
    frame: FileChunk
    nodes: set[int]  # those


class SharedReader:
    """The contents of files, for nodes that each want some of them."""

    def __init__(
        self,
        wanted: Mapping[int, Sequence[int]],
        read: Callable[[int, int], Iterator[bytes]],
        clock: Callable[[], float],
    ) -> None:
        """`wanted`: by node, its files, ascending.

        `read`: the bytes of a file, from this one on, in pieces of at most PIECE_BYTES. `clock`: seconds.
        """
        self._wanted = wanted
        self._read = read
        self._clock = clock
        self._source = _chunks(self._pieces(_wanting(wanted)))
        self._kept: dict[int, _SharedChunk] = {}  # by number
        self._kept_bytes = 0
        self._next = 0  # the number of the next chunk to be read
        self._be_patient()  # sets until when how many bytes are to be read
        self._in_flight: dict[int, deque[int]] = {node: deque() for node in wanted}  # by node, their numbers
        self._alone: dict[int, tuple[int, int]] = {}  # by node that is: where it goes on

    def chunks(self, node: int) -> Iterator[FileChunk | None]:
        """What the node wants, small files together; None while it is too far ahead of another node."""
        number = 0
        while node not in self._alone:
            if number == self._next:
                if self._kept_bytes >= KEPT_BYTES and not self._leave_behind(node):
                    yield None
                    continue
                if not self._read_on():
                    return
            kept = self._kept.get(number)
            if kept is not None and node in kept.nodes:
                self._in_flight[node].append(number)
                yield kept.frame
            number += 1
        yield from (frame for *_, frame, _ in _chunks(self._rest(node)))

    def taken(self, node: int) -> None:
        """The node has accepted a chunk."""
        if self._in_flight[node]:
            self._drop(self._in_flight[node].popleft(), node)

    def _pieces(self, nodes: Mapping[int, frozenset[int]]) -> Iterator[_Piece]:
        for file in sorted(nodes):
            start = 0
            for data in self._read(file, 0):
                yield _Piece(file, start, data, nodes[file])
                start += len(data)

    def _rest(self, node: int) -> Iterator[_Piece]:
        first, start = self._alone[node]
        itself = frozenset([node])
        for file in self._wanted[node]:
            if file >= first:
                for data in self._read(file, start if file == first else 0):
                    yield _Piece(file, 0, data, itself)

    def _read_on(self) -> bool:
        for kept in self._source:
            self._kept[self._next] = kept
            self._kept_bytes += len(kept.frame.data)
            self._due_bytes -= len(kept.frame.data)
            self._next += 1
            if self._due_bytes <= 0:
                self._be_patient()
            return True
        return False

    def _be_patient(self) -> None:
        self._due_bytes, self._due = KEPT_BYTES, self._clock() + PATIENCE_SECONDS

    def _drop(self, number: int, node: int) -> None:
        kept = self._kept.get(number)
        if kept is not None:
            kept.nodes.discard(node)
            if not kept.nodes:
                del self._kept[number]
                self._kept_bytes -= len(kept.frame.data)

    def _leave_behind(self, fastest: int) -> bool:
        """Have the slowest go on alone if the others have waited for long. Returns whether that made room."""
        if self._clock() < self._due:
            return False
        self._be_patient()
        slowest = self._kept[min(self._kept)].nodes - {fastest}
        for node in sorted(slowest)[: MOST_ALONE - len(self._alone)]:
            mine = [number for number, kept in self._kept.items() if node in kept.nodes]
            sent = set(self._in_flight[node])
            rest = [number for number in mine if number not in sent]
            # If all that is kept has been sent to it, it is as far as the others.
            if rest:
                self._alone[node] = self._kept[rest[0]][:2]
                self._in_flight[node].clear()
                for number in mine:
                    self._drop(number, node)
        return self._kept_bytes < KEPT_BYTES


def _wanting(wanted: Mapping[int, Sequence[int]]) -> dict[int, frozenset[int]]:
    """The nodes that want each file: the same object for files that the same ones want."""
    groups: dict[int, tuple[Sequence[int], list[int]]] = {}  # nodes that want the same share one list of files
    for node, files in wanted.items():
        groups.setdefault(id(files), (files, []))[1].append(node)
    found: dict[int, frozenset[int]] = {}
    unions: dict[tuple[frozenset[int], int], frozenset[int]] = {}
    for place, (files, nodes) in groups.items():
        for file in files:
            before = found.get(file, frozenset())
            if (before, place) not in unions:
                unions[before, place] = before.union(nodes)
            found[file] = unions[before, place]
    return found


def _chunks(pieces: Iterator[_Piece]) -> Iterator[_SharedChunk]:
    """The pieces, small ones together if the same nodes want them."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if batch and (size + len(piece.data) > PIECE_BYTES or piece.nodes != batch[0].nodes):
            yield _chunk(batch)
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.data)
    if batch:
        yield _chunk(batch)


def _chunk(batch: Sequence[_Piece]) -> _SharedChunk:
    first = batch[0]
    frame = encoded(FileChunk(first.file, b"".join(piece.data for piece in batch)))
    return _SharedChunk(first.file, first.start, frame, set(first.nodes))
