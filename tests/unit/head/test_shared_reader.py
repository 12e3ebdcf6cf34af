"""head/shared_reader: files for several nodes are read once, and not too far ahead of the slowest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from launchpad.head import shared_reader
from launchpad.head.shared_reader import MOST_ALONE, PATIENCE_SECONDS, SharedReader
from launchpad.protocol.commands import FileChunk
from launchpad.protocol.wire import decode, encode

FILES = [b"aa", b"", b"bbb", b"c", b"dddd"]
ALL = [0, 1, 2, 3, 4]


class Disk:
    """Yields the files in pieces of 2 bytes, and remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, number: int, first: int) -> Iterator[bytes]:
        self.read.append(number)
        for start in range(first, len(FILES[number]), 2):
            yield FILES[number][start : start + 2]


class Reader(SharedReader):
    """One with a disk and a clock of its own."""

    def __init__(self, wanted: Mapping[int, Sequence[int]]) -> None:
        self.disk = Disk()
        self.now = 0.0
        super().__init__(wanted, self.disk, lambda: self.now)


class Taker:
    """A node that accepts one chunk at a time."""

    def __init__(self, reader: SharedReader, node: int) -> None:
        self._reader, self._node = reader, node
        self._chunks = reader.chunks(node)
        self.got: list[tuple[int, bytes]] = []

    def get(self) -> bool:
        """Get a chunk, without accepting it. Returns whether there was one."""
        frame = next(self._chunks, None)
        if frame is None:
            return False
        chunk = decode(encode(frame))
        assert isinstance(chunk, FileChunk)
        assert bytes(frame.data) == chunk.data
        self.got.append((chunk.file, chunk.data))
        return True

    def take(self) -> bool:
        """Get and accept a chunk."""
        there = self.get()
        if there:
            self._reader.taken(self._node)
        return there

    @property
    def bytes(self) -> bytes:
        """All that it has got."""
        return b"".join(data for _, data in self.got)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "PIECE_BYTES", 3)


def test_small_files_come_together_and_large_ones_in_parts() -> None:
    one = Taker(Reader({7: ALL}), 7)
    while one.take():
        pass
    assert one.got == [(0, b"aa"), (2, b"bbb"), (3, b"cdd"), (4, b"dd")]


def test_each_file_is_read_once_for_all_nodes_that_want_it() -> None:
    reader = Reader({1: [0, 2, 4], 2: [2, 3], 3: []})
    nodes = {node: Taker(reader, node) for node in (1, 2, 3)}
    for node in nodes.values():
        while node.take():
            pass
    assert {node: one.bytes for node, one in nodes.items()} == {1: b"aabbbdddd", 2: b"bbbc", 3: b""}
    assert reader.disk.read == [0, 2, 3, 4]


def test_nodes_that_want_the_same_are_sent_the_same_object() -> None:
    reader = Reader({1: ALL, 2: ALL})
    first, second = (next(reader.chunks(node)) for node in (1, 2))
    assert first is second


def test_a_fast_node_waits_until_a_slow_one_has_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "KEPT_BYTES", 4)
    reader = Reader({1: ALL, 2: ALL})
    fast, slow = Taker(reader, 1), Taker(reader, 2)
    assert [fast.take(), fast.take(), fast.take()] == [True, True, False]
    assert slow.get()
    assert not fast.take(), "what is on its way to the slow one is in memory, too"
    while slow.take():
        fast.take()
    while fast.take():
        pass
    assert slow.bytes == fast.bytes == b"aabbbcdddd"
    assert reader.disk.read == ALL


def test_a_node_that_is_far_slower_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "KEPT_BYTES", 4)
    reader = Reader({1: ALL, 2: ALL, 3: ALL})
    fast, other, slow = (Taker(reader, node) for node in (1, 2, 3))
    assert slow.get()
    for one in (fast, other):
        while one.take():
            pass
    reader.now = PATIENCE_SECONDS
    while fast.take() | other.take():
        pass
    assert fast.bytes == other.bytes == b"aabbbcdddd"
    reader.taken(3)
    while slow.take():
        pass
    assert slow.bytes == b"aabbbcdddd"
    assert reader.disk.read == [*ALL, 2, 3, 4], "for the slow one again"


def test_few_nodes_go_on_alone_as_each_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "KEPT_BYTES", 4)
    reader = Reader(dict.fromkeys(range(MOST_ALONE + 2), ALL))
    fast, *slow = (Taker(reader, node) for node in range(MOST_ALONE + 2))
    while fast.take():
        pass
    reader.now = 10 * PATIENCE_SECONDS
    assert not fast.take(), "the last one is as slow"
    for one in slow:
        while one.take():
            fast.take()
        assert one.bytes == b"aabbbcdddd"
    assert fast.bytes == b"aabbbcdddd"
