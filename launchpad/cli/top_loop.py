"""The screen of `launchpad top`: keys in, screenfuls out."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from launchpad.cli.looks import next_look
from launchpad.console.top_screen import KEYS, TEXT_KEYS, RankList, ScreenSize, TextPage
from launchpad.control.client import NoAnswer, ask, send_signal
from launchpad.diagnosis.activity import (
    ORDERS,
    JobLook,
    RankRow,
    child_rows,
    folded,
    host_rows,
    matching,
    ordered,
    plain_lines,
    rows,
    state_in_words,
)
from launchpad.diagnosis.verdict_text import CUT_OFF, describe
from launchpad.errors import UsageError
from launchpad.job.outcome import ranks_in_words
from launchpad.protocol.events import STDOUT, Output, Restarted
from launchpad.protocol.printable import printable_line, printable_lines
from launchpad.record import job_store, replay
from launchpad.record.recorded_verdict import look_at

# How often the job is asked: the first time soon, as only the second look tells what happens per second.
FIRST_SECONDS = 0.3
SECONDS = 1.0

# How long a job that is over may take to write the rest of its record.
REST_SECONDS = 5.0

# How much of a rank's output is shown.
MOST_OUTPUT = 1 << 20

# How long to wait for the rest of an escape sequence; a lone Esc has none.
_ESCAPE_SECONDS = 0.05

_ENTER_SCREEN = b"\x1b[?1049h\x1b[?25l"
_LEAVE_SCREEN = b"\x1b[?25h\x1b[?1049l"

_NAMED = {
    "up": (b"\x1b[A", b"\x1bOA"),
    "down": (b"\x1b[B", b"\x1bOB"),
    "page up": (b"\x1b[5~",),
    "page down": (b"\x1b[6~",),
    "home": (b"\x1b[H", b"\x1b[1~"),
    "end": (b"\x1b[F", b"\x1b[4~"),
    "escape": (b"\x1b",),
    "enter": (b"\r", b"\n"),
    "backspace": (b"\x7f", b"\x08"),
    "quit": (b"\x03", b"\x04"),  # Ctrl-C, Ctrl-D
    "suspend": (b"\x1a",),
}
_SEQUENCES = {sequence: name for name, sequences in _NAMED.items() for sequence in sequences}
_END = 1 << 30


class TopLoop:
    """The loop. A thread asks the job, others fetch stacks; they put what they get into a queue, and wake the loop."""

    def __init__(self, look: JobLook) -> None:
        self._job = look.job
        self._look = look
        self._every = rows(None, look)
        self._hosts = host_rows(look, self._every)
        self._children = child_rows(None, look)
        self._found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._over = False  # the job is
        self._leaves = False
        self._list = RankList()
        self._page: TextPage | None = None
        self._output: _RankOutput | None = None  # what the page shows, if it is that
        self._order = "rank"
        self._filter = ""
        self._opened: list[int] = []  # the ranks of a row that stood for several
        self._typing: str | None = None  # a filter that is being typed
        self._confirming = False
        self._said = ""  # until the next key

    def run(self) -> int:
        """Show the job until the user leaves, or it ends. Returns the exit code."""
        threading.Thread(target=self._follow, name="top", daemon=True).start()
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: sys.exit(128 + number))
        signal.signal(signal.SIGWINCH, lambda *_: self._post(_nothing))
        modes = self._enter()
        try:
            while not (self._over or self._leaves):
                self._draw()
                self._wait(modes)
        except OSError:  # the terminal is gone
            self._leaves = True
        finally:
            self._leave(modes)
        if self._over and not self._leaves:
            for line in how_it_ended(self._job):
                click.echo(printable_line(line).encode())
        return 0

    # Threads.

    def _follow(self) -> None:
        pause = FIRST_SECONDS
        while True:
            time.sleep(pause)
            pause = SECONDS
            try:
                look = next_look(self._job)
            except NoAnswer as error:
                self._post(lambda said=str(error): setattr(self, "_said", said))  # type: ignore[misc]
                continue
            self._post(lambda look=look: self._take(look))  # type: ignore[misc]
            if look is None:
                return

    def _post(self, action: Callable[[], None]) -> None:
        self._found.put(action)
        try:
            os.write(self._waker, b"x")
        except BlockingIOError:  # it is awake
            pass

    def _take(self, look: JobLook | None) -> None:
        if look is None:
            self._over = True
        else:
            self._every = rows(self._look, look)
            self._hosts = host_rows(look, self._every)
            self._children = child_rows(self._look, look)
            self._look = look

    def _fetch_stacks(self, rank: int, page: TextPage) -> None:
        try:
            text = (
                ask(self._job, "stacks", native=False, full=True, rank=rank) or "the job ended before it could answer"
            )
        except (UsageError, OSError) as error:
            text = str(error)
        self._post(lambda: page.text.__setitem__(slice(None), printable_lines(text)))

    # The terminal.

    def _enter(self) -> list[Any]:
        modes = termios.tcgetattr(0)
        ours = termios.tcgetattr(0)
        ours[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
        ours[0] &= ~(termios.ICRNL | termios.IXON)
        termios.tcsetattr(0, termios.TCSADRAIN, ours)
        os.write(STDOUT, _ENTER_SCREEN)
        return modes

    def _leave(self, modes: list[Any]) -> None:
        try:
            os.write(STDOUT, _LEAVE_SCREEN)
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
        except (OSError, termios.error):  # the terminal is gone
            pass

    def _wait(self, modes: list[Any]) -> None:
        """Wait for a key, or for something new."""
        ready, _, _ = select.select([0, self._wake], [], [])
        if self._wake in ready:
            os.read(self._wake, 4096)
        while True:
            try:
                self._found.get_nowait()()
            except queue.Empty:
                break
        if 0 not in ready:
            return
        data = os.read(0, 1024)
        if not data:
            self._leaves = True
        if data == b"\x1b" and select.select([0], [], [], _ESCAPE_SECONDS)[0]:
            data += os.read(0, 1024)
        for key in keys(data):
            if key == "suspend":
                self._leave(modes)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._enter()
            else:
                self.press(key)

    def _draw(self) -> None:
        found = os.get_terminal_size(STDOUT)
        size = ScreenSize(found.lines, found.columns)
        lines = ["the terminal is too small"[: size.columns]] if size.too_small else self._lines(size)
        text = "\x1b[H" + "\x1b[0m\x1b[K\r\n".join(lines[: size.rows]) + "\x1b[0m\x1b[J"
        data = memoryview(text.encode(errors="replace"))
        while data:
            data = data[os.write(STDOUT, data) :]

    def _lines(self, size: ScreenSize) -> list[str]:
        note = self._note()
        if self._page is not None:
            if self._output is not None:
                self._page.text = self._output.lines()
            return self._page.lines(size, note or TEXT_KEYS)
        return self._list.lines(
            *(self._look, self._every, self._hosts, self._arranged),
            *(size, self._marks(), note or KEYS, self._children),
        )

    def _arranged(self, room: int) -> list[RankRow]:
        """The rows to show."""
        shown = matching(self._every, self._filter if self._typing is None else self._typing)
        opened = [row for row in shown if row.ranks[0] in self._opened]
        return ordered(opened if self._opened else folded(shown, room), self._order)

    def _note(self) -> str:
        if self._confirming:
            return f"end job {self._job}? y: yes, as TERM does; any other key: no"
        if self._typing is not None:
            return f"filter: {self._typing}▏   ranks (0-7,12), or a text; Enter, Esc"
        return self._said

    def _marks(self) -> list[str]:
        """What is special about the rows."""
        marks = [f"filter: {self._filter}"] if self._filter else []
        marks += [f"order: {self._order}"] if self._order != "rank" else []
        marks += [ranks_in_words(self._opened)] if self._opened else []
        return [*marks, "Esc resets"] if marks else []

    # Keys.

    def press(self, key: str) -> None:
        """Do what a key says."""
        self._said = ""
        if self._confirming:
            self._confirming = False
            if key == "y":
                self._end_job()
        elif self._typing is not None:
            self._type(key)
        elif key in ("q", "quit"):
            self._leaves = True
        elif key in _MOVES:
            (self._page or self._list).move(_MOVES[key])
        elif key == "escape":
            self._go_back()
        elif key == "e":
            self._confirming = True
        elif self._page is None:
            self._press_in_list(key)

    def _press_in_list(self, key: str) -> None:
        row = self._list.row
        if key == "/":
            self._typing = self._filter
        elif key == "o":
            orders = list(ORDERS)
            self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        elif key == "enter" and row is not None and len(row.ranks) > 1:
            self._opened = row.ranks
        elif key == "enter" and row is not None:
            self._show_output(row)
        elif key == "s" and row is not None:
            self._page = TextPage(f"rank {row.ranks[0]}: {state_in_words(row)}: its stacks")
            self._page.text = ["asking the rank …"]
            threading.Thread(target=self._fetch_stacks, args=(row.ranks[0], self._page), daemon=True).start()

    def _type(self, key: str) -> None:
        assert self._typing is not None
        if key == "enter":
            self._filter, self._typing = self._typing, None
        elif key in ("escape", "quit"):
            self._typing = None
        elif key == "backspace":
            self._typing = self._typing[:-1]
        elif len(key) == 1:
            self._typing += key

    def _go_back(self) -> None:
        if self._page is not None:
            self._page = self._output = None
        elif self._opened:
            self._opened = []
        else:
            self._filter, self._order = "", "rank"

    def _show_output(self, row: RankRow) -> None:
        try:
            self._output = _RankOutput(replay.find_job(self._job, os.environ), row.ranks[0])
        except (UsageError, OSError):
            self._said = "no record of this job is kept, so its output can't be shown"
            return
        self._page = TextPage(f"rank {row.ranks[0]} on {row.hosts[0]}, pid {self._pid(row.ranks[0])}: its output")

    def _pid(self, rank: int) -> int:
        return next((row[2] for row in self._look.ranks if row[0] == rank), 0)

    def _end_job(self) -> None:
        try:
            self._said = send_signal(self._job, signal.SIGTERM)
        except UsageError as error:
            self._said = str(error)


_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -20, "page down": 20, "home": -_END, "end": _END}


class _RankOutput:
    """What a rank has printed, by the job's record."""

    def __init__(self, folder: str, rank: int) -> None:
        """Raises OSError if the record can't be read."""
        self._reader = replay.OutputReader(folder, frozenset([rank]))
        self._data = b""

    def lines(self) -> list[str]:
        """The end of it, with what is new."""
        for events in (self._reader.more(), self._reader.rest()):
            for event in events:
                if isinstance(event, Output):
                    self._data = (self._data + event.data)[-MOST_OUTPUT:]
                elif isinstance(event, Restarted):
                    self._data += f"launchpad: restart {event.attempt}\n".encode()
        return plain_lines(self._data.removesuffix(b"\n"))


