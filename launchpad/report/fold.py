"""Folds rows of a timeline that nobody could read: those of ranks, or hosts, to which the same happened. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from launchpad.job.hosts import some_of
from launchpad.job.outcome import ranges, several_in_words
from launchpad.report.timeline import HOST, JOB, Curve, Mark, RankOutcome, Span, TimelineRow

# So many ranks, or hosts, have a row each.
MOST_ROWS = 512


class ShownRow(NamedTuple):
    """A row of the page."""

    name: str
    kind: str  # "job", "host" or "rank"
    ranks: str  # as they are typed to filter the output: "0-2,4"
    spans: Sequence[Span]
    marks: Sequence[Mark]


class ShownOutcome(NamedTuple):
    """How ranks ended: a line of the table."""

    ranks: str
    hosts: str
    one: RankOutcome  # of several: pid 0, when the first started and the last ended, the most memory


def folded(rows: Sequence[TimelineRow]) -> tuple[list[ShownRow], int]:
    """The rows to be shown, and how many ranks have none."""
    ranks = [row for row in rows if row.rank >= 0]
    hosts = [row for row in rows if row.rank == HOST]
    found = [ShownRow(row.name, "job", "", row.spans, row.marks) for row in rows if row.rank == JOB]
    if max(len(ranks), len(hosts)) <= MOST_ROWS:
        return [_alone(row) for row in rows], 0
    by_fate = _grouped([row for row in hosts if row.spans or row.marks])
    found += [_together(group, "host") for group in by_fate[:MOST_ROWS]]
    by_fate = _grouped(ranks)
    found += [_together(group, "rank") for group in by_fate[:MOST_ROWS]]
    return found, sum(map(len, by_fate[MOST_ROWS:]))


def _alone(row: TimelineRow) -> ShownRow:
    kind = {JOB: "job", HOST: "host"}.get(row.rank, "rank")
    return ShownRow(row.name, kind, str(row.rank) if row.rank >= 0 else "", row.spans, row.marks)


def _grouped(rows: Sequence[TimelineRow]) -> list[list[TimelineRow]]:
    """Those to which the same happened; if that is too many, then those to which it looks alike. The smallest first."""
    for likeness in (_fate, _outline):
        groups = _by(likeness, rows)
        if len(groups) <= MOST_ROWS:
            break
    return sorted(groups, key=lambda group: (len(group), group[0].rank, group[0].node))


def _by(likeness: Callable[[Any], Hashable], rows: Iterable[Any]) -> list[list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for row in rows:
        groups.setdefault(likeness(row), []).append(row)
    return list(groups.values())


def _fate(row: TimelineRow) -> Hashable:
    """All but the times and the processes."""
    return (
        tuple([(one.kind, one.outcome, one.text) for one in row.spans]),
        tuple([(one.kind, one.text) for one in row.marks]),
    )


def _outline(row: TimelineRow) -> Hashable:
    return tuple([(one.kind, one.outcome) for one in row.spans]), tuple([one.kind for one in row.marks])


def _together(group: Sequence[TimelineRow], kind: str) -> ShownRow:
    """A row for all of them: from when the first began to when the last ended. A mark is where the first has it."""
    if len(group) == 1:
        return _alone(group[0])
    first, count = group[0], f" ({len(group)} {kind}s)"
    numbers = [row.rank for row in group]
    name = (
        several_in_words(numbers) if kind == "rank" else f"{len(group)} hosts: {some_of([row.name for row in group])}"
    )
    return ShownRow(
        name,
        kind,
        ",".join(ranges(numbers)) if kind == "rank" else "",
        [
            one._replace(
                start=min(row.spans[at].start for row in group),
                end=max(row.spans[at].end for row in group),
                text=one.text + count,
                pid=0,
            )
            for at, one in enumerate(first.spans)
        ],
        [
            one._replace(time=min(row.marks[at].time for row in group), text=one.text + count)
            for at, one in enumerate(first.marks)
        ],
    )


def outermost(curve: Curve) -> Curve:
    """Of very many ranks those with the highest and with the lowest peaks."""
    by_rank = curve.by_rank
    if len(by_rank) <= MOST_ROWS:
        return curve
    peaks = sorted(by_rank, key=lambda rank: max((value for _, value in by_rank[rank]), default=0.0))
    kept = sorted([*peaks[: MOST_ROWS // 2], *peaks[-MOST_ROWS // 2 :]])
    return Curve(curve.name, curve.unit, {rank: by_rank[rank] for rank in kept})


def outcomes(ranks: Sequence[RankOutcome]) -> list[ShownOutcome]:
    """The lines of the table: one for each rank, or for all that ended in the same way."""
    if len(ranks) <= MOST_ROWS:
        return [ShownOutcome(str(one.rank), one.host, one) for one in ranks]
    return [_ended_alike(group) for group in _by(lambda one: (one.how, one.outcome), ranks)[:MOST_ROWS]]


def _ended_alike(group: Sequence[RankOutcome]) -> ShownOutcome:
    if len(group) == 1:
        return ShownOutcome(str(group[0].rank), group[0].host, group[0])
    hosts = {one.host for one in group}
    return ShownOutcome(
        several_in_words([one.rank for one in group]).removeprefix("ranks "),
        hosts.pop() if len(hosts) == 1 else f"{len(hosts)} hosts",
        group[0]._replace(
            pid=0,
            started=min(one.started for one in group),
            ended=max(one.ended for one in group),
            memory=max(one.memory for one in group),
        ),
    )
