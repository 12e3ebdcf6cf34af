"""Draws tables and progress bars on a terminal, with rich. Elsewhere output is plain lines, and rich isn't imported."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.console.message import wants_colour
from launchpad.named import NamedTuple
from launchpad.output.status_line import StatusLine
from launchpad.protocol.events import STDERR

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID
    from rich.table import Table

# For a terminal that doesn't report its width.
COLUMNS = 80

# How many parts get a line at most.
_MOST_PARTS = 8

# How many hosts are named at most.
_MOST_NAMES = 3

_BAR_COLUMNS = 20

# A line that wraps can't be erased: room for the "^C" that the terminal echoes, and the last column, where it may wrap.
_SPARED_COLUMNS = 3


def can_draw(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether the descriptor is a terminal that understands escape sequences."""
    return os.isatty(fd) and environ.get("TERM") != "dumb"


def columns(fd: int) -> int:
    """The width of the terminal."""
    try:
        return os.get_terminal_size(fd).columns or COLUMNS
    except OSError:  # the terminal is gone
        return COLUMNS


def lines(fd: int) -> int:
    """The height of the terminal; 0 if it doesn't report that."""
    try:
        return os.get_terminal_size(fd).lines
    except OSError:  # the terminal is gone
        return 0


def drawn(what: RenderableType, fd: int, environ: Mapping[str, str], width: int = 0) -> bytes:
    """The bytes for the terminal at this descriptor. `width`: use fewer than all its columns.

    Tables are made to fit. Long lines of text are left for the terminal to wrap, so that they can be copied whole.
    """
    from rich.console import Console  # takes 40 ms

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="auto" if wants_colour(fd, environ) else None,
        width=width or columns(fd),
        markup=False,
        emoji=False,
        highlight=False,
        _environ=environ,
    )
    with console.capture() as captured:
        console.print(what, soft_wrap=True)
    return captured.get().encode(errors="replace")


def plain_table() -> Table:
    """A table without edges, whose columns are one blank apart."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


class HowFar(NamedTuple):
    """The progress of something that takes long."""

    text: str
    done: int
    total: int
    parts: Mapping[str, HowFar] = {}  # by name, those of its parts that get a line each, where there is room


def status_line(
    look: Callable[[], HowFar], *, of_bytes: bool = False, every: float = 0.25, quiet: bool = False
) -> StatusLine:
    """A status line with the progress that `look` returns; never shown if `quiet`, or without a terminal to draw on."""
    return StatusLine(_Bar(look, of_bytes).line, every, shows=not quiet and can_draw(STDERR, os.environ))


def waiting(what: str, names: Sequence[str]) -> str:
    """What is in progress, and who it waits for: "reaching 9 hosts: waiting for b, c, d and 5 more"."""
    if not names:
        return what
    more = len(names) - _MOST_NAMES
    return f"{what}: waiting for {', '.join(names[:_MOST_NAMES])}" + (f" and {more} more" if more > 0 else "")


class _Bar:
    """Rich's progress bar. It is made when first drawn, as few waits last long enough to need it."""

    def __init__(self, look: Callable[[], HowFar], of_bytes: bool) -> None:
        self._look = look
        self._of_bytes = of_bytes
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}  # by the part's name; "" for all

    def line(self) -> bytes:
        """The line as it is now, and below it one for each part."""
        self._progress = self._progress or self._make()
        work = self._look()
        room = max(0, min(_MOST_PARTS, lines(STDERR) - 2))
        shown = {"": work, **dict(itertools.islice(work.parts.items(), room))}
        for name, part in shown.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task("")
                self._progress.tasks[-1].start_time = self._begin
            at = self._tasks[name]
            self._progress.update(at, description=part.text, completed=part.done, total=part.total or None)
        by_id = {task.id: task for task in self._progress.tasks}
        table = self._progress.make_tasks_table([by_id[self._tasks[name]] for name in shown])
        # On a narrow terminal rich makes several lines of one.
        text = drawn(table, STDERR, os.environ, columns(STDERR) - _SPARED_COLUMNS).rstrip(b"\n")
        return text if text.count(b"\n") + 1 == len(shown) else text.partition(b"\n")[0]

    def _make(self) -> Progress:
        from rich import progress
        from rich.table import Column

        amounts: list[Any] = [progress.MofNCompleteColumn()]
        if self._of_bytes:
            amounts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        text = progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        )
        return progress.Progress(
            *(progress.BarColumn(_BAR_COLUMNS), *amounts, progress.TimeElapsedColumn(), text),
            get_time=time.monotonic,
            expand=True,
        )
