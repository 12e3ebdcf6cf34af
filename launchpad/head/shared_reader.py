"""Reads files that several nodes want, each once, and keeps in memory only what some of those have yet to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launchpad.head.sender import PIECE_BYTES
from launchpad.protocol.commands import FileChunk

# The most bytes in memory: so far may the fastest node be ahead of the slowest.
KEPT_BYTES = 64 << 20


class _Piece(NamedTuple):
    file: int
    data: bytes
    takers: int  # how many nodes have yet to take it


class SharedReader:
    """The contents of files, for nodes that each want some of them."""

    def __init__(self, wanted: Mapping[int, Sequence[int]], read: Callable[[int], Iterator[bytes]]) -> None:
        """`wanted`: by node, its files, ascending. `read`: the bytes of a file, in pieces of at most PIECE_BYTES."""
        sets = {id(files): frozenset(files) for files in wanted.values()}
        self._wanted = {node: sets[id(files)] for node, files in wanted.items()}
        self._takers = Counter(file for files in wanted.values() for file in files)
        self._source = ((file, data) for file in sorted(self._takers) for data in read(file))
        self._kept: dict[int, _Piece] = {}  # by number
        self._kept_bytes = 0
        self._next = 0  # the number of the next piece to be read

    def chunks(self, node: int) -> Iterator[FileChunk | None]:
        """What the node wants, small files together in one chunk; None while it is too far ahead of another node."""
        batch: list[bytes] = []
        first, size = 0, 0
        for piece in self._pieces(node):
            if batch and (piece is None or size + len(piece.data) > PIECE_BYTES):
                yield FileChunk(first, b"".join(batch))
                batch, size = [], 0
            if piece is None:
                yield None
                continue
            if not batch:
                first = piece.file
            batch.append(piece.data)
            size += len(piece.data)
        if batch:
            yield FileChunk(first, b"".join(batch))

    def _pieces(self, node: int) -> Iterator[_Piece | None]:
        wanted, number = self._wanted[node], 0
        while True:
            if number == self._next:
                if self._kept_bytes >= KEPT_BYTES:
                    yield None
                    continue
                if not self._read():
                    return
            piece = self._kept.get(number)
            if piece is not None and piece.file in wanted:
                self._taken(number, piece)
                yield piece
            number += 1

    def _read(self) -> bool:
        for file, data in self._source:
            self._kept[self._next] = _Piece(file, data, self._takers[file])
            self._kept_bytes += len(data)
            self._next += 1
            return True
        return False

    def _taken(self, number: int, piece: _Piece) -> None:
        if piece.takers > 1:
            self._kept[number] = piece._replace(takers=piece.takers - 1)
        else:
            del self._kept[number]
            self._kept_bytes -= len(piece.data)
