"""Compares when the ranks have entered their collectives: who came last, and how long the others waited for it. Pure.

A rank that comes late because it had itself waited for another, in a smaller group, is not to blame: the other one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from launchpad.protocol.events import ArrivalsCompared, ArrivalTimes, FarNode, LateRank

# In these every rank waits for all others. To a broadcast the others may come when they like.
_FOR_ALL = ("all", "reduce_scatter", "barrier", "coalesced")

# The first collectives of a group don't count: the ranks have not started at once.
_FIRST = 5

# So many collectives wait for those who have not told of them.
_MOST_OPEN = 5000

# A node is far away if a round trip to it takes so many ns, and so many times as long as to the others.
_FAR = 5_000_000
_FARTHER = 5

# A rank that was late by less than this part of its usual lateness happened to be the last of all.
_COUNTS = 0.1

# If so much of them is one operation, it stands for all.
_MOSTLY = 0.9


class _Collective(NamedTuple):
    group: str
    number: int
    operation: str
    times: dict[int, int]  # when each rank has entered it, in ns

    @property
    def last(self) -> int:
        return max(self.times.values())


class _GroupArrivals:
    """A process group, as far as it is known from who has entered its collectives."""

    def __init__(self) -> None:
        self.size = 0  # if it is known
        self.told: dict[int, int] = {}  # by rank: the number of the last collective that it has told of
        self.open: dict[int, _Collective] = {}  # by number: those of which not all members have told

    def complete(self) -> list[_Collective]:
        """The collectives that all have entered. Those that somebody has not told of, and won't, are dropped."""
        if len(self.told) < self.size:
            for number in sorted(self.open)[:-_MOST_OPEN]:
                del self.open[number]
            return []
        horizon = min(self.told.values())
        numbers = [number for number in self.open if number <= horizon]
        found = [self.open.pop(number) for number in numbers]
        return [one for one in found if len(one.times) == len(self.told) > 1]


class _RankTotals:
    """What a comparison finds of one rank."""

    def __init__(self) -> None:
        self.joined = 0
        self.late: list[tuple[int, int]] = []  # by how much it came last, and what that cost the others; ns each
        self.caused = self.squares = 0.0  # seconds


