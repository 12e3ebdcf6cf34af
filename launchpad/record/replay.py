"""Reads a job's journal: its events and the output of its ranks."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, BinaryIO

from launchpad.diagnosis.history import STDOUT_BYTES
from launchpad.diagnosis.output_tail import TAIL_BYTES
from launchpad.errors import UsageError
from launchpad.job.roles import RoleNames
from launchpad.protocol.events import STDERR, STDOUT, HeadResumed, JobPlanned, Output, RanksSpawned, Restarted
from launchpad.record import files, job_store
from launchpad.record.attempts import NONE, Passed, layout
from launchpad.record.event_lines import OutputPlace, event_of
from launchpad.record.scanner import Scanner

_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_PART = re.compile(r"(stdout|stderr)(?:\.([0-9]{1,9}))?\.log")

# How most lines begin, which say where output is.
_OUTPUT = b'{"event": "Output", '

# What an OutputReader reads of events.jsonl.
_READ = ("Output", "JobPlanned", "Restarted", "RanksSpawned", "HeadResumed")

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


def read_events(folder: str, passed: Passed = NONE) -> Iterator[Any]:
    """The events. Before each restart, and at the end, come the last words of every rank, as one Output each.

    Their times are by one clock. `passed`: the attempts to leave out. Raises UsageError if the record can't be read,
    as all here do.
    """
    folders: dict[int, str] = {}
    attempt, ahead = 0, passed.ahead
    for event in passed.events:
        if isinstance(event, JobPlanned | Restarted | RanksSpawned):
            add_ranks(folders, event)
        if isinstance(event, Restarted):
            attempt = event.attempt
    for line in _lines(folder, passed.offset):
        event = None if line.startswith(_OUTPUT) else event_of(line)
        if event is None or isinstance(event, OutputPlace):
            continue
        ahead += event.ahead if isinstance(event, HeadResumed) else 0
        event = event._replace(time=event.time - ahead) if ahead else event
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
        folders.update((rank, event.folders.get(str(rank), str(rank))) for _, ranks in event.nodes for rank in ranks)
        return
    new = event.ranks if isinstance(event, RanksSpawned) else [rank for _, ranks in event.nodes for rank in ranks]
    for rank in new:
        folders.setdefault(rank, str(rank))


def extent(folder: str) -> tuple[set[int], int]:
    """All ranks that the job has had so far, and its last attempt."""
    found: dict[int, str] = {}
    attempt = 0
    next(_lines(folder), b"")  # raises Unreadable unless it begins with a job
    try:
        for _, event in layout(folder):
            if isinstance(event, JobPlanned | Restarted | RanksSpawned):
                add_ranks(found, event)
            if isinstance(event, Restarted):
                attempt = event.attempt
    except OSError as error:
        raise _cannot_read(folder, error) from None
    return set(found), attempt


def role_names(folder: str) -> RoleNames:
    """What the job's ranks are called, spawned ones too, if it has roles."""
    names = RoleNames(())
    for _, event in layout(folder):
        if isinstance(event, JobPlanned):
            names = RoleNames(event.roles)
        elif isinstance(event, RanksSpawned) and names.of:
            names.join(event.by, event.ranks)
    return names


def keeps(folder: str, attempt: int, last: int) -> bool:
    """Whether the output of this attempt is kept, where `last` is the last one."""
    return not 0 < attempt <= last - job_store.LAST_ATTEMPTS or os.path.isdir(
        os.path.join(folder, f"attempt_{attempt}")
    )


def first_event(folder: str) -> JobPlanned | None:
    """The first event; None if not even that was recorded. Raises Unreadable."""
    try:
        with files.open_file(folder, job_store.EVENTS) as file:
            event = event_of(next(_lines_of(folder, file), b""))
    except OSError:
        return None
    return event if isinstance(event, JobPlanned) else None


def is_running(folder: str) -> bool:
    """Whether the job in this folder is still running. Raises UsageError if nobody here can tell."""
    state = job_store.state_of(folder)
    if state == "unknown":
        planned = first_event(folder)
        host = planned.host if planned and planned.host else "another host"
        raise UsageError(f"job {os.path.basename(folder)} was started on {host}; run this command there")
    return state == "running"


def _cannot_read(folder: str, error: OSError) -> UsageError:
    return UsageError(f"{folder}: the record can't be read: {error.strerror}")


def _lines(folder: str, offset: int = 0) -> Iterator[bytes]:
    """The lines; from an offset on, but for the first, whose event is checked."""
    try:
        with files.open_file(folder, job_store.EVENTS) as file:
            lines = _lines_of(folder, file)
            first = next(lines, b"")
            if first.endswith(b"\n") and not isinstance(event_of(first), JobPlanned):
                raise files.Unreadable(folder, f"{job_store.EVENTS} does not begin with a job")
            if offset:
                file.seek(offset)
            else:
                yield first
            yield from lines
    except OSError as error:
        raise _cannot_read(folder, error) from None


def _lines_of(folder: str, file: BinaryIO) -> Iterator[bytes]:
    """The lines of events.jsonl that there are by now."""
    while line := file.readline(files.MOST_BYTES):
        if len(line) == files.MOST_BYTES:
            raise files.Unreadable(folder, f"{job_store.EVENTS} has a line of more than {files.MOST_BYTES >> 20} MiB")
        yield line


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
        if isinstance(event, RanksSpawned):  # what they print may come at any time in the attempt
            found.append(event)
            continue
        found += [output for _, output in sorted(outputs, key=itemgetter(0))]
        found.append(event)
        outputs.clear()
        latest.clear()
    return found + [output for _, output in sorted(outputs, key=itemgetter(0))]


