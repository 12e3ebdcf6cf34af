"""Decides whether the others wait for one rank, or a few, and says so: "rank 5 is the last to enter …". Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from launchpad.protocol.events import ArrivalsCompared, LateRank

# What the others must have lost, as a share of their time. Less is not worth a word.
LEAST_SHARE = 0.05

# What each of them must have lost, in seconds: of a short job it is not worth a word either.
LEAST_SECONDS = 1.0

# To how many collectives a rank must have come: before, nothing can be said about it.
LEAST_JOINED = 20

# Over how many collectives, of equal cost, the loss must be spread: a pause or a few are no habit.
LEAST_EVENTS = 8.0

# A rank is slow only if it costs the others so many times as much as each of the rest does.
AHEAD = 2.0


# If so much of the collectives is one operation, it stands for all.
MOSTLY = 0.9


class Lateness:
    """The sum of several comparisons, for one rank."""

    def __init__(self) -> None:
        self.joined = self.last = 0
        self.late: list[tuple[float, int]] = []  # (median seconds, in how many collectives) of each comparison
        self.caused = self.squares = self.others = 0.0

    @property
    def least(self) -> float:
        """What it has caused, without what may be chance."""
        return self.caused - 2 * math.sqrt(self.squares)


class Straggler(NamedTuple):
    """Those for whom the others wait."""

    ranks: list[int]
    last: float  # the share of the collectives to which one of them came last; 0: they are not late, but far away
    late: float  # by how many seconds, in the median
    share: float  # of the others' time that they waited
    operation: str  # "" for several
    because: str  # "" if unknown

    @property
    def sentence(self) -> str:
        """What there is to say, after the ranks' names."""
        what = f"{self.operation or 'collective'}s"
        one = len(self.ranks) == 1
        if not self.last:
            return (
                f"seem{'s' * one} far away: {self.because}; if one between the ranks takes as long, "
                f"{'it holds' if one else 'they hold'} up the others at least {self.share:.0%} of the time"
            )
        text = (
            f"{'is' if one else 'are'} the last to enter {self.last:.0%} of the {what}, by a median of "
            f"{_in_words(self.late)}; the others spend {self.share:.0%} of their time waiting for "
            f"{'it' if one else 'them'}"
        )
        return f"{text}: {self.because}" if self.because else text


def _in_words(seconds: float) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / size:.3g} {unit}"


class Tally:
    """What the comparisons of one attempt say together."""

    def __init__(self, events: Iterable[ArrivalsCompared] = ()) -> None:
        self._ranks: dict[int, Lateness] = {}
        self._operations: Counter[str] = Counter()
        self._far: dict[tuple[int, ...], tuple[float, float, float, float]] = {}  # by ranks: see ArrivalsCompared
        self._reasons: dict[int, dict[str, float]] = {}  # by rank: how much each reason explains, in seconds
        for event in events:
            self.add(event)

    def add(self, event: ArrivalsCompared) -> None:
        """Add a comparison."""
        self._operations[event.operation] += int(max(row[1] for row in event.ranks))
        for ranks, trip, usual, waited, watched in event.far:
            _, _, before, seconds = self._far.get(tuple(ranks), (trip, usual, 0.0, 0.0))
            self._far[tuple(ranks)] = (trip, usual, before + waited, seconds + watched)
        for rank, joined, last, late, caused, squares, others in event.ranks:
            one = self._ranks.setdefault(int(rank), Lateness())
            one.joined += int(joined)
            one.last += int(last)
            one.late.append((late, int(last)))
            one.caused += caused
            one.squares += squares
            one.others += others
        if event.because:
            worst = worst_of(event)
            reasons = self._reasons.setdefault(int(worst[0]), {})
            reasons[event.because] = reasons.get(event.because, 0.0) + worst[4]

    @property
    def waited(self) -> float:
        """For how many seconds each rank waited for the last one, on average."""
        return sum(one.caused for one in self._ranks.values()) / len(self._ranks) if self._ranks else 0.0

    def straggler(self) -> Straggler | None:
        """Those for whom the others wait; None if that is nobody in particular."""
        order = sorted(self._ranks, key=lambda rank: -self._ranks[rank].caused)
        for count in range(1, len(order) // 2 + 1):
            slow, rest = order[:count], order[count:]
            if all(self._ranks[rank].least > AHEAD * self._ranks[rest[0]].caused for rank in slow):
                return self._straggler(slow) or self._far_away()
        return self._far_away()

    def _far_away(self) -> Straggler | None:
        """The ranks of a host for whose messages the others wait, if these take as long as ours do.

        Ours may make a detour, through a bastion.
        """
        for ranks, (trip, usual, waited, watched) in self._far.items():
            if waited >= LEAST_SHARE * watched > 0:
                times = _in_words(trip) + (f", to the others {_in_words(usual)}" if usual else "")
                because = f"a message from launchpad to {'it' if len(ranks) == 1 else 'them'} and back takes {times}"
                return Straggler(list(ranks), 0.0, trip, waited / watched, "", because)
        return None

    def _straggler(self, slow: list[int]) -> Straggler | None:
        figures, size = [self._ranks[rank] for rank in slow], len(self._ranks)
        caused = sum(one.caused for one in figures)
        others = max(one.others for one in figures) * (size - len(slow)) / (size - 1)
        joined = max(one.joined for one in figures)
        if not others or joined < LEAST_JOINED or caused < LEAST_SHARE * others:
            return None
        if caused < LEAST_SECONDS * (size - len(slow)):
            return None
        if any(one.caused**2 < LEAST_EVENTS * one.squares for one in figures):
            return None
        last = sum(one.last for one in figures)
        reasons = self._reasons.get(slow[0], {})
        operation, count = self._operations.most_common(1)[0]
        return Straggler(
            sorted(slow),
            min(1.0, last / joined),
            _median([late for one in figures for late in one.late]),
            min(1.0, caused / others),
            operation if count >= MOSTLY * self._operations.total() else "",
            max(reasons, key=reasons.__getitem__, default=""),
        )


def worst_of(event: ArrivalsCompared) -> LateRank:
    """The row of the rank that cost the others most."""
    return max(event.ranks, key=lambda row: row[4])


def _median(weighted: Iterable[tuple[float, int]]) -> float:
    """The value that half of the weight does not exceed."""
    known = sorted(one for one in weighted if one[1])
    half = sum(weight for _, weight in known) / 2
    for value, weight in known:
        half -= weight
        if half <= 0:
            return value
    return 0.0
