"""`launchpad logs [JOB]`: what the ranks of a job wrote, as it is recorded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import click

from launchpad.errors import UsageError
from launchpad.events import Output, Restarted
from launchpad.failures import JobPlanned
from launchpad.report import replay, shelf
from launchpad.report.lines import Device, Stream

# How often the record of a running job is looked at, in seconds.
LOOK_SECONDS = 0.25


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-r", "--rank", "ranks", multiple=True, type=click.IntRange(min=0), help="Only this one; repeatable.")
@click.option("-f", "--follow", is_flag=True, help="Go on as long as the job does.")
def command(job: str | None, ranks: tuple[int, ...], follow: bool) -> int:
    """Print what the ranks of JOB wrote, each line with its rank.

    JOB is an id that `launchpad jobs` lists, or the beginning of one; without it, the latest job. A record without
    --log-dir has the beginning and the end of each stream.
    """
    folder = replay.find_job(job, os.environ)
    planned = replay.first_event(folder)
    known = {int(rank) for rank in planned.folders} if planned else set()
    for rank in ranks:
        if known and rank not in known:
            raise UsageError(f"--rank {rank}: the job has the ranks 0 to {max(known)}")
    printer = _Printer()
    reader = replay.Reader(folder, frozenset(ranks) or None)
    try:
        while True:
            running = shelf.is_running(folder)  # asked first: what it wrote until then is read below
            printer.show(reader.more())
            if not (follow and running):
                break
            printer.show(reader.rest())
            printer.tick()
            time.sleep(LOOK_SECONDS)
        printer.show(reader.rest())
        printer.close()
    finally:
        reader.close()
    return 0


class _Printer:
    """Whole lines, each under its rank's prefix, on stdout."""

    def __init__(self) -> None:
        self._device = Device(1, None)
        self._streams: dict[tuple[int, int], Stream] = {}
        self._labels: dict[int, str] = {}

    def show(self, events: Iterable[Any]) -> None:
        """Print the output among these."""
        for event in events:
            match event:
                case JobPlanned():
                    self._label(event)
                case Restarted(_, attempt):
                    self._write(self._device.note(f"launchpad: restart {attempt}".encode(), 1))
                case Output(_, rank, stream, data):
                    if (rank, stream) not in self._streams:
                        label = self._labels.get(rank, f"[{rank}]")
                        self._streams[rank, stream] = Stream(1, f"{label} ".encode(), len(label) + 1)
                    self._write(self._device.feed(self._streams[rank, stream], data, time.monotonic()))
        sys.stdout.buffer.flush()

    def _label(self, planned: JobPlanned) -> None:
        ranks = [(name, rank) for name, those in planned.nodes for rank in those]
        digits = len(str(max(rank for _, rank in ranks)))
        longest = max(len(name) for name, _ in ranks) if len(planned.nodes) > 1 else 0
        self._labels = {rank: f"[{f'{name:<{longest}} ' if longest else ''}{rank:>{digits}}]" for name, rank in ranks}

    def tick(self) -> None:
        """Show lines that have rested unfinished."""
        self._write(self._device.tick(time.monotonic()))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """End what is unfinished."""
        self._write(self._device.close(list(self._streams.values())))
        sys.stdout.buffer.flush()

    def _write(self, pieces: list[tuple[int, bytes]]) -> None:
        for _, data in pieces:
            sys.stdout.buffer.write(data)