def _last_words(folder: str, folders: Mapping[int, str], attempt: int) -> Iterator[Output]:
    for rank, number in _with_output(folder, folders, attempt):
        parts = _parts(folder, f"attempt_{attempt}/{number}")
        for stream, size in ((STDOUT, STDOUT_BYTES), (STDERR, TAIL_BYTES)):
            data = b""
            for path in reversed(parts[stream]):
                data = _end_of(folder, path, size - len(data)) + data
                if len(data) >= size:
                    break
            if data:
                yield Output(0, rank, stream, data)


def _with_output(folder: str, folders: Mapping[int, str], attempt: int) -> Iterator[tuple[int, str]]:
    """The ranks that have left any output in this attempt, with their folders."""
    there = set(_names(folder, f"attempt_{attempt}"))
    yield from ((rank, number) for rank, number in folders.items() if number in there)


def _parts(folder: str, place: str) -> dict[int, list[str]]:
    """By stream: the file with its beginning, and the segments with its end (record/journal.py), in order."""
    found: list[tuple[str, int, str]] = []
    for name in _names(folder, place):
        if match := _PART.fullmatch(name):
            found.append((match[1], int(match[2] or 0), name))
    return {
        stream: [f"{place}/{name}" for kind, _, name in sorted(found) if kind == stream_name]
        for stream, stream_name in _NAMES.items()
    }


def _names(folder: str, place: str) -> list[str]:
    """What is in a folder of the record; nothing if that isn't there, or isn't kept any more."""
    try:
        return os.listdir(os.path.join(folder, place))
    except OSError:
        return []


def _end_of(folder: str, path: str, most: int) -> bytes:
    try:
        with files.open_file(folder, path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most)
    except (OSError, files.Unreadable):
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
        passed: Passed = NONE,
    ) -> None:
        """`ranks`: read only their output; None for all. `attempt`: only of this one. `since`: in seconds since 1970.

        If its time is unknown, that of the last change of its file counts. `passed`: the attempts to leave out.
        """
        self._folder = folder
        self._ranks = ranks
        self._only = attempt
        self._since = since
        self._began = 0.0  # launchpad's clock, as seconds since 1970
        self._ahead = 0  # the clock of what is read is, of that, in ns
        self._file = files.open_file(folder, job_store.EVENTS)
        self._scanner = Scanner(folder, self._file, *_READ)
        self._attempt = 0
        self._numbers: dict[int, str] = {}  # the ranks' folders
        self._read: dict[str, int] = {}  # how many bytes of each file
        for event in passed.events:
            self._learn(event)
        self._file.seek(passed.offset)

    def close(self) -> None:
        """Close the record."""
        self._file.close()

    def more(self) -> Iterator[Any]:
        """What is new since the last call: Outputs, and a JobPlanned, Restarted or RanksSpawned in between."""
        for _, line in self._scanner.more():
            event = event_of(line)
            if isinstance(event, OutputPlace):
                yield from self._placed(event._replace(time=event.time - self._ahead))
                continue
            if isinstance(event, Restarted):
                yield from self.rest()
            self._learn(event)
            if isinstance(event, JobPlanned | Restarted | RanksSpawned):
                yield event

    def _learn(self, event: Any) -> None:
        """Who takes part, and when."""
        if isinstance(event, JobPlanned | Restarted | RanksSpawned):
            add_ranks(self._numbers, event)
        if isinstance(event, JobPlanned):
            self._began = event.wall - event.time / 1e9
        elif isinstance(event, Restarted):
            self._attempt = event.attempt
        elif isinstance(event, HeadResumed):
            self._ahead += event.ahead

    def _placed(self, said: OutputPlace) -> Iterator[Output]:
        if self._ranks is not None and said.rank not in self._ranks:
            return
        # `rest` may have read some of it already; where bytes came later than their line, some of before is missing.
        while (left := said.offset + said.length - self._read.get(said.file, 0)) > 0:
            data = self._more_of(said.file, left)
            if not data:
                break
            if self._is_wanted(self._began + said.time / 1e9):
                yield Output(said.time, said.rank, said.stream, data)

    def _more_of(self, path: str, most: int) -> bytes:
        """What has not been read of a file yet, in pieces."""
        begin = self._read.get(path, 0)
        data = files.read(self._folder, path, begin, min(most, _BLOCK_BYTES))
        self._read[path] = begin + len(data)
        return data

    def _is_wanted(self, when: float) -> bool:
        return when >= self._since and self._only in (None, self._attempt)

    def _changed(self, path: str) -> float:
        if self._since == -math.inf:
            return 0.0
        found = files.status(self._folder, path)
        return found.st_mtime if found else -math.inf  # it was removed: the oldest of its kind

    def rest(self) -> Iterator[Output]:
        """The output whose order among the ranks, and time, is unknown."""
        for rank, number in _with_output(self._folder, self._numbers, self._attempt):
            if self._ranks is not None and rank not in self._ranks:
                continue
            for stream, paths in _parts(self._folder, f"attempt_{self._attempt}/{number}").items():
                for path in paths:
                    wanted = self._is_wanted(self._changed(path))
                    size = _BLOCK_BYTES
                    while size == _BLOCK_BYTES:
                        data = self._more_of(path, _BLOCK_BYTES)
                        size = len(data)
                        if data and wanted:
                            yield Output(0, rank, stream, data)
