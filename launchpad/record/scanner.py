"""Finds the lines of certain events in a record, without looking at the others: most of events.jsonl is exits."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from launchpad.record import files, job_store

# How much of the file is looked at at a time. Much more than this would be new memory for each block.
_BLOCK_BYTES = 1 << 18


class Scanner:
    """Goes through events.jsonl once. It takes about a second per GiB, and the memory of a block."""

    def __init__(self, folder: str, file: BinaryIO, *names: str) -> None:
        """`names`: those of the events."""
        self._folder = folder
        self._file = file
        # JSON has no newline within a line.
        self._pattern = re.compile(rb'\n\{"event": "(?:%s)"' % "|".join(names).encode())
        # What has no end yet, and its offset: as if a newline stood before the file.
        self._rest, self._begin = b"\n", -1
        self._found: deque[tuple[int, bytes]] = deque()

    def more(self) -> Iterator[tuple[int, bytes]]:
        """The lines that there are by now, each with the offset of the next one. Raises OSError and Unreadable."""
        while True:
            while self._found:
                yield self._found.popleft()
            block = self._file.read(_BLOCK_BYTES)
            if not block:
                return
            data = self._rest + block
            end = data.rfind(b"\n")
            for match in self._pattern.finditer(data, 0, end):
                close = data.find(b"\n", match.end())
                self._found.append((self._begin + close + 1, data[match.start() + 1 : close]))
            self._rest, self._begin = data[end:], self._begin + end
            if len(self._rest) > files.MOST_BYTES:
                why = f"{job_store.EVENTS} has a line of more than {files.MOST_BYTES >> 20} MiB"
                raise files.Unreadable(self._folder, why)
