from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.record import files, scanner
from launchpad.record.scanner import Scanner


def test_a_file_that_grows_is_gone_on_with_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [b'{"event": "A", "n": 1}', b'{"event": "Ab"}', b'{"event": "B"}', b'{"event": "A", "text": "\xff"}']
    with path.open("wb", buffering=0) as written, path.open("rb") as file:
        reader = Scanner(str(tmp_path), file, "A", "B")
        written.write(lines[0])
        assert list(reader.more()) == []
        written.write(b"\n" + lines[1] + b"\n" + lines[2] + b"\n" + lines[3])
        begun = reader.more()
        assert next(begun) == (len(lines[0]) + 1, lines[0])
        assert [line for _, line in reader.more()] == [lines[2]]  # whoever goes on has the rest
        written.write(b"\n")
        assert list(reader.more()) == [(path.stat().st_size, lines[3])]


def test_a_line_without_an_end_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    monkeypatch.setattr(scanner, "_BLOCK_BYTES", 4)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "A", "text": "long"')
    with path.open("rb") as file, pytest.raises(files.Unreadable, match="has a line of more than"):
        list(Scanner(str(tmp_path), file, "A").more())
