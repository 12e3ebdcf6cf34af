"""Asks a process for its stacks by our signal: faulthandler writes them to a memory file.

The signal would kill any other process, so it is sent only to single processes that have our file open and catch the
signal according to /proc, never to a process group. Forks of a rank have both; they share the file with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from ... import linux
from ...protocol.events import NO_HANDLER, SILENT, ThreadStack
from ...protocol.stacks import is_library
from ...rank.stack_server import FILE, signal_number
from .. import PACKAGE
from ..host import procfs
from .source_lines import SourceLines

SIGNAL = signal_number()
MEMFD = f"/memfd:{FILE} (deleted)"

NO_PYTHON = "no stacks: not a Python rank, or one without hooks"

_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100

_OURS = tuple(os.path.join(PACKAGE, room, "") for room in ("rank", "forkserver"))
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")


class SignalledProcess:
    """A process that has been sent the signal, unless there is a reason against it (`why`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.why = ""
        self._file = linux.descriptor(pid, (MEMFD,))
        self._blocked: set[str] = set()  # threads that had the signal blocked beforehand
        if not self._file:
            self.why = NO_PYTHON
        elif not procfs.has_signal(procfs.status(pid), "SigCgt", SIGNAL):
            self.why = NO_HANDLER
        else:
            self._blocked = _blocked(pid)
            try:
                os.truncate(self._file, 0)
                os.kill(pid, SIGNAL)
            except OSError as error:
                self.why = f"its stacks can't be requested: {error.strerror}"

    def threads(self) -> list[ThreadStack] | None:
        """The stacks, once they are written; none, with the reason in `why`, if there are none."""
        if self.why:
            return []
        if not self._is_written():
            return None
        found = self._read()
        self.why = "" if found else SILENT
        return found

    def _is_written(self) -> bool:
        """Whether the handler has finished. It has started if the file is not empty."""
        try:
            if os.stat(self._file).st_size == 0:
                return False
        except OSError:  # the process is gone
            return True
        pending = procfs.has_signal(procfs.status(self.pid), "ShdPnd", SIGNAL)
        return not pending and _blocked(self.pid) <= self._blocked

    def _read(self) -> list[ThreadStack]:
        try:
            with open(self._file, "rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
            os.truncate(self._file, 0)
        except OSError:
            return []
        return parse(text, SourceLines(f"/proc/{self.pid}/cwd").line)


def _blocked(pid: int) -> set[str]:
    """The threads that have the signal blocked, including one that is in our handler."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {task for task in tasks if procfs.has_signal(procfs.status(f"{pid}/task/{task}"), "SigBlk", SIGNAL)}


def parse(text: str, line_of: Callable[[str, int], str]) -> list[ThreadStack]:
    """Parse faulthandler's text into threads. It prints the main thread last; we put it first."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append({"name": head[2] or head[1], "frames": []})
            continue
        frame = _FRAME.match(line)
        if frame and threads and len(threads[-1]["frames"]) < _MOST_FRAMES:
            path, number = unescaped(frame[1]), int(frame[2]) if frame[2].isdigit() else 0
            if path.startswith(_OURS):
                if frame[3] == "_answer":  # our own thread, which serves the socket
                    threads.pop()
                continue
            source = "" if is_library(path) else line_of(path, number)
            threads[-1]["frames"].append((path, number, unescaped(frame[3]), source))
    return threads[-1:] + threads[:-1]


def unescaped(text: str) -> str:
    """Undo faulthandler's escapes of non-ASCII characters: \\xNN, \\uNNNN and \\UNNNNNNNN."""
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)
