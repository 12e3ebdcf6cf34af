"""Which rank the others wait for: from made arrival times."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host.hindrances import HindranceReader
from launchpad.console.top_screen import job_lines
from launchpad.diagnosis.activity import look_at
from launchpad.diagnosis.arrivals import Comparison
from launchpad.diagnosis.hindered import reason
from launchpad.diagnosis.history import History
from launchpad.diagnosis.straggler_sink import StragglerSink
from launchpad.diagnosis.stragglers import Tally
from launchpad.protocol.events import (
    ArrivalsCompared,
    ArrivalTimes,
    Hindrances,
    JobPlanned,
    PhaseChanged,
    RankStarted,
    Restarted,
    SamplesTaken,
)

MS = 1_000_000
STEP = 50 * MS

Work = Callable[[int, int], float]  # of a rank and a step: ns until it enters the collective


class Job:
    """A job that is played with numbers: each step, every rank works and then enters a collective."""

    def __init__(self, ranks: int, nodes: Sequence[int] = (), doubt: int = 0, operation: str = "all_reduce") -> None:
        self.arrivals, self.tally = Comparison(), Tally()
        self.ranks, self.nodes, self.doubt, self.operation = ranks, nodes or [0] * ranks, doubt, operation
        self.doubts: dict[int, int] = {}  # by node, if they differ
        self.free = [0] * ranks
        self.steps = 0
        self.told: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.numbers: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def enter(self, group: str, members: Sequence[int], work: Callable[[int], float], *, waits: bool = True) -> None:
        """All members work, then enter the collective; if it `waits`, they go on when the last one has."""
        self.sizes[group] = len(members)
        number = self.numbers[group] = self.numbers.get(group, 0) + 1
        times = {rank: self.free[rank] + int(work(rank)) for rank in members}
        for rank, at in times.items():
            self.told.setdefault((rank, group), []).append((number, at))
            self.free[rank] = max(times.values()) if waits else at

    def steps_of(self, count: int, work: Work) -> Job:
        for _ in range(count):
            self.steps += 1
            self.enter("0", range(self.ranks), lambda rank: work(rank, self.steps))
        self.tell()
        return self

    def tell(self, *silent: int) -> ArrivalsCompared | None:
        """Every rank tells what it has entered, and all is compared."""
        for rank in range(self.ranks):
            groups, now = [], max(self.free)
            for group in sorted(self.numbers):
                told = [] if rank in silent else self.told.pop((rank, group), [])
                if told:
                    groups.append(
                        [
                            group,
                            self.sizes[group],
                            self.operation,
                            [x for n, at in told for x in (n, (now - at) // 1000)],
                        ]
                    )
            doubt = self.doubts.get(self.nodes[rank], self.doubt)
            self.arrivals.add(ArrivalTimes(now, rank, groups, doubt), self.nodes[rank])
        compared = self.arrivals.compare(max(self.free))
        if compared is not None:
            self.tally.add(compared)
        return compared

    @property
    def slow(self) -> list[int]:
        found = self.tally.straggler()
        return found.ranks if found else []


def late(rank: int, by: float = STEP / 2) -> Work:
    return lambda one, _: STEP + (by if one == rank else 0)


def test_the_slow_rank_is_named_with_what_it_costs() -> None:
    found = Job(4).steps_of(105, late(2)).tally.straggler()
    assert found is not None
    assert found.sentence == (
        "is the last to enter 100% of the all_reduces, by a median of 25 ms; the others spend 32% of their time "
        "waiting for it"
    )
    assert (found.ranks, found.operation, found.because) == ([2], "all_reduce", "")


def test_what_was_told_in_parts_makes_the_same_whole() -> None:
    whole, parts = Job(4).steps_of(200, late(1)), Job(4)
    for _ in range(10):
        parts.steps_of(20, late(1))
    first, second = whole.tally.straggler(), parts.tally.straggler()
    assert first is not None
    assert second is not None
    assert first._replace(share=0) == second._replace(share=0)
    assert first.share == pytest.approx(second.share, rel=0.01)


def test_who_tells_late_is_waited_for() -> None:
    job = Job(3)
    for step in range(1, 121):
        job.enter("0", range(3), lambda rank: late(1)(rank, 0))
        if step % 30 == 0:
            job.tell(1)
    assert job.slow == []
    job.tell()
    assert job.slow == [1]


def test_two_of_four_are_named_together() -> None:
    found = Job(4).steps_of(100, lambda rank, _: STEP + (STEP / 2 if rank > 1 else rank * MS)).tally.straggler()
    assert found is not None
    assert found.ranks == [2, 3]
    assert found.sentence.startswith("are the last to enter 100% of the all_reduces")
    assert found.sentence.endswith("waiting for them")


HEALTHY: dict[str, tuple[int, Callable[[random.Random], Work]]] = {
    "even": (300, lambda _: lambda _, __: STEP),
    "noisy": (300, lambda r: lambda _, __: STEP + r.gauss(0, STEP / 10)),
    "very noisy": (300, lambda r: lambda _, __: STEP * r.paretovariate(2)),
    "in turn": (300, lambda _: lambda rank, step: STEP * (2 if step % 4 == rank else 1)),
    "in turn for a while": (320, lambda _: lambda rank, step: STEP * (2 if step // 20 % 4 == rank else 1)),
    "rank 0 logs": (300, lambda r: lambda rank, step: STEP * (r.gauss(1, 0.01) + 0.3 * (rank == step % 10 == 0))),
    "a few checkpoints": (300, lambda _: lambda rank, step: STEP * (20 if rank == 0 and step % 100 == 0 else 1)),
    "the first steps": (100, lambda _: lambda rank, step: STEP * (50 if rank == 0 and step <= 5 else 1)),
    "too short": (20, lambda _: late(2)),
    "too little": (300, lambda _: late(2, STEP / 25)),
    "pauses": (100, lambda r: lambda _, __: STEP + (r.expovariate(1 / (2 * STEP)) if r.random() < 0.03 else 0)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nobody_is_named_without_need(name: str) -> None:
    steps, make = HEALTHY[name]
    for seed in range(5):
        for ranks in (2, 4, 7):
            assert Job(ranks).steps_of(steps, make(random.Random(seed))).slow == [], (seed, ranks)


HABITS: dict[str, Work] = {
    "hiccups": lambda rank, step: STEP * (3 if rank == 1 and step % 7 == 0 else 1),
    "many checkpoints": lambda rank, step: STEP * (5 if rank == 1 and step % 25 == 0 else 1),
    "later on": lambda rank, step: STEP * (2 if rank == 1 and step > 200 else 1),
}


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_named(name: str) -> None:
    assert Job(4).steps_of(300, HABITS[name]).slow == [1]


def test_who_waited_in_a_smaller_group_is_not_to_blame() -> None:
    job = Job(4)
    for _ in range(100):
        for group in ([0, 1], [2, 3]):
            job.enter(str(group), group, lambda rank: late(3)(rank, 0))
        job.enter("all", range(4), lambda _: MS)
    job.tell()
    assert job.slow == [3]


def test_who_goes_on_does_not_wait() -> None:
    """Rank 1 issues its asynchronous collectives 20 ms after the others, which do not need their results."""
    job = Job(2)
    job.free = [0, 20 * MS]
    for _ in range(200):
        job.enter("0", range(2), lambda _: 10 * MS, waits=False)
    compared = job.tell()
    assert compared is not None
    by_rank = {row[0]: row for row in compared.ranks}
    assert by_rank[1][4] <= 0.020  # after the last one nobody goes on


def test_what_the_clocks_leave_open_does_not_count() -> None:
    assert Job(4, [0, 0, 1, 1]).steps_of(300, late(3, 5 * MS)).slow == [3]
    assert Job(4, [0, 0, 1, 1], doubt=3 * MS).steps_of(100, lambda rank, _: STEP + (rank > 1) * 5 * MS).slow == []
    # Two of one node have left the last collective one after the other, as one had to wait for a message.
    assert Job(4, [0, 0, 1, 1], doubt=3 * MS).steps_of(100, late(1, 5 * MS)).slow == []


def test_a_host_that_is_far_away_is_named() -> None:
    def job(trip: int, nodes: Sequence[int]) -> Job:
        """Every step takes 50 ms."""
        job = Job(4, nodes)
        job.doubts = {node: trip // 2 if node == max(nodes) else 50_000 for node in nodes}
        return job.steps_of(100, late(-1))

    found = job(20 * MS, [0, 0, 1, 1]).tally.straggler()
    assert found is not None
    assert found.ranks == [2, 3]
    assert found.sentence == (
        "seem far away: a message from launchpad to them and back takes 20 ms, to the others 100 µs; if one between "
        "the ranks takes as long, they hold up the others at least 38% of the time"
    )
    assert job(4 * MS, [0, 0, 1, 1]).slow == []
    assert job(20 * MS, [0, 0, 0, 0]).slow == []
    assert job(60 * MS, [0, 0, 1, 1]).slow == []  # nobody can have waited for it


def test_a_broadcast_waits_for_nobody() -> None:
    assert Job(4, operation="broadcast").steps_of(100, late(3)).slow == []
    assert Job(4, operation="_reduce_scatter_base").steps_of(100, late(3)).slow == [3]


def test_who_may_have_waited_for_a_message_is_not_late() -> None:
    """The first stage of a pipeline is the last one to be done with each step."""
    job = Job(4)
    for _ in range(100):
        job.enter("0", range(4), lambda rank: late(0)(rank, 0))
    figures = {rank: job.told.pop((rank, "0")) for rank in range(4)}
    for rank, told in figures.items():
        operation = "after messages" if rank == 0 else "all_reduce"
        row = ["0", 4, operation, [x for n, at in told for x in (n, (10**12 - at) // 1000)]]
        job.arrivals.add(ArrivalTimes(10**12, rank, [row]), 0)
    assert job.arrivals.compare(1) is None


def test_what_is_missing_does_not_count_as_time() -> None:
    """The recorders have kept only the last of very many collectives."""
    job = Job(2).steps_of(50, late(1))
    for _ in range(1000):
        job.enter("0", range(2), lambda rank: late(1)(rank, 0))
    for told in job.told.values():
        del told[:-50]
    job.tell()
    found = job.tally.straggler()
    assert found is not None
    assert found.share == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(
    "groups", [[1], [["0"]], [["0", 2, "all_reduce", [1]]], [["0", 2, "all_reduce", ["x", 1]]], [None]]
)
def test_what_makes_no_sense_is_ignored(groups: list[Any]) -> None:
    arrivals = Comparison()
    arrivals.add(ArrivalTimes(1, 0, groups), 0)
    assert arrivals.compare(2) is None


# Why.


def went_through(*rows: Sequence[float], node: int = 0, **host: float) -> dict[int, tuple[Hindrances, Hindrances]]:
    """The figures of a node's ranks over 10 s: [rank, CPU, queued, blocked, faults, throttled, MHz, GPU throttled]."""
    usual = {"cores": 2.0, "busy": 0.0, "stolen": 0.0, "swapped": 0.0, "retransmitted": 0.0} | host
    before = Hindrances(0, [[row[0], 0, 0, 0, 0, 0, *row[-2:]] for row in rows], dict.fromkeys(usual, 0.0))
    return {node: (before, Hindrances(10**10, [list(row) for row in rows], usual))}


