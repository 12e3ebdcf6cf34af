"""What the tests of detach share."""

from __future__ import annotations

from pathlib import Path

from launchpad.record.console_record import ConsoleEntry, segment


def write(folder: Path, number: int, *entries: ConsoleEntry) -> None:
    with open(segment(str(folder), number), "ab") as file:
        for entry in entries:
            file.write(entry.line())
