"""Gives a forked process its own place for the output that pytest captures: pytest's file is shared by all forks."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from typing import Any

import pytest

from launchpad.agent.stacks import signalled
from launchpad.diagnosis.mismatch import short_path

_HERE = os.path.dirname(__file__)


class Captured:
    """Memory files for what a process writes to its standard output and error while pytest captures it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self.crash = os.memfd_create("crash")  # for faulthandler

    def take_over(self, config: pytest.Config) -> None:
        """In the process: have pytest capture to these files, if it captures descriptors.

        What it doesn't capture, as with -s, goes to files that other ranks write to as well: each line at once.
        """
        stream: Any
        for stream in (sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(AttributeError, ValueError):  # closed, or its buffer has another wrapper now
                stream.reconfigure(line_buffering=True, write_through=False)
        manager: Any = config.pluginmanager.getplugin("capturemanager")
        capturing = manager and manager._global_capturing
        for mine, theirs in zip(self._files, (capturing.out, capturing.err) if capturing else (), strict=False):
            kept = getattr(theirs, "tmpfile", None)
            target = getattr(theirs, "targetfd", None)
            if kept is not None and target is not None:  # neither -s nor --capture=sys
                os.dup2(mine, kept.fileno(), inheritable=False)

    def read(self) -> list[tuple[str, str]]:
        """From outside: what pytest has not read yet, as ("stdout", text), ("stderr", text); nothing for empty ones."""
        found = []
        for name, file in zip(("stdout", "stderr"), self._files, strict=True):
            if text := _read(file):
                found.append((name, text))
        return found

    def read_crash(self) -> list[str]:
        """From outside: where the process was when it crashed, innermost first; empty if it did not."""
        text = _read(self.crash)
        begin = text.find("Current thread")
        threads = signalled.parse(text[begin:].partition("\n\n")[0], linecache.getline) if begin >= 0 else []
        lines = []
        for path, line, function, source in threads[0]["frames"] if threads else ():
            if is_pytests(path):
                break
            lines.append(f"{short_path(path, os.getcwd())}:{line} in {function}: {source.strip()}".rstrip(": "))
        return lines

    def close(self) -> None:
        """Close the files here."""
        for file in (*self._files, self.crash):
            os.close(file)


def is_pytests(path: str) -> bool:
    """Whether code in this file only calls a test: it is pytest's, or the plugin's."""
    return "/_pytest/" in path or path.startswith(_HERE)


def _read(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
