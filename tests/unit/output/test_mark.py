"""output/mark: when all files are known."""

from __future__ import annotations

import queue
from pathlib import Path

from launchpad.output.mark import SinkMark
from launchpad.output.writer import Writer

DEADLINE = 30.0


def test_it_is_done_when_all_have_written() -> None:
    done: list[SinkMark] = []
    mark = SinkMark(done.append)
    mark.awaits("a", 1)
    mark.awaits("b", 2)
    mark.written({"x": 1})
    mark.written({"y": 2})
    assert not done
    mark.written({})
    assert done == [mark]
    assert (mark.states, mark.sizes, mark.failed) == ({"a": 1, "b": 2}, {"x": 1, "y": 2}, False)


def test_whoever_can_not_write_holds_up_nobody() -> None:
    done: list[SinkMark] = []
    mark = SinkMark(done.append)
    mark.awaits("a", 1)
    mark.fail()
    mark.written({})
    assert done == [mark]
    assert mark.failed


def test_a_writer_knows_how_long_its_files_are(tmp_path: Path) -> None:
    """At that point, whatever comes after it."""
    done: queue.SimpleQueue[SinkMark] = queue.SimpleQueue()
    writer = Writer(lambda _: None, lambda *_: None)
    path = str(tmp_path / "a")
    with (tmp_path / "b").open("wb", buffering=0) as file:
        mark = SinkMark(done.put)
        writer.put([(path, b"12345"), (file.fileno(), b"123"), (2, b"")])
        mark.awaits("writer", None)
        writer.mark(mark)
        mark.written({})
        assert done.get(timeout=DEADLINE).sizes == {path: 5, str(tmp_path / "b"): 3}
        writer.close()
