"""Shows what the ranks of `launchpad bench` tell while they tell it, and keeps it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.bench.results import Link, Message, Row, Setting, Unavailable, from_line
from launchpad.events import STDERR, STDOUT, ConsoleClosed, Output
from launchpad.report import bench
from launchpad.report.console import say_on_stderr
from launchpad.report.writer import Writer


class Display:
    """Keeps what the ranks tell and shows it as it comes: a table on standard output, else progress on a terminal."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.found: list[Message] = []
        self.missing: dict[str, str] = {}  # backends, and why they can't be had
        self._as_json = as_json
        self._progress = not quiet and sys.stderr.isatty() and (as_json or not sys.stdout.isatty())
        self._post: Callable[[Any], None] = lambda _: None
        self._writer = Writer(lambda _: None, self._failed)

    def sink(self, post: Callable[[Any], None]) -> Sink:
        """What takes the standard output of one job's ranks."""
        self._post = post
        return Sink(self._take, lambda line: self._writer.put([(STDERR, line + b"\n")]))

    def unavailable(self, message: Unavailable) -> None:
        """Say that a backend can't be had, once: every rank of a host tells it."""
        if message in self.found:
            return
        self.found.append(message)
        self.missing.setdefault(message.backend, message.reason)
        say_on_stderr(message.reason)

    def is_unavailable(self, backend: str) -> bool:
        """Whether that was said of it."""
        return any(isinstance(one, Unavailable) and one.backend == backend for one in self.found)

    @property
    def rows(self) -> list[Row]:
        """What was measured so far."""
        return [one for one in self.found if isinstance(one, Row)]

    def finish(self) -> None:
        """Show what can be said at the end only, and wait until all is written."""
        if self._as_json:
            self._write([json.dumps(bench.as_json(self.found), indent=1)])
        else:
            self._write(bench.fit_table(self.rows))
        self._writer.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Unavailable):
            self.unavailable(message)
            return
        links = [one for one in self.found if isinstance(one, Link) and one.backend == message.backend]
        first_row = isinstance(message, Row) and not (self.found and isinstance(self.found[-1], Row))
        self.found.append(message)
        if isinstance(message, Setting):
            self.missing |= message.missing
            self._begin, self._points, self._done = time.monotonic(), message.points, 0
        if isinstance(message, Row):
            self._done += 1
            self._show_progress(message)
        if self._as_json:
            return
        if isinstance(message, Setting):
            self._write(bench.heading(message))
        elif first_row:
            self._write([*bench.link_matrix(links), "", *bench.columns()])
        if isinstance(message, Row):
            self._write([bench.row(message)])

    def _show_progress(self, message: Row) -> None:
        if not self._progress:
            return
        left = (time.monotonic() - self._begin) / self._done * (self._points - self._done)
        text = f"{message.backend}: {self._done} of {self._points} measured, about {left:.0f} s left"
        shown = f"\r\x1b[K{text}" if self._done < self._points else "\r\x1b[K"
        self._writer.put([(STDERR, shown.encode())])

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            self._writer.put([(STDOUT, ("\n".join(lines) + "\n").encode(errors="replace"))])

    def _failed(self, fd: int, error: OSError) -> None:
        if fd == STDOUT:
            self._post(ConsoleClosed(time.monotonic_ns(), error.strerror or str(error)))


class Sink:
    """The lines of the ranks' standard output, as the messages that they are."""

    deadline = None

    def __init__(self, take: Callable[[Message], None], stray: Callable[[bytes], None]) -> None:
        """`stray` takes a line that is none: an interpreter's start-up may print before the rank has its channel."""
        self._take = take
        self._stray = stray
        self._unfinished: dict[int, bytes] = {}  # by rank

    def on(self, event: Any) -> bool:
        """Take an event; nothing is held."""
        if type(event) is Output and event.stream == STDOUT:
            *lines, rest = (self._unfinished.get(event.rank, b"") + event.data).split(b"\n")
            self._unfinished[event.rank] = rest
            for line in lines:
                try:
                    message = from_line(line)
                except ValueError:
                    self._stray(line)
                else:
                    self._take(message)
        return False

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is left to be written."""
