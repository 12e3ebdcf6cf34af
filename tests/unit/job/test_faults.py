"""--inject: the grammar, and when each fault comes."""

from __future__ import annotations

import itertools
import queue
import re
from typing import Any

import pytest

from launchpad.errors import UsageError
from launchpad.head.injection import Injector
from launchpad.head.machine import Phase
from launchpad.head.nodes import Node, Nodes
from launchpad.job.faults import Fault, Faults, RandomKills, check_noticed, check_targets, parse_faults
from launchpad.job.plan import NodePlacement, Plan, make_plan
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol.commands import JobEnded, SignalAgent, SignalRank
from launchpad.protocol.events import (
    AgentReady,
    FaultInjected,
    FaultMissed,
    Pong,
    RankExited,
    RankStarted,
)
from launchpad.transport.memory import MemoryLink
from tests.support.command import DEADLINE
from tests.support.hubs import FakeJob

KILL, STOP, TERM = 9, 19, 15
START = 100.0


# The grammar.


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("kill:3@20s", [Fault("kill", 20.0, 3)]),
        ("term:0@1.5", [Fault("term", 1.5, 0)]),
        ("stop:host=b@1m", [Fault("stop", 60.0, host="b")]),
        ("cut:host=fe80::1@0", [Fault("cut", 0.0, host="fe80::1")]),
        (
            "kill:3@20s, kill:3@2s,cut:host=c@10s",
            [Fault("kill", 2.0, 3), Fault("cut", 10.0, host="c"), Fault("kill", 20.0, 3)],
        ),
    ],
)
def test_what_where_and_when(text: str, faults: list[Fault]) -> None:
    assert parse_faults(text, 7) == Faults(tuple(faults))
    assert parse_faults(",".join(map(str, faults)), 7) == Faults(tuple(faults))


def test_random_kills_have_a_seed() -> None:
    assert parse_faults("random:1/60s", 7).random == RandomKills(1, 60.0, 7)
    both = parse_faults("random:2/1m:8,kill:0@1", 7)
    assert both == Faults((Fault("kill", 1.0, 0),), RandomKills(2, 60.0, 8))
    assert str(both.random) == "random:2/60s:8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "'kill' is not WHAT:WHERE@WHEN; write kill:3@20s"),
        ("kill:3", "'kill:3' is not WHAT:WHERE@WHEN"),
        ("kill:@3", "'kill:@3' is not WHAT:WHERE@WHEN"),
        ("kill:-1@3", "'kill:-1@3' is not WHAT:WHERE@WHEN"),
        ("kill:host=@3", "'kill:host=@3' is not WHAT:WHERE@WHEN"),
        ("kill:3@1,", "'' is not WHAT:WHERE@WHEN"),
        ("exit:3@1s", "exit:3@1s: 'exit' is not a fault; choose from kill, stop, term, cut"),
        ("cut:3@1s", "cut:3@1s: only a host can be cut off; write cut:host=NAME@1s"),
        ("term:host=b@1s", "term:host=b@1s: a host's agent ignores TERM; write kill, stop or cut"),
        ("kill:3@soon", "kill:3@soon: 'soon' is not a time; write seconds (30), or 5m, 2h, 1d"),
        ("kill:3@-1", "kill:3@-1: '-1' is not a time"),
        ("random:60s", "random:60s: not random:NUMBER/TIME[:SEED]; write random:1/60s for one kill a minute"),
        ("random:0/60s", "random:0/60s: not random:NUMBER/TIME"),
        ("random:1/0", "random:1/0: not random:NUMBER/TIME"),
        ("random:1/60s:x", "random:1/60s:x: not random:NUMBER/TIME"),
        ("random:1/60s,random:1/9s", "random:1/9s: random kills are given twice; add up their rates"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_faults(text, 7)
    assert re.match(f"--inject:? {re.escape(message)}", str(raised.value))


def test_random_kills_are_the_same_for_the_same_seed() -> None:
    def first(seed: int, ranks: int = 4, count: int = 2000) -> list[Fault]:
        return list(itertools.islice(RandomKills(1, 60.0, seed).kills(ranks), count))

    kills = first(7)
    assert kills == first(7) != first(8)
    assert kills == sorted(kills, key=lambda kill: kill.at)
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert 50 < kills[-1].at / len(kills) < 70


def plan_of(*counts: int) -> Plan:
    """Nodes h0, h1 … with these numbers of ranks."""
    ready = AgentReady(0, 0.0, 1, "node", 8, 0, None, 1 << 20, 1 << 20, 29501)
    places = [NodePlacement(f"h{place}", count, "python3", "/") for place, count in enumerate(counts)]
    return make_plan(JobSpec(Target("program", "/bin/true")), [ready] * len(counts), "id", places)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill:4@1s", "--inject kill:4@1s: the job has no rank 4; it has ranks 0 to 3"),
        ("kill:host=b@1s", "--inject kill:host=b@1s: the job has no host b; it has h0, h1"),
    ],
)
def test_ranks_and_hosts_must_exist(text: str, message: str) -> None:
    check_targets(parse_faults("kill:3@1,stop:host=h1@2", 0), 4, ["h0", "h1"])
    with pytest.raises(UsageError, match=re.escape(message)):
        check_targets(parse_faults(text, 0), 4, ["h0", "h1"])


