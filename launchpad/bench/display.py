"""Collects the results that the ranks of `launchpad bench` report, and shows them as they arrive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.bench import tables
from launchpad.bench.messages import LinkTiming, Message, Point, Row, Setting, Unavailable, from_line
from launchpad.console.message import say_on_stderr
from launchpad.console.terminal import HowFar, can_draw, columns, drawn, status_line
from launchpad.output.status_line import StatusLine
from launchpad.output.writer import Target, Writer
from launchpad.protocol.events import STDERR, STDOUT, ConsoleClosed, Output, PhaseChanged

if TYPE_CHECKING:
    from rich.console import RenderableType

# How often the status line is redrawn: seldom, so as not to disturb the measurement.
EVERY_SECONDS = 1.0


class Display:
    """Collects results, and shows them as a table on stdout, with a status line on a terminal."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.found: list[Message] = []
        self.missing: dict[str, str] = {}  # why backends are unavailable
        self._as_json = as_json
        self._quiet = quiet
        self._draws = not as_json and can_draw(STDOUT, os.environ)
        self._post: Callable[[Any], None] = lambda _: None
        self._writer = Writer(lambda _: None, self._failed)
        self._line: StatusLine | None = None
        self._work = HowFar("", 0, 0)
        self._begin = 0.0  # when the first point began

    def begin(self, backend: str) -> None:
        """The job of this backend is next."""
        self._work = HowFar(f"{backend}: starting the ranks", 0, 0)

    def sink(self, post: Callable[[Any], None]) -> BenchSink:
        """The sink for the stdout of one job's ranks."""
        self._post = post
        self._line = status_line(lambda: self._work, every=EVERY_SECONDS, quiet=self._quiet)
        self._line.start()
        return BenchSink(self._take, lambda line: self._writer.put([(STDERR, line + b"\n")]), self.rest)

    def rest(self) -> None:
        """The measurement has ended: remove the status line."""
        if self._line is not None:
            self._line.close()

    def unavailable(self, message: Unavailable) -> None:
        """Report once that a backend is unavailable: every rank of a host says so."""
        if message in self.found:
            return
        self.found.append(message)
        self.missing.setdefault(message.backend, message.reason)
        say_on_stderr(message.reason)

    def is_unavailable(self, backend: str) -> bool:
        """Whether the backend was reported as unavailable."""
        return any(isinstance(one, Unavailable) and one.backend == backend for one in self.found)

    @property
    def rows(self) -> list[Row]:
        """The results so far."""
        return [one for one in self.found if isinstance(one, Row)]

    def finish(self) -> None:
        """Show what is known only at the end, and wait until everything is written."""
        if self._as_json:
            self._write([json.dumps(tables.as_json(self.found), indent=1)])
        elif self._draws:
            from launchpad.bench import terminal_table as bench_table

            self._draw(bench_table.fits(self.rows))
        else:
            self._write(tables.fit_table(self.rows))
        self._writer.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Unavailable):
            self.unavailable(message)
            return
        self._follow(message)
        if isinstance(message, Point):
            return
        links = [one for one in self.found if isinstance(one, LinkTiming) and one.backend == message.backend]
        first_row = isinstance(message, Row) and not (self.found and isinstance(self.found[-1], Row))
        self.found.append(message)
        if isinstance(message, Setting):
            self.missing |= message.missing
        if self._draws:
            self._draw_message(message, links if first_row else None)
        elif not self._as_json:
            self._print_message(message, links if first_row else None)

    def _follow(self, message: Message) -> None:
        """Update the status line with what is being measured."""
        work = self._work
        match message:
            case Setting():
                self._begin = time.monotonic()
                self._work = HowFar(f"{message.backend}: the links between the ranks", 0, message.points)
            case Point():
                left = (time.monotonic() - self._begin) / work.done * (work.total - work.done) if work.done else 0
                size = f", {tables.size_in_words(message.size)}" if message.size else ""
                rest = f"; about {left:.0f} s left" if work.done else ""
                self._work = work._replace(text=f"{message.backend}: {message.operation}{size}{rest}")
            case Row():
                self._work = work._replace(done=work.done + 1)

    def _print_message(self, message: Message, links: Sequence[LinkTiming] | None) -> None:
        if isinstance(message, Setting):
            self._write(tables.heading(message))
        if links is not None:
            self._write([*tables.link_matrix(links), "", *tables.columns()])
        if isinstance(message, Row):
            self._write([tables.row(message)])

    def _draw_message(self, message: Message, links: Sequence[LinkTiming] | None) -> None:
        from launchpad.bench import terminal_table as bench_table

        if isinstance(message, Setting):
            self._draw(bench_table.heading(message))
        if links is not None:
            self._draw(bench_table.links(links))
            self._draw("")
            self._draw(bench_table.columns(columns(STDOUT)))
        if isinstance(message, Row):
            self._draw(bench_table.row(message, columns(STDOUT)))

    def _draw(self, what: RenderableType | None) -> None:
        if what is not None:
            self._writer.put([(STDOUT, drawn(what, STDOUT, os.environ))])

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            self._writer.put([(STDOUT, ("\n".join(lines) + "\n").encode(errors="replace"))])

    def _failed(self, fd: Target, error: OSError) -> None:
        if fd == STDOUT:
            self._post(ConsoleClosed(time.monotonic_ns(), error.strerror or str(error)))


class BenchSink:
    """A sink that parses the ranks' stdout into messages."""

    deadline = None

    def __init__(
        self,
        take: Callable[[Message], None],
        stray: Callable[[bytes], None],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """`stray` gets lines that are not messages: the interpreter may print before the rank takes over stdout.

        `over` is called when the ranks are gone.
        """
        self._take = take
        self._stray = stray
        self._over = over
        self._unfinished: dict[int, bytes] = {}  # by rank

    def on(self, event: Any) -> bool:
        """Take an event; no bytes are held."""
        if type(event) is PhaseChanged and event.phase == "over":
            self._over()
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
        """There is nothing left to write."""