class Comparison:
    """What the ranks of one attempt tell."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupArrivals] = {}
        self._nodes: dict[int, int] = {}  # by rank
        self._doubts: dict[int, int] = {}  # by rank
        self._entered: dict[int, list[int]] = {}  # by rank: when it has entered the latest collectives, in order
        self._spans: dict[int, int] = {}  # by rank: how long it has been watched since the last comparison
        self._left: dict[int, tuple[int, int]] = {}  # by rank: when it left its last collective, who was to blame

    def add(self, event: ArrivalTimes, node: int) -> None:
        """Add what a rank has told; what has another form is ignored."""
        rank = event.rank
        try:
            told = [
                (str(group), int(number), str(operation), event.time - 1000 * int(before))
                for group, _, operation, figures in event.groups
                for number, before in zip(figures[::2], figures[1::2], strict=True)
            ]
            sizes = {str(group): int(size) for group, size, *_ in event.groups}
        except (TypeError, ValueError):
            return
        if not told:
            return
        self._nodes[rank], self._doubts[rank] = node, event.doubt
        whole = all(self._follows(rank, group, told) for group in {one[0] for one in told})
        times = sorted(at for _, _, _, at in told)
        before = self._entered.get(rank, [])
        since = before[-1] if before and whole else times[0]
        self._spans[rank] = self._spans.get(rank, 0) + times[-1] - since
        self._entered[rank] = [*before, *times][-_MOST_OPEN:]
        for group, number, operation, at in told:
            known = self._groups.setdefault(group, _GroupArrivals())
            known.size = max(known.size, sizes[group])
            known.told[rank] = max(number, known.told.get(rank, 0))
            one = known.open.setdefault(number, _Collective(group, number, operation, {}))
            one.times[rank] = at
            if not operation.lstrip("_").startswith(_FOR_ALL):
                known.open[number] = one._replace(operation=operation)

    def _follows(self, rank: int, group: str, told: Sequence[tuple[str, int, str, int]]) -> bool:
        """Whether nothing is missing between what it told before and this."""
        first = min(number for name, number, _, _ in told if name == group)
        known = self._groups.get(group)
        return first == (known.told.get(rank, 0) if known else 0) + 1

    def compare(self, now: int) -> ArrivalsCompared | None:
        """What was entered since the last time."""
        found = [one for group in self._groups.values() for one in group.complete()]
        found = [one for one in found if one.number > _FIRST and one.operation.lstrip("_").startswith(_FOR_ALL)]
        if not found:
            return None
        seen = {rank: _RankTotals() for one in found for rank in one.times}
        following = {rank: dict(pairwise(times)) for rank, times in self._entered.items()}
        for one in sorted(found, key=lambda one: one.last):
            self._judge(one, seen, following)
        together: dict[tuple[str, ...], int] = {}
        rows = [self._row(rank, seen[rank], together) for rank in sorted(seen)]
        far = self._far(found, following)
        self._entered = {rank: times[-1:] for rank, times in self._entered.items()}
        self._spans.clear()
        operations = [one.operation for one in found]
        most = max(set(operations), key=operations.count, default="")
        single = operations.count(most) >= _MOSTLY * len(operations)
        return ArrivalsCompared(now, most.strip("_") if single else "", rows, far=far)

    def _far(self, found: Sequence[_Collective], following: dict[int, dict[int, int]]) -> list[FarNode]:
        """The nodes to which a message and back takes much longer than to the others; how long they waited for that.

        A collective that takes no longer than one does not wait for it.
        """
        of: dict[int, list[int]] = {}
        for rank in sorted(self._nodes):
            of.setdefault(self._nodes[rank], []).append(rank)
        trips = {node: 2 * max(self._doubts[rank] for rank in ranks) for node, ranks in of.items()}
        rows: list[FarNode] = []
        for node, ranks in of.items():
            others = sorted(trip for other, trip in trips.items() if other != node)
            if not others or trips[node] < max(_FAR, _FARTHER * others[len(others) // 2]):
                continue
            waited = 0
            for one in found:
                if any(self._nodes[rank] != node for rank in one.times):
                    entered = [(rank, one.times[rank]) for rank in ranks if rank in one.times]
                    waited += sum(following[rank].get(at, at) - at >= trips[node] for rank, at in entered) * trips[node]
            watched = sum(self._spans.get(rank, 0) for rank in ranks)
            usual = others[len(others) // 2]
            rows.append((ranks, _seconds(trips[node]), _seconds(usual), _seconds(waited), _seconds(watched)))
        return rows

    def _judge(self, one: _Collective, seen: dict[int, _RankTotals], following: dict[int, dict[int, int]]) -> None:
        times = one.times
        first, last = min(times.values()), max(times.values())
        # Who comes after half of that time is late; if they are several, each is charged an equal part.
        late = [rank for rank, at in times.items() if 2 * at > first + last]
        early = [rank for rank, at in times.items() if 2 * at <= first + last]
        # A rank that had issued its next collective before did not wait for this one: it is asynchronous.
        ends = {rank: last if following[rank].get(at, last) >= last else at for rank, at in times.items()}
        slack = self._slack(times)
        waited = sum(max(0, ends[rank] - times[rank] - slack) for rank in early)
        usual = sorted(times[rank] for rank in early)[len(early) // 2]
        begun = [self._left[rank][0] for rank in early if rank in self._left]
        usual_begin = sum(begun) // len(begun) if begun else 0
        culprit = -1
        for rank in late if waited else ():
            began, for_whom = self._left.get(rank, (0, rank))
            # It still waited for that one when the others had begun to work.
            inherited = begun and 2 * (began - usual_begin) * len(early) > waited
            culprit = for_whom if inherited else rank
            blamed = seen.setdefault(culprit, _RankTotals())
            if culprit == rank:
                blamed.late.append((times[rank] - usual, waited))
            seconds = waited / len(late) / 1e9
            blamed.caused += seconds
            blamed.squares += seconds**2
        for rank, end in ends.items():
            seen[rank].joined += 1
            self._left[rank] = (end, culprit if culprit >= 0 else rank)

    def _slack(self, ranks: Iterable[int]) -> int:
        """What the clocks of several nodes leave open, and by how much they may leave a collective one after the other.

        Each is no more than a round trip between them, of which the doubt is half.
        """
        doubts = {self._nodes[rank]: self._doubts[rank] for rank in ranks}
        return 2 * sum(sorted(doubts.values())[-2:]) if len(doubts) > 1 else 0

    def _row(self, rank: int, one: _RankTotals, together: dict[tuple[str, ...], int]) -> LateRank:
        """A rank's row. `together`: how long all were watched that share these groups, as far as that is known."""
        groups = tuple(name for name, group in self._groups.items() if rank in group.told)
        if groups not in together:
            peers = {other for name in groups for other in self._groups[name].told}
            together[groups] = sum(self._spans.get(other, 0) for other in peers)
        others = together[groups] - self._spans.get(rank, 0)
        usual = _usual(one.late)
        last = sum(late >= _COUNTS * usual for late, _ in one.late)
        caused, squares = round(one.caused, 6), round(one.squares, 6)
        return rank, one.joined, last, _seconds(usual), caused, squares, _seconds(others)


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)


def _usual(late: Sequence[tuple[int, int]]) -> int:
    """By how much a rank was late where it mattered: half of the cost is due to collectives to which it came later."""
    half = sum(cost for _, cost in late) / 2
    for value, cost in sorted(late, reverse=True):
        half -= cost
        if half <= 0:
            return value
    return 0
