"""Reads the source lines of frames."""

from __future__ import annotations

import os
import stat

from ...protocol.events import Frame
from ...protocol.stacks import is_library

# A larger file is not read.
_MOST_SOURCE = 4 << 20


class SourceLines:
    """Source lines for the frames of stacks."""

    def __init__(self, folder: str) -> None:
        """`folder`: what paths are relative to."""
        self._folder = folder
        self._lines: dict[str, list[str]] = {}

    def line(self, path: str, number: int) -> str:
        """A line without its indentation; "" if it can't be read."""
        if path not in self._lines:
            self._lines[path] = self._load(path)
        lines = self._lines[path]
        return lines[number - 1].strip()[:200] if 0 < number <= len(lines) else ""

    def _load(self, path: str) -> list[str]:
        try:
            fd = os.open(os.path.join(self._folder, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, encoding="utf-8", errors="replace") as file:
                found = os.fstat(fd)
                regular = stat.S_ISREG(found.st_mode) and found.st_size < _MOST_SOURCE
                return file.read().split("\n") if regular else []  # splitlines: a form feed, too
        except (OSError, ValueError):
            return []

    def with_source(self, file: str, line: int, function: str) -> Frame:
        """A frame with its line, unless it is a library's."""
        return file, line, function, "" if is_library(file) else self.line(file, line)
