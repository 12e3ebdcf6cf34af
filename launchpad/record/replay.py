"""Reads a job's journal: its events and the output of its ranks."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from launchpad.diagnosis.history import STDOUT_BYTES
from launchpad.diagnosis.output_tail import TAIL_BYTES
from launchpad.errors import UsageError
from launchpad.protocol.events import STDERR, STDOUT, JobPlanned, Output, RanksSpawned, Restarted
from launchpad.record import job_store
from launchpad.record.event_lines import event_of

_NAMES = {STDOUT: "stdout", STDERR: "stderr"}

_PLACE = ("time", "rank", "stream", "offset", "length")

# How much of a file is read at a time.
_BLOCK_BYTES = 1 << 20


def find_job(name: str | None, environ: Mapping[str, str]) -> str:
    """The folder of the job whose id is or starts with `name`; None: of the latest job. Raises UsageError."""
    place = job_store.jobs_folder(environ)
    known = job_store.jobs(environ)
    if not known:
        raise UsageError(f"no job is recorded in {place}; `launchpad run` records one")
    if name is None:
        return os.path.join(place, known[0])
    found = [name] if name in known else [one for one in known if name and one.startswith(name)]
    if len(found) > 1:
        raise UsageError(f"job {name}: {len(found)} jobs match ({', '.join(found[:5])}); type more of the id")
    if not found:
        raise UsageError(f"job {name}: no such job is recorded in {place}; `launchpad jobs` lists those that are")
    return os.path.join(place, found[0])


def read_events(folder: str) -> Iterator[Any]:
    """The events. Before each restart, and at the end, come the last words of every rank, as one Output each.

    Raises UsageError if the record can't be read.
    """
    folders: dict[int, str] = {}
    attempt = 0
    for line in _lines(folder):
        event = event_of(line)
        if event is None or isinstance(event, dict):
            continue
        if isinstance(event, JobPlanned | RanksSpawned):
            add_ranks(folders, event)
        if isinstance(event, Restarted):
            yield from _last_words(folder, folders, attempt)
            add_ranks(folders, event)
            attempt = event.attempt
        yield event
    yield from _last_words(folder, folders, attempt)


def add_ranks(folders: dict[int, str], event: JobPlanned | Restarted | RanksSpawned) -> None:
    """Add the folders of the ranks that this event says there are (record/journal.py)."""
    if isinstance(event, JobPlanned):
        folders.update((int(rank), folder) for rank, folder in event.folders.items())
        return
    new = event.ranks if isinstance(event, RanksSpawned) else [rank for _, ranks in event.nodes for rank in ranks]
    for rank in new:
        folders.setdefault(rank, str(rank))


def extent(folder: str) -> tuple[set[int], int]:
    """All ranks that the job has had so far, and its last attempt. Raises UsageError if the record can't be read."""
    found: dict[int, str] = {}
    attempt = 0
    for line in _lines(folder):
        if any(name in line for name in (b'"JobPlanned"', b'"Restarted"', b'"RanksSpawned"')):
            event = event_of(line)
            if isinstance(event, JobPlanned | Restarted | RanksSpawned):
                add_ranks(found, event)
            if isinstance(event, Restarted):
                attempt = event.attempt
    return set(found), attempt


def first_event(folder: str) -> JobPlanned | None:
    """The first event; None if not even that was recorded."""
    try:
        with open(os.path.join(folder, job_store.EVENTS), "rb") as file:
            event = event_of(file.readline())
    except OSError:
        return None
    return event if isinstance(event, JobPlanned) else None


def _lines(folder: str) -> Iterator[bytes]:
    try:
        with open(os.path.join(folder, job_store.EVENTS), "rb") as file:
            yield from file
    except OSError as error:
        raise UsageError(f"{folder}: the record can't be read: {error.strerror}") from None


def by_time(events: Iterable[Any]) -> list[Any]:
    """The events of an OutputReader with the output of each attempt in the order of its time; 0 is at the end."""
    found: list[Any] = []
    outputs: list[tuple[float, Output]] = []
    latest: dict[int, float] = {}  # by rank: a clock that is corrected must not turn its lines round
    for event in events:
        if isinstance(event, Output):
            at = latest[event.rank] = max(event.time or math.inf, latest.get(event.rank, 0.0))
            outputs.append((at, event))
            continue
        found += [output for _, output in sorted(outputs, key=itemgetter(0))]
        found.append(event)
        outputs.clear()
        latest.clear()
    return found + [output for _, output in sorted(outputs, key=itemgetter(0))]


