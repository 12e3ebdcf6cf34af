"""Rows of a timeline of very many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.protocol.events import (
    ExceptionRaised,
    JobOver,
    JobPlanned,
    ModulesImported,
    PhaseChanged,
    RankExited,
    RankStarted,
)
from launchpad.report import fold
from launchpad.report.timeline import Curve, Timeline, TimelineBuilder
from tests.support.report import raised, second

HOSTS, PER_HOST = 100, 8
RANKS = HOSTS * PER_HOST


def timeline(*exceptions: ExceptionRaised) -> Timeline:
    """Rank 123 fails, the others are stopped."""
    nodes = [(f"n{host}", [*range(host * PER_HOST, (host + 1) * PER_HOST)]) for host in range(HOSTS)]
    planned = JobPlanned(second(0), 1.7e9, "j", 1, "id", ["t.py"], "/w", nodes, {}, 0.0, "")
    building = TimelineBuilder(Diagnosis())
    for event in (
        planned,
        *(ModulesImported(second(1), 0.5, ["torch"], node) for node in range(HOSTS)),
        *(RankStarted(second(2 + rank / 1000), rank, 1000 + rank) for rank in range(RANKS)),
        *exceptions,
        RankExited(second(10), 123, 1, 5 << 20, None),
        PhaseChanged(second(11), "stopping", "failure", 15, 5.0, [rank for rank in range(RANKS) if rank != 123]),
        *(RankExited(second(12 + rank / 1000), rank, -15, rank << 20, None) for rank in range(RANKS) if rank != 123),
        PhaseChanged(second(14), "over", "failure", 0, 0.0, []),
        JobOver(second(15), 1),
    ):
        building.on(event)
    return building.done()


def test_ranks_with_the_same_fate_are_one_row() -> None:
    rows, without = fold.folded(timeline(raised(9, 123, 1123)).rows)
    assert [(row.name, row.kind, row.ranks) for row in rows] == [
        ("job", "job", ""),
        ("100 hosts: n0, n1, n2, n3, n4, n5, n6, …, n99", "host", ""),
        ("rank 123", "rank", "123"),
        ("ranks 0-122, 124-799", "rank", "0-122,124-799"),
    ]
    assert without == 0
    (_, run), (signal, exited) = rows[-1].spans, rows[-1].marks
    assert (run.start, run.end, run.outcome) == (second(2) - second(0), second(12.799) - second(0), "stopped")
    assert run.words == "killed by SIGTERM (Terminated) (799 ranks)"
    assert (signal.text, exited.time) == ("SIGTERM (799 ranks)", second(12) - second(0))
    assert rows[2].spans[-1].words == "pid 1123: exit code 1"


def test_if_there_is_still_too_much_those_that_look_alike_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(rank: int) -> ExceptionRaised:
        event = raised(9, rank, 1000 + rank)
        return event._replace(traceback={**event.traceback, "message": f"at 0x{rank:x}"})

    whole = timeline(*map(said, range(RANKS)))
    rows, without = fold.folded(whole.rows)
    assert ([row.ranks for row in rows[2:]], without) == (["123", "0-122,124-799"], 0)
    monkeypatch.setattr(fold, "MOST_ROWS", 1)
    rows, without = fold.folded(whole.rows)
    assert ([row.ranks for row in rows[2:]], without) == (["123"], 799)


def test_few_ranks_have_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "MOST_ROWS", RANKS)
    whole = timeline()
    rows, _ = fold.folded(whole.rows)
    assert len(rows) == 1 + HOSTS + RANKS
    assert [line.ranks for line in fold.outcomes(whole.ranks)] == [str(rank) for rank in range(RANKS)]


def test_the_table_has_a_line_for_those_that_ended_alike() -> None:
    alike, failed = fold.outcomes(timeline().ranks)
    assert (alike.ranks, alike.hosts, alike.one.pid, alike.one.memory) == ("0-122, 124-799", "100 hosts", 0, 799 << 20)
    assert (failed.ranks, failed.hosts, failed.one.pid) == ("123", "n15", 1123)


def test_of_many_curves_the_outermost_are_drawn() -> None:
    curve = Curve("CPU", "cores", {rank: ((0, 0.0), (1, float(rank * 7 % 1000))) for rank in range(1000)})
    peaks = sorted(points[-1][1] for points in fold.outermost(curve).by_rank.values())
    assert peaks == [float(value) for value in (*range(256), *range(744, 1000))]
    few = replace(curve, by_rank={0: ((0, 1.0),)})
    assert fold.outermost(few) is few
