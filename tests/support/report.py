"""What the tests of report share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.protocol.events import (
    ExceptionRaised,
    JobOver,
    JobPlanned,
    NodeLost,
    PhaseChanged,
    RankExited,
    RankStarted,
    Restarted,
)
from launchpad.report.timeline import Curve, Timeline, TimelineBuilder


def second(number: float) -> int:
    return int((100 + number) * 1e9)


def timeline_of(events: Iterable[Any], curves: Sequence[Curve] = ()) -> Timeline:
    building = TimelineBuilder(Diagnosis())
    for event in events:
        building.on(event)
    return building.done(curves)


def raised(at: float, rank: int, pid: int) -> ExceptionRaised:
    frames = [["/home/ann/train.py", 6, "<module>", "f()"]]
    said = {"type": "ValueError", "bases": ["Exception"], "message": "no good", "frames": frames}
    return ExceptionRaised(second(at), rank, pid, "", said)


# Two attempts on two hosts: rank 1 raises, then host b is lost.
EVENTS = [
    JobPlanned(
        second(0), 1.7e9, "0badcafe", 7, "none", ["t.py"], "/home/ann", [["a", [0, 1]], ["b", [2]]],
        {"0": "0", "1": "1", "2": "2"}, 0.0, "/x",
    ),
    *(RankStarted(second(1), rank, 10 + rank) for rank in range(3)),
    raised(2, 1, 11),
    RankExited(second(2.1), 1, 1, 1 << 20, False),
    PhaseChanged(second(2.2), "stopping", "failure", 15, 5.0, [0, 2]),
    RankExited(second(2.3), 0, -15, 1 << 20, False),
    RankExited(second(2.4), 2, -15, 1 << 20, False),
    PhaseChanged(second(2.5), "over", "failure", 0, 0.0, []),
    Restarted(second(3), 1, 1, 1, 1, -1, 1),
    *(RankStarted(second(4), rank, 20 + rank) for rank in range(3)),
    NodeLost(second(6), 1, "it was silent for 10 s", [2]),
    PhaseChanged(second(6), "stopping", "lost", 15, 5.0, [0, 1]),
    RankExited(second(6.1), 0, -15, 2 << 20, False),
    RankExited(second(6.2), 1, -15, 2 << 20, False),
    PhaseChanged(second(6.3), "over", "lost", 0, 0.0, []),
    JobOver(second(6.5), 4),
]  # fmt: skip