def keys(data: bytes) -> list[str]:
    """The keys that were pressed: letters, or names like "up"."""
    found = []
    while data:
        size = next((size for size in (4, 3, 1) if data[:size] in _SEQUENCES), 0)
        if size:
            found.append(_SEQUENCES[data[:size]])
            data = data[size:]
        else:
            text = data.partition(b"\x1b")[0]
            text = next((text[:end] for end in range(len(text)) if text[end : end + 1] in _SEQUENCES), text)
            found += text.decode(errors="ignore")
            data = data[max(1, len(text)) :]
    return found


def how_it_ended(job: str) -> list[str]:
    """How the job has ended, by its record."""
    try:
        folder = replay.find_job(job, os.environ)
    except UsageError:
        return [f"job {job} has ended"]
    give_up = time.monotonic() + REST_SECONDS
    while True:
        history, verdict, earlier = look_at(folder)
        if history.over is not None or time.monotonic() >= give_up or job_store.state_of(folder) == "over":
            break
        time.sleep(0.05)
    history, verdict, earlier = look_at(folder)
    code = f", exit code {history.over.code}" if history.over is not None else f": {CUT_OFF}"
    return [f"job {job} has ended{code}", *describe(history, verdict, earlier)]


def _nothing() -> None:
    """Only the screen is to be drawn."""
