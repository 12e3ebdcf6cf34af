"""When this rank has entered its collectives, by the flight recorders of torch and of the mpi frontend.

It shows whom the others wait for, and stands in the timeline of the job's report.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How many of the last ones are told for the report.
KEPT = 300

# How many of the last ones are told at a time: in a small job as many as the recorders keep, in a large one fewer.
MOST = 2000
LEAST = 50
_OF_ALL_RANKS = 20_000

# A rank that has entered fewer tells nothing at its end: its job was too short to be slow.
WORTHWHILE = 20

# What a collective before which the rank has exchanged messages is called: it may be late because it waited for one.
AFTER_MESSAGES = "after messages"

# A rank spends no more than this part of its time on answers.
SHARE = 0.0025

_due = 0  # when the next one may be given
_told: dict[str, int] = {}  # by group: the number of the last one told


def entered(now: int) -> list[list[Any]]:
    """[group, number, what, ns from then to `now`, ns that it took or 0] each; `now` is of the monotonic clock."""
    known = [one for one in [*_of_torch(), *_of_mpi()] if one[2]]
    return [[group, number, what, now - at, took] for group, number, what, at, took in known[-KEPT:]]


def news(now: int) -> list[list[Any]]:
    """What was entered since the last call: [group, size or 0, operation, [number, µs from then to `now`, …]] each."""
    most = max(LEAST, min(MOST, _OF_ALL_RANKS // int(os.environ.get("WORLD_SIZE") or 1)))
    new, messages = [], False
    for group, number, what, at, _ in sorted([*_of_torch(), *_of_mpi()], key=lambda one: one[3]):
        if what and number > _told.get(group, 0):
            new.append((group, number, AFTER_MESSAGES if messages else what, at))
        messages = not what
    found: dict[tuple[str, str], list[int]] = {}
    for group, number, what, at in new[-most:]:
        found.setdefault((group, what), []).extend((number, (now - at) // 1000))
        _told[group] = max(_told.get(group, 0), number)
    sizes = _sizes() if found else {}
    return [[group, sizes.get(group, 0), what, figures] for (group, what), figures in found.items()]


def news_if_due(now: int) -> list[list[Any]]:
    """The same, but nothing if it is too early to ask again."""
    global _due
    import time

    if now < _due:
        return []
    began = time.thread_time_ns()
    found = news(now)
    _due = now + int((time.thread_time_ns() - began) / SHARE)
    return found


def last_news(now: int) -> list[list[Any]]:
    """The same, at the rank's end."""
    found = news(now)
    return found if sum(_told.values()) >= WORTHWHILE else []


def _sizes() -> dict[str, int]:
    """How many ranks each group has; of those that are destroyed it is not known any more."""
    from . import groups

    return {f"{mpi}{name}": len(ranks) for _, name, ranks in groups.known() for mpi in ("", "mpi ")}


def _of_torch() -> list[tuple[str, int, str, int, int]]:
    """(group, number, what, when by the monotonic clock, ns that it took or 0) each; of messages `what` is empty."""
    import time

    from . import flight_recorder

    to_monotonic = time.monotonic_ns() - time.time_ns()
    return [
        (
            str(one["process_group"][0]),
            int(one["collective_seq_id"]),
            "" if one["is_p2p"] else str(one["profiling_name"].partition(":")[2] or one["profiling_name"]),
            int(one["time_created_ns"]) + to_monotonic,
            int(one.get("duration_ms", 0) * 1e6),
        )
        for one in flight_recorder.entries()
    ]


def _of_mpi() -> list[tuple[str, int, str, int, int]]:
    recorder: Any = sys.modules.get("launchpad.collectives.mpi.recorder")
    return [] if recorder is None else list(recorder.entered())
