"""Curves of what a job's ranks used, from the samples in its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_type_hints

from launchpad.protocol.events import Sampled
from launchpad.protocol.typed import typed
from launchpad.record import files, job_store, replay
from launchpad.report.timeline import JOB, Curve

_GB = 1e9

_Points = dict[int, list[tuple[int, float]]]


def used(folder: str) -> list[Curve]:
    """Cores and memory (GB, 10^9 bytes) of each rank with its descendants, and GPUs in use; none without samples."""
    planned = replay.first_event(folder)
    try:
        with files.open_file(folder, job_store.SAMPLES) as file:
            return curves(_read(file), planned.time if planned else 0)
    except (OSError, files.Unreadable):
        return []


def _read(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    hints = get_type_hints(Sampled, include_extras=True)
    kinds = {name: hints[name] for name in ("time", "ranks", "gpus")}
    for line in lines:
        try:
            said = json.loads(line)
            yield {name: typed(hint, said[name]) for name, hint in kinds.items()}
        except (ValueError, KeyError, TypeError, RecursionError):  # it is being written, was cut off, or isn't ours
            continue


def curves(samples: Iterable[dict[str, Any]], began: int) -> list[Curve]:
    """The same, of samples as in protocol/events.py, Sampled; `began`: when the job did, on the samples' clock."""
    cores: _Points = {}
    memory: _Points = {}
    gpus: dict[int, float] = {}
    latest: dict[str, float] = {}  # a sample has the GPUs of one host
    before: dict[int, tuple[int, float]] = {}  # when, and CPU seconds
    for sample in samples:
        at = sample["time"] - began
        for rank, _, seconds, resident, *_ in sample["ranks"]:
            if resident >= 0:
                memory.setdefault(rank, []).append((at, resident / _GB))
            then, spent = before.get(rank, (at, seconds))
            before[rank] = (at, seconds)
            if 0 <= spent <= seconds and at > then:  # less: the rank was started again
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
