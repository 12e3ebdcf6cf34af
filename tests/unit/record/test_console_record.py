"""The record of a job's console: what is read while it is written."""

from __future__ import annotations

from pathlib import Path

from launchpad.record.console_record import ConsoleEntry, ConsoleReader, segment
from tests.support.detach import write

# The record of a console.


def test_an_entry_is_read_as_it_was_written() -> None:
    for text in ("", "a\nb", "\r\x00\x1b[K", "\u2028ü", b"\xff\xe2\x82".decode(errors="surrogateescape"), "\ud800"):
        entry = ConsoleEntry("output", 1.5, text, 3, 2, "[n 3]", within=True)
        assert ConsoleEntry.of(entry.line()) == entry
        assert entry.line().count(b"\n") == 1
    assert ConsoleEntry.of(b"Traceback (most recent call last):\n") == ConsoleEntry(
        "print", text="Traceback (most recent call last):"
    )


def test_the_last_lines_are_whole_ones(tmp_path: Path) -> None:
    write(
        tmp_path,
        1,
        ConsoleEntry("output", 1, "a\nb\nc\nhalf ", 0),
        ConsoleEntry("output", 2, "x\ny", 1),
        ConsoleEntry("output", 3, "of it\nd\n", 0, within=True),
        ConsoleEntry("output", 4, "z\n", 1, within=True),
    )

    def last(lines: int) -> list[tuple[int, str]]:
        reader = ConsoleReader(str(tmp_path))
        reader.start_at_last(lines)
        found = [(entry.rank, entry.text) for entry in reader.more() if entry.text]
        reader.close()
        return found

    assert last(100) == [(0, "a\nb\nc\nhalf "), (1, "x\ny"), (0, "of it\nd\n"), (1, "z\n")]
    assert last(5) == [(0, "c\nhalf "), (1, "x\ny"), (0, "of it\nd\n"), (1, "z\n")]
    assert last(4) == [(1, "x\ny"), (0, "d\n"), (1, "z\n")]
    assert last(2) == [(0, "d\n")]


def test_a_time_to_begin_with(tmp_path: Path) -> None:
    write(tmp_path, 1, *(ConsoleEntry("say", at, str(at)) for at in (1, 2)))
    write(tmp_path, 2, ConsoleEntry("say", 3, "3"), ConsoleEntry("print", text="raw"), ConsoleEntry("say", 4, "4"))
    for when, expected in ((0, "1 2 3 raw 4"), (2, "2 3 raw 4"), (3.5, "raw 4"), (4.5, "")):
        reader = ConsoleReader(str(tmp_path))
        reader.start_since(when)
        assert [entry.text for entry in reader.more()] == expected.split()
        reader.close()


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    line = ConsoleEntry("say", 1, "whole").line()
    path = Path(segment(str(tmp_path), 1))
    path.write_bytes(line[:5])
    reader = ConsoleReader(str(tmp_path))
    assert list(reader.more()) == []
    with path.open("ab") as file:
        file.write(line[5:])
    assert [entry.text for entry in reader.more()] == ["whole"]
    reader.close()
