"""head/shared_reader: files for several nodes are read once, and not too far ahead of the slowest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launchpad.head import shared_reader
from launchpad.head.shared_reader import SharedReader

FILES = [b"aa", b"", b"bbb", b"c", b"dddd"]


class Disk:
    """Yields the files in pieces of 2 bytes, and remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, number: int) -> Iterator[bytes]:
        self.read.append(number)
        for start in range(0, len(FILES[number]), 2):
            yield FILES[number][start : start + 2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "PIECE_BYTES", 3)


def test_small_files_come_together_and_large_ones_in_parts() -> None:
    reader = SharedReader({7: [0, 1, 2, 3, 4]}, Disk())
    chunks = list(reader.chunks(7))
    assert None not in chunks
    assert [(one.file, one.data) for one in chunks if one] == [(0, b"aa"), (2, b"bbb"), (3, b"cdd"), (4, b"dd")]


def test_each_file_is_read_once_for_all_nodes_that_want_it() -> None:
    disk = Disk()
    reader = SharedReader({1: [0, 2, 4], 2: [2, 3], 3: []}, disk)
    nodes = {node: reader.chunks(node) for node in (1, 2, 3)}
    got = {node: b"".join(chunk.data for chunk in chunks if chunk) for node, chunks in nodes.items()}
    assert got == {1: b"aabbbdddd", 2: b"bbbc", 3: b""}
    assert disk.read == [0, 2, 3, 4]


def test_a_fast_node_waits_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reader, "KEPT_BYTES", 4)
    disk = Disk()
    reader = SharedReader({1: [0, 2, 3, 4], 2: [0, 2, 3, 4]}, disk)
    fast, slow = reader.chunks(1), reader.chunks(2)
    got = [next(fast), next(fast), next(fast)]
    assert got[-1] is None
    assert disk.read == [0, 2]
    rest = b""
    for chunk in slow:
        rest += chunk.data if chunk else b""
        got.append(next(fast, None))
    got += list(fast)
    assert rest == b"".join(one.data for one in got if one) == b"aabbbcdddd"
    assert disk.read == [0, 2, 3, 4]
