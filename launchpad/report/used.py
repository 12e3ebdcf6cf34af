"""Curves of what a job's ranks used, from the samples in its record."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, get_type_hints

from launchpad.protocol.events import Sampled
from launchpad.protocol.typed import typed
from launchpad.record import files, job_store, replay
from launchpad.report.timeline import JOB, Curve

_GB = 1e9
_LARGEST = 1 << 63

# Of a file with more bytes than this, samples at about so many moments are used; of very many ranks at fewer.
WHOLE_BYTES = 4 << 20
MOMENTS = 100
LEAST_MOMENTS = 10
MANY_RANKS = 512

# The hosts' samples of one moment are not farther apart than this; in ns.
_MOMENT = 2_000_000_000

_TIME = re.compile(rb'\{"time":([0-9]{1,19}),')

_Points = dict[int, list[tuple[int, float]]]


def used(folder: str, ranks: int, begins: Sequence[int] = ()) -> tuple[list[Curve], float]:
    """Cores and memory (GB, 10^9 bytes) of each rank with its descendants, and GPUs in use; none without samples.

    `ranks`: how many there are. `begins`: when the attempts but the first began, by the samples' clock. Also, how
    far the samples that were used are apart, in seconds; 0 if it was all of them.
    """
    planned = replay.first_event(folder)
    try:
        with files.open_file(folder, job_store.SAMPLES) as file:
            apart = _apart(file, min(MOMENTS, max(LEAST_MOMENTS, MOMENTS * MANY_RANKS // max(1, ranks))))
            found = curves(_read(_thinned(file, apart)), planned.time if planned else 0, begins)
            return found, apart / 1e9
    except (OSError, files.Unreadable):
        return [], 0.0


def _apart(file: BinaryIO, moments: int) -> int:
    size = os.fstat(file.fileno()).st_size
    if size <= WHOLE_BYTES:
        return 0
    first = _time_of(file.readline(files.MOST_BYTES))
    file.seek(size - WHOLE_BYTES // 4)
    last = max((int(match[1]) for match in _TIME.finditer(file.read())), default=first)
    file.seek(0)
    return max(0, last - first) // moments


def _time_of(line: bytes) -> int:
    found = _TIME.match(line)
    return int(found[1]) if found else -1


def _thinned(lines: Iterable[bytes], apart: int) -> Iterator[bytes]:
    """The samples of one moment, and then of the first one that is so much later. The others are not decoded."""
    if not apart:
        yield from lines
        return
    until = due = 0
    for line in lines:
        at = _time_of(line)
        if at >= due:
            until, due = at + _MOMENT, at + apart
        if at < until:
            yield line


def _read(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    hints = get_type_hints(Sampled, include_extras=True)
    for line in lines:
        try:
            said = json.loads(line)
            if all(map(_is_row, said["ranks"])):
                yield {"ranks": said["ranks"], **{name: typed(hints[name], said[name]) for name in ("time", "gpus")}}
        except (ValueError, KeyError, TypeError, RecursionError):  # it is being written, was cut off, or isn't ours
            continue


def _is_row(row: Any) -> bool:
    """Whether this is a rank's, as far as it is used. There are very many, so they are not checked by their types."""
    rank, _, seconds, resident, *_ = row
    return type(rank) is int and type(resident) is int and -1 <= seconds < _LARGEST and -1 <= resident < _LARGEST


def curves(samples: Iterable[dict[str, Any]], began: int, begins: Sequence[int] = ()) -> list[Curve]:
    """The same, of samples as in protocol/events.py, Sampled; `began`: when the job did, on the samples' clock."""
    cores: _Points = {}
    memory: _Points = {}
    gpus: dict[int, float] = {}
    latest: dict[str, float] = {}  # a sample has the GPUs of one host
    before: dict[int, tuple[int, float]] = {}  # when, and CPU seconds
    starts = [one - began for one in begins]
    for sample in samples:
        at = sample["time"] - began
        attempt = bisect_right(starts, at)
        start = starts[attempt - 1] if attempt else 0
        for rank, _, seconds, resident, *_ in sample["ranks"]:
            if resident >= 0:
                memory.setdefault(rank, []).append((at, resident / _GB))
            then, spent = before.get(rank, (at, seconds))
            if then < start:  # it has been started again
                then, spent = start, 0.0
            before[rank] = (at, seconds)
            if 0 <= spent <= seconds and at > then:
                cores.setdefault(rank, []).append((at, (seconds - spent) * 1e9 / (at - then)))
        busy = {uuid: percent / 100 for uuid, percent, *_ in sample["gpus"] if percent >= 0}
        if busy:
            latest.update(busy)
            gpus[at] = sum(latest.values())
    found = [("CPU", "cores", cores), ("memory", "GB", memory), ("GPUs in use", "GPUs", {JOB: list(gpus.items())})]
    return [
        Curve(name, unit, {rank: tuple(points) for rank, points in by_rank.items()})
        for name, unit, by_rank in found
        if any(by_rank.values())
    ]
