"""The launcher's own messages: how they look, and on stderr where there is no console."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from launchpad.output import status_line
from launchpad.protocol.events import STDERR
from launchpad.protocol.printable import printable_lines


def say_on_stderr(text: str, *, bad: bool = False) -> None:
    """Show a message of the launcher's own before there is a console, or without one, if stderr takes it."""
    with status_line.aside, suppress(OSError):
        os.write(STDERR, (message_line(text, wants_colour(STDERR, os.environ), bad) + "\n").encode(errors="replace"))


def say_nothing(*_: object, **__: object) -> None:
    """Used instead where nobody is to be told, or there is nobody."""


class QueuedMessages:
    """Shows messages in a thread of its own, for threads that must not wait for a paused terminal."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Show a message soon."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
                self._thread.start()
        self._queue.put(text)

    def close(self) -> None:
        """Wait until all have been shown, for a moment at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(status_line.LEAVE_SECONDS)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            self._show(text)


def message_line(text: str, colour: bool, bad: bool) -> str:
    """A message of the launcher's own, as it appears on stderr: each line has the prefix, or is indented.

    So nobody's text can stand at column 0.
    """
    prefix = f"\x1b[0;{'1;31' if bad else '1;36'}mlaunchpad:\x1b[0m" if colour else "launchpad:"
    first, *more = printable_lines(text)
    return "\n".join([f"{prefix} {first}", *(line if line[:1] in ("", " ") else f"{prefix} {line}" for line in more)])


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether to use colour: only on a terminal that is not dumb, and unless NO_COLOR is set (https://no-color.org)."""
    return os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
