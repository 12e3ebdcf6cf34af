"""`launchpad logs [JOB]`: print the recorded output of a job's ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

from launchpad.console.console import labels
from launchpad.console.lines import Device, LineStream
from launchpad.errors import UsageError
from launchpad.protocol.events import JobPlanned, Output, Restarted
from launchpad.record import job_store, replay

# How often the record of a running job is polled, in seconds.
LOOK_SECONDS = 0.25


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-r", "--rank", "ranks", multiple=True, type=click.IntRange(min=0), help="Only this rank; repeatable.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
def command(job: str | None, ranks: tuple[int, ...], follow: bool) -> int:
    """Print the output of JOB's ranks, each line prefixed with its rank.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest job. Without
    --log-dir, only the beginning and the end of each stream are kept.
    """
    folder = replay.find_job(job, os.environ)
    planned = replay.first_event(folder)
    known = {int(rank) for rank in planned.folders} if planned else set()
    for rank in ranks:
        if known and rank not in known:
            raise UsageError(f"--rank {rank}: the job has ranks 0 to {max(known)}")
    printer = _Printer()
    reader = replay.OutputReader(folder, frozenset(ranks) or None)
    try:
        while True:
            running = job_store.state_of(folder) != "over"  # before reading, so that all it wrote is read below
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
    """Prints whole lines on stdout, each with its rank's prefix."""

    def __init__(self) -> None:
        self._device = Device(1, None)
        self._streams: dict[tuple[int, int], LineStream] = {}
        self._labels: dict[int, str] = {}

    def show(self, events: Iterable[Any]) -> None:
        """Print the output events; ignore others."""
        for event in events:
            match event:
                case JobPlanned(nodes=nodes):
                    self._label(nodes)
                case Restarted(_, attempt):
                    self._write(self._device.close(list(self._streams.values())))
                    if event.nodes:
                        self._label(event.nodes)
                    self._write(self._device.note(f"launchpad: restart {attempt}".encode(), 1))
                case Output(_, rank, stream, data):
                    if (rank, stream) not in self._streams:
                        label = self._labels.get(rank, f"[{rank}]")
                        self._streams[rank, stream] = LineStream(1, f"{label} ".encode(), len(label) + 1)
                    self._write(self._device.feed(self._streams[rank, stream], data, time.monotonic()))
        sys.stdout.buffer.flush()

    def _label(self, nodes: Sequence[Sequence[Any]]) -> None:
        label = labels([name for name, _ in nodes], sum(len(ranks) for _, ranks in nodes))
        self._labels = {rank: label(place, rank) for place, (_, ranks) in enumerate(nodes) for rank in ranks}
        self._streams.clear()

    def tick(self) -> None:
        """Print unfinished lines that have waited long enough."""
        self._write(self._device.tick(time.monotonic()))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Finish all unfinished lines."""
        self._write(self._device.close(list(self._streams.values())))
        sys.stdout.buffer.flush()

    def _write(self, pieces: list[tuple[int, bytes]]) -> None:
        for _, data in pieces:
            sys.stdout.buffer.write(data)