def test_a_silence_that_nobody_would_notice_is_refused() -> None:
    check_noticed(parse_faults("kill:host=h0@1,stop:host=h1@1,stop:0@1", 0), ["h1"])
    for text in ("stop:host=h0@1", "cut:host=h0@1"):
        with pytest.raises(UsageError, match=r"nobody would notice, .* choose another host, or kill"):
            check_noticed(parse_faults(text, 0), ["h1"])


# When each fault comes.


class Job:
    """Two nodes with two ranks each, of which all have started; what the agents and the sinks get."""

    def __init__(self, text: str) -> None:
        plan = plan_of(2, 2)
        self.links = [MemoryLink("h0", remote=True), MemoryLink("h1", remote=True)]
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.nodes = Nodes(self.links, self.inbox.put, 10.0)
        self.job = FakeJob(self.nodes, plan)
        self.told = self.job.told
        self.job.at(START)
        self.injector = Injector(self.job.hub, parse_faults(text, 7))
        self.start()

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(4):
            self.injector.on(0, RankStarted(0, rank, 1))

    def at(self, seconds: float, phase: Phase = "running") -> list[Any]:
        """What is injected or missed by then, as [signal, rank, node]."""
        self.told.clear()
        self.injector.tick(self.job.at(START + seconds, phase=phase))
        return [one[1:] if isinstance(one, FaultInjected) else one.fault for one in self.told]

    def heard(self, node: int) -> list[Any]:
        found = []
        while not self.links[node].heard.empty():
            found.append(self.links[node].heard.get())
        return found


def test_each_fault_comes_once_when_it_is_due() -> None:
    job = Job("term:1@5,kill:3@2,stop:host=h1@5,kill:host=h0@9")
    assert job.injector.deadline == START + 2
    assert job.at(1.9) == []
    assert job.at(2.1) == [(KILL, 3, 1)]
    assert job.heard(1) == [SignalRank(3, KILL)]
    assert job.injector.deadline == START + 5
    assert job.at(5) == [(TERM, 1, 0), (STOP, -1, 1)]
    assert (job.heard(0), job.heard(1)) == ([SignalRank(1, TERM)], [SignalAgent(STOP)])
    assert job.at(10) == [(KILL, -1, 0)]
    assert job.heard(0) == [SignalAgent(KILL)]
    assert (job.injector.deadline, job.at(99), job.at(99, "over")) == (None, [], [])


def test_a_fault_waits_for_its_rank() -> None:
    job = Job("kill:1@2,kill:1@2")
    assert job.at(2) == [(KILL, 1, 0)]
    assert job.at(2) == []
    job.injector.on(0, RankExited(0, 1, -9, 0, False))
    assert (job.injector.deadline, job.at(4, "clearing")) == (None, [])
    job.injector.lose(range(4), "")
    job.injector.start()
    job.start(0)
    assert job.at(5) == []
    job.start(1)
    assert job.injector.deadline == START + 2
    assert job.at(6) == [(KILL, 1, 0)]


def test_a_fault_waits_for_its_host() -> None:
    job = Job("kill:host=h1@2,kill:3@2")
    job.injector.lose([2, 3], "gone")
    job.nodes.abandon(1, JobEnded(4, []))
    assert (job.injector.deadline, job.at(3)) == (None, [])
    job.nodes.adopt(1, Node(MemoryLink("h1", remote=True), lambda _: None))
    assert job.at(4, "clearing") == [(KILL, -1, 1)]
    for link in job.links:
        link.hang_up()


def test_what_was_not_due_before_the_end_is_told() -> None:
    job = Job("kill:1@60,random:1/5s")
    assert job.at(0, "over") == ["kill:1@60s"]
    assert [type(one) for one in job.told] == [FaultMissed]
    assert (job.injector.deadline, job.at(999, "over")) == (None, [])


def test_random_kills_come_only_while_the_job_runs() -> None:
    job = Job("random:1/5s:7")
    kills = list(itertools.islice(RandomKills(1, 5.0, 7).kills(4), 3))
    assert job.injector.deadline == START + kills[0].at
    assert job.at(kills[0].at) == [(KILL, kills[0].rank, kills[0].rank // 2)]
    assert job.at(kills[1].at, "stopping") == []
    job.injector.on(0, RankExited(0, kills[2].rank, -9, 0, False))
    assert job.at(kills[2].at) == []


def test_nothing_comes_through_a_link_that_is_cut() -> None:
    """Neither way, and neither side is told, until the far end has hung up by itself."""
    job = Job("cut:host=h1@1,kill:2@2")
    job.nodes.read()
    assert job.at(1) == [(0, -1, 1)]
    job.nodes.forgive(START)
    assert job.at(2) == [(KILL, 2, 1)]
    job.nodes.tick(START)
    job.links[1].say(Pong(0, 0))
    job.links[0].say(Pong(1, 0))
    assert job.inbox.get(timeout=DEADLINE) == (0, Pong(1, 0))
    assert job.heard(1) == []
    abandoned: queue.SimpleQueue[str] = queue.SimpleQueue()
    job.links[1].abandon = lambda: abandoned.put("now")  # type: ignore[method-assign]
    job.nodes.abandon(1, JobEnded(4, []))
    assert abandoned.empty()
    job.links[1].hang_up()
    assert abandoned.get(timeout=DEADLINE) == "now"
    job.links[0].hang_up()
    assert job.inbox.get(timeout=DEADLINE)[0] == 0
    assert job.inbox.empty()
