"""Draws tables and progress bars on a terminal, with rich. Elsewhere output is plain lines, and rich isn't imported."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.console.message import wants_colour
from launchpad.output.status_line import StatusLine
from launchpad.protocol.events import STDERR

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.table import Table

# For a terminal that doesn't report its width.
COLUMNS = 80

# How many hosts are named at most.
_MOST_NAMES = 3

_BAR_COLUMNS = 20


def can_draw(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether the descriptor is a terminal that understands escape sequences."""
    return os.isatty(fd) and environ.get("TERM") != "dumb"


def columns(fd: int) -> int:
    """The width of the terminal."""
    try:
        return os.get_terminal_size(fd).columns or COLUMNS
    except OSError:  # the terminal is gone
        return COLUMNS


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

    def line(self) -> bytes:
        """The line as it is now."""
        if self._progress is None:
            self._progress = self._make()
        work = self._look()
        (task,) = self._progress.tasks
        self._progress.update(task.id, description=work.text, completed=work.done, total=work.total or None)
        table = self._progress.make_tasks_table([task])
        # Spare the last column, where a terminal may wrap. On a narrow one rich makes several lines: show the first.
        return drawn(table, STDERR, os.environ, columns(STDERR) - 1).partition(b"\n")[0]

    def _make(self) -> Progress:
        from rich import progress
        from rich.table import Column

        amounts: list[Any] = [progress.MofNCompleteColumn()]
        if self._of_bytes:
            amounts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        text = progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        )
        made = progress.Progress(
            *(progress.BarColumn(_BAR_COLUMNS), *amounts, progress.TimeElapsedColumn(), text),
            get_time=time.monotonic,
            expand=True,
        )
        made.add_task("")
        made.tasks[0].start_time = self._begin
        return made
