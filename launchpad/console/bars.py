"""Draws progress bars on the status line, with rich."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.console.live import StatusLine
from launchpad.console.terminal import can_draw, columns, drawn
from launchpad.protocol.events import STDERR

if TYPE_CHECKING:
    from rich.progress import Progress

# How many hosts are named at most.
_MOST_NAMES = 3

_BAR_COLUMNS = 20


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
