"""Shows a status line, or several, as the last of the terminal while something takes long, and erases it afterwards.

Meanwhile, everything else that writes to the terminal does so inside `with aside`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from launchpad import caller
from launchpad.protocol.events import STDERR

# What takes less time is not worth a line.
DELAY_SECONDS = 1.0

# How long to wait at the end for a terminal that is paused (Ctrl-S).
LEAVE_SECONDS = 0.5

_NEWLINE = 10

_lock = threading.Lock()
_shown: StatusLine | None = None
_asides = 0
_mid_line = False  # the cursor is after an unfinished line of other output


class StatusLine:
    """Shows what `draw` returns, lines without the last newline, once the block has taken DELAY_SECONDS.

    It is drawn on stderr's terminal, and only while we are in its foreground.
    """

    def __init__(self, draw: Callable[[], bytes], every: float, *, shows: bool) -> None:
        """`every`: seconds between redraws. Unless `shows`, it never draws anything."""
        self._draw = draw
        self._every = every
        self._shows = shows
        self._closed = threading.Event()
        self._stands = 0  # how many lines
        self._line = b""  # as last drawn

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the delay, after which the line appears."""
        global _shown, _mid_line
        if self._shows:
            with _lock:
                _shown, _mid_line = self, False
            threading.Thread(target=self._run, name="status line", daemon=True).start()

    def close(self) -> None:
        """Erase the line for good."""
        global _shown
        self._closed.set()
        if _lock.acquire(timeout=LEAVE_SECONDS):
            try:
                self.erase()
                if _shown is self:
                    _shown = None
            finally:
                _lock.release()

    def erase(self) -> None:
        """Erase the line until it is drawn again. Call it with the lock held."""
        if self._stands:
            if _in_foreground():
                _write(_erase(self._stands))
            self._stands = 0

    def put(self) -> None:
        """Show the line again, as last drawn. Call it with the lock held."""
        if self._line and not (_asides or _mid_line or self._closed.is_set()) and _in_foreground():
            lines = self._line.split(b"\n")
            before = _erase(self._stands) if self._stands > 1 else b"\r"
            self._stands = len(lines)
            _write(before + b"\x1b[K\r\n".join(lines) + b"\x1b[K")

    def _run(self) -> None:
        wait = DELAY_SECONDS
        while not self._closed.wait(wait):
            wait = self._every
            line = self._draw()
            with _lock:
                self._line = line
                self.put()


class Aside:
    """Hides the status line during a block that writes to the terminal or reads from it."""

    def __enter__(self) -> None:
        global _asides
        with _lock:
            _asides += 1
            if _shown is not None:
                _shown.erase()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _asides
        with _lock:
            _asides -= 1
            if _shown is not None:
                _shown.put()


aside = Aside()


def is_shown() -> bool:
    """Whether there is a status line, or may be soon."""
    return _shown is not None


def wrote(end: int) -> None:
    """Report, inside `aside`, the last byte written: after an unfinished line there is no room for the status line."""
    global _mid_line
    _mid_line = end != _NEWLINE


def _erase(lines: int) -> bytes:
    """What erases so many lines, at the end of the last."""
    return b"\x1b[%dA\r\x1b[J" % (lines - 1) if lines > 1 else b"\r\x1b[K"


def _in_foreground() -> bool:
    try:
        return caller.in_foreground(STDERR)
    except OSError:  # not our session's terminal, so no other job of ours uses it
        return True


def _write(data: bytes) -> None:
    try:
        os.write(STDERR, data)
    except OSError:  # the terminal is gone, or full and non-blocking
        pass