def _last_words(folder: str, folders: Mapping[int, str], attempt: int) -> Iterator[Output]:
    for rank, number in folders.items():
        for name, stream, size in (("stdout", STDOUT, STDOUT_BYTES), ("stderr", STDERR, TAIL_BYTES)):
            base = os.path.join(folder, f"attempt_{attempt}", number, name)
            data = b""
            for path in reversed([f"{base}.log", *segments(base)]):
                data = _end_of(path, size - len(data)) + data
                if len(data) >= size:
                    break
            if data:
                yield Output(0, rank, stream, data)


def segments(base: str) -> list[str]:
    """The segments with the end of a stream (record/journal.py), in order; `base` is its path without `.log`."""
    name = os.path.basename(base)
    try:
        names = os.listdir(os.path.dirname(base))
    except OSError:
        return []
    numbers = [int(match[1]) for one in names if (match := re.fullmatch(rf"{name}\.(\d+)\.log", one))]
    return [f"{base}.{number}.log" for number in sorted(numbers)]


def _end_of(path: str, most: int) -> bytes:
    return read_from(path, max(0, _size(path) - most))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:  # it was removed: the oldest of its kind
        return -math.inf


def read_from(path: str, offset: int, most: int = -1) -> bytes:
    """A file's bytes from `offset` on; none if it is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(most)
    except OSError:
        return b""


class OutputReader:
    """Reads the recorded output of a job: in the order among all ranks if that is known, otherwise rank by rank.

    Its times are those of the job, in nanoseconds of launchpad's clock; 0 if unknown.
    """

    def __init__(
        self,
        folder: str,
        ranks: frozenset[int] | None,
        *,
        attempt: int | None = None,
        since: float = -math.inf,
    ) -> None:
        """`ranks`: read only their output; None for all. `attempt`: only of this one. `since`: in seconds since 1970.

        If its time is unknown, that of the last change of its file counts.
        """
        self._folder = folder
        self._ranks = ranks
        self._only = attempt
        self._since = since
        self._began = 0.0  # launchpad's clock, as seconds since 1970
        self._file = open(os.path.join(folder, job_store.EVENTS), "rb")  # noqa: SIM115
        self._line = b""
        self._attempt = 0
        self._numbers: dict[int, str] = {}  # the ranks' folders
        self._read: dict[str, int] = {}  # how many bytes of each file

    def close(self) -> None:
        """Close the record."""
        self._file.close()

    def more(self) -> Iterator[Any]:
        """What is new since the last call: Outputs, and a JobPlanned or Restarted in between."""
        for line in self._file:
            self._line += line
            if not self._line.endswith(b"\n"):  # the line is still being written
                break
            event = event_of(self._line)
            self._line = b""
            if isinstance(event, dict):
                yield from self._placed(event)
            elif isinstance(event, JobPlanned):
                add_ranks(self._numbers, event)
                self._began = event.wall - event.time / 1e9
                yield event
            elif isinstance(event, RanksSpawned):
                add_ranks(self._numbers, event)
            elif isinstance(event, Restarted):
                yield from self.rest()
                add_ranks(self._numbers, event)
                self._attempt = event.attempt
                yield event

    def _placed(self, said: dict[str, Any]) -> Iterator[Output]:
        try:
            at, rank, stream, offset, length = (int(said[name]) for name in _PLACE)
            path = os.path.join(self._folder, str(said["file"]))
        except (KeyError, ValueError, TypeError):
            return
        if self._ranks is not None and rank not in self._ranks:
            return
        # `rest` may have read some of it already; where bytes came later than their line, some of before is missing.
        start = self._read.get(path, 0)
        data = read_from(path, start, offset + length - start) if start < offset + length else b""
        self._read[path] = start + len(data)
        if data and self._is_wanted(self._began + at / 1e9):
            yield Output(at, rank, stream, data)

    def _is_wanted(self, when: float) -> bool:
        return when >= self._since and self._only in (None, self._attempt)

    def rest(self) -> Iterator[Output]:
        """The output whose order among the ranks, and time, is unknown."""
        for rank, number in self._numbers.items():
            if self._ranks is not None and rank not in self._ranks:
                continue
            for stream, name in _NAMES.items():
                base = os.path.join(self._folder, f"attempt_{self._attempt}", number, name)
                for path in (f"{base}.log", *segments(base)):
                    wanted = self._is_wanted(_changed(path))
                    while data := read_from(path, self._read.get(path, 0), _BLOCK_BYTES):
                        self._read[path] = self._read.get(path, 0) + len(data)
                        if wanted:
                            yield Output(0, rank, stream, data)