WELL = (2.0, 0.1, 0.0, 0.0, 0.0, 2600.0, 0.0)

REASONS: dict[str, tuple[dict[int, tuple[Hindrances, Hindrances]], str]] = {
    "quota": (
        went_through([0, *WELL], [1, 2.0, 0.1, 0, 0, 6.0, 2600, 0]),
        "its cgroup has used up its CPU quota 60% of the time",
    ),
    "swap": (
        went_through([0, *WELL], [1, 2.0, 0.1, 0, 900, 0, 2600, 0], swapped=9000),
        "its memory has to be read from swap, 90 page faults per second",
    ),
    "faults": (
        went_through([0, *WELL], [1, 2.0, 0.1, 0, 900, 0, 2600, 0]),
        "its memory has to be read from a disk, 90 page faults per second",
    ),
    "disk": (went_through([0, *WELL], [1, 2.0, 0.1, 4.0, 0, 0, 2600, 0]), "it waits for a disk 40% of the time"),
    "heat": (
        went_through([0, *WELL], [1, 2.0, 0.1, 0, 0, 0, 2600, 1]),
        "its GPU is throttled, because of heat or power",
    ),
    "stolen": (went_through([0, *WELL], [1, *WELL], stolen=8.0), "the hypervisor takes 0.8 of its host's 2 cores"),
    "queued": (
        went_through([0, *WELL], [1, 2.0, 5.0, 0, 0, 0, 2600, 0], busy=14.0),
        "its threads wait for a core 50% of the time; other programs use 1.0 of its host's 2 cores",
    ),
    "clock": (
        went_through([0, *WELL], [2, *WELL]) | went_through([1, *WELL[:-2], 800.0, 0.0], node=1),
        "the cores on which it may run are clocked at 800 MHz, those of the others at 2600",
    ),
    "network": (
        went_through([0, *WELL]) | went_through([1, *WELL], node=1, retransmitted=300),
        "its host retransmits 30 TCP segments per second",
    ),
    "work": (
        went_through([0, *WELL], [1, 6.0, 0.1, 0, 0, 0, 2600, 0]),
        "it computes more: it uses 0.60 cores, the others 0.20",
    ),
    "unclear": (went_through([0, *WELL], [1, *WELL]), ""),
    "all alike": (went_through([0, 2.0, 5.0, 0, 0, 0, 2600, 0], [1, 2.0, 6.0, 0, 0, 0, 2600, 0]), ""),
    "unknown": (went_through([0, -1, -1, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1, -1], busy=-1), ""),
    "not sampled": ({}, ""),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_what_only_the_slow_rank_went_through(name: str) -> None:
    taken, says = REASONS[name]
    assert reason(1, taken, 0.3) == says


def test_the_quota_is_that_of_the_process_or_one_above(tmp_path: Path) -> None:
    pid = os.getpid()
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = tmp_path / ("cpu" if "cpu" in controllers.split(",") else "") / path.strip("/")
        if not controllers or "cpu" in controllers.split(","):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cpu.stat").write_text("nr_periods 1\nthrottled_usec 1500000\n")
    assert HindranceReader(str(tmp_path)).read({pid: [pid]})[pid][3] == 1.5


# The sink, and what shows it.


def compared(rank: int = 1, because: str = "") -> ArrivalsCompared:
    rows = [[one, 100, *((100, 0.18, 31.0, 9.61) if one == rank else (0, 0.0, 0.0, 0.0)), 100.0] for one in range(4)]
    return ArrivalsCompared(9, "all_reduce", rows, because)


def planned(*nodes: list[Any]) -> JobPlanned:
    return JobPlanned(1, 0.0, "j", 1, "r", ["train.py"], "/", list(nodes), {}, 0.0, "")


SENTENCE = (
    "last to enter 100% of the all_reduces, by a median of 180 ms; the others spend 31% of their time waiting for it"
)


def test_the_sentence_names_the_host_if_there_are_several() -> None:
    assert History([planned(["a", [0, 1, 2, 3]]), compared()]).slow() == f"rank 1 is the {SENTENCE}"
    history = History([planned(["a", [0, 1]], ["b", [2, 3]]), compared(3)])
    assert history.slow() == f"rank 3 (host b) is the {SENTENCE}"
    assert history.slow(recent=True) == history.slow()
    history.on(Restarted(10, 1, 3, 1, 1, -1))
    assert history.slow() == ""


def test_the_reason_is_the_one_that_explains_most() -> None:
    history = History([planned(["a", [0, 1, 2, 3]]), *(compared(because=one) for one in "xyy")])
    assert history.slow().endswith("for it: y")


def test_top_says_it_of_late() -> None:
    history = History([planned(["a", [0, 1, 2, 3]]), RankStarted(2, 0, 5), *[compared(3)] * 7])
    look = look_at(history, SamplesTaken(9, [1], [], []), {}, -1, {})
    assert job_lines(look, [], 200)[2].plain == f"rank 3 is the {SENTENCE}"
    for _ in range(6):
        history.on(compared(3)._replace(ranks=[[one, 100, 25, 0.001, 0.1, 0.001, 100.0] for one in range(4)]))
    look = look_at(history, SamplesTaken(9, [1], [], []), {}, -1, {})
    assert len(job_lines(look, [], 200)) == 2
    assert history.slow()  # of the whole attempt


def test_the_sink_compares_a_second_after_the_first_answer_and_at_the_end() -> None:
    told: list[ArrivalsCompared] = []
    sink = StragglerSink(History([planned(["a", [0, 1]])]), told.append)
    times = [[1 + number, 1000 * (200 - number)] for number in range(100)]
    figures = [x for pair in times for x in pair]
    assert sink.deadline is None
    for rank in range(2):
        sink.on(ArrivalTimes(10**9 + rank * MS, rank, [["0", 2, "all_reduce", figures]]))
    assert sink.deadline is not None
    sink.tick(0.0)
    assert sink.deadline is None
    (first,) = told
    assert [row[:3] for row in first.ranks] == [(0, 95, 0), (1, 95, 95)]
    sink.on(PhaseChanged(3, "over", "", 0, 0.0, []))
    assert len(told) == 1  # nothing is new
    sink.on(Restarted(10, 1, 3, 1, 1, -1))
    for rank in range(2):
        sink.on(ArrivalTimes(10**9, rank, [["0", 2, "all_reduce", figures]]))
    sink.on(PhaseChanged(3, "over", "", 0, 0.0, []))
    assert len(told) == 2
