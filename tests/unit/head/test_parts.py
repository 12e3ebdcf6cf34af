"""head/part, head/parts, head/standing: who takes which message, and what an agent may say. Values only."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from launchpad.head.arrivals import JoinFailed
from launchpad.head.bringup import BringUp
from launchpad.head.machine import Action, HandOver
from launchpad.head.nodes import Nodes
from launchpad.head.part import InvalidMessage, Part, seers, takers
from launchpad.head.parts import parts_of
from launchpad.head.planner import Planner
from launchpad.head.profiles import Profiles
from launchpad.head.rank_input import RankInput
from launchpad.head.samples import Samples
from launchpad.head.standing import NEEDS_PART, may_send
from launchpad.head.stop_before import StopBefore
from launchpad.head.supervisor import Supervisor
from launchpad.job.faults import parse_faults
from launchpad.job.limits import Limits
from launchpad.job.plan import NodePlan, Plan, RankPlan, Stdin
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol import commands, events, wire
from launchpad.protocol.commands import Command, Profile
from launchpad.protocol.events import (
    AgentReady,
    AtPrompt,
    Event,
    Hindrances,
    MpiRequest,
    Output,
    ProfileRequested,
    ProfilesTaken,
    ProfileTaken,
    RankExited,
    RankFailed,
    RankStarted,
    Sampled,
    SampleRequested,
    SamplesTaken,
    StopRequested,
)
from launchpad.transport.memory import MemoryLink
from tests.support.hubs import FakeJob, FakeNodes

READY = AgentReady(0, 0.0, 1, "node0", 2, 0, None, 1 << 20, 1 << 20, 29501)


class _Listens(Part):
    """A part that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on(self, source: int, message: Any) -> None:
        self.got.append((source, message))


class _First(_Listens):
    takes = (Output,)
    sees = (RankStarted,)


class _Second(_Listens):
    takes = (Output, RankFailed)


def test_messages_are_routed_by_their_types() -> None:
    parts = [_First(), _Second()]
    table = takers(parts)
    assert {kind: len(takes) for kind, takes in table.items()} == {Output: 2, RankFailed: 1}
    for take in table[Output]:
        take(3, "message")
    assert [part.got for part in parts] == [[(3, "message")]] * 2
    assert seers(parts).keys() == {RankStarted}


def supervisor_of(spec: JobSpec) -> Supervisor:
    """Of a job on this machine, which has not begun."""
    bringup = BringUp()
    bringup.nodes = Nodes([MemoryLink()], bringup.inbox.put, 0.0)
    return Supervisor(bringup, Planner(spec, "abc", [READY]), [])


def full() -> JobSpec:
    """A job that has all parts."""
    return JobSpec(
        Target("program", "true"),
        nproc=2,
        backend="mpi",
        faults=parse_faults("kill:0@1", 0),
        limits=Limits(stop_at=time.time() + 1000, stall_timeout=10.0, timeout=100.0),
    )


def test_no_part_takes_what_is_the_supervisor_s_own() -> None:
    supervisor = supervisor_of(full())
    own = supervisor._own().keys()
    assert not own & takers(supervisor._parts).keys()
    # What several take is only for whoever has asked; the others drop it.
    common = Counter(kind for part in supervisor._parts for kind in part.takes)
    assert {kind for kind, count in common.items() if count > 1} == {events.Listening, events.Reached}


def test_every_action_of_the_state_machine_has_a_taker() -> None:
    supervisor = supervisor_of(JobSpec(Target("program", "true")))
    without = {kind for kind in Action.__args__ if not supervisor._takers.get(kind)}  # type: ignore[attr-defined]
    assert without == {HandOver}, "it takes a door, at which another launcher has joined that can lead"


def test_a_job_has_only_the_parts_that_it_needs() -> None:
    def names(spec: JobSpec) -> set[str]:
        supervisor = supervisor_of(spec)
        hub = supervisor._hub
        parts = parts_of(hub, supervisor._planner, Stdin(), reopen=None, door=None)
        return {type(part).__name__ for part in parts}

    assert names(full()) - names(JobSpec(Target("program", "true"))) == {"MpiService", "Injector", "StopBefore"}


def test_without_mpi_nobody_may_ask_for_it() -> None:
    supervisor = supervisor_of(JobSpec(Target("program", "true"), nproc=2))
    with pytest.raises(InvalidMessage):
        supervisor._route(0, MpiRequest(0, 0, ["cmd=lookup_name service=s"]))
    assert all(supervisor_of(full())._takers[kind] != supervisor._takers[kind] for kind in NEEDS_PART)


# What an agent may say.

NODE_OF = {0: 0, 1: 0, 2: 1}
ONES = (1.0,) * 7


@pytest.mark.parametrize(
    ("node", "event", "may"),
    [
        (0, RankStarted(0, 1, 71), True),
        (1, RankStarted(0, 1, 71), False),
        (0, RankStarted(0, 7, 71), False),
        (0, Output(0, 0, 1, b"x"), True),
        (0, Output(0, 2, 1, b"x"), False),
        (1, RankExited(0, 2, -9, 0, False), True),
        (1, events.CollectivesEntered(0, 1, []), False),
        (1, events.MilestoneReached(0, 0, "torch"), False),
        (0, Hindrances(0, [(0, *ONES), (1, *ONES)], {}), True),
        (0, Hindrances(0, [(0, *ONES), (2, *ONES)], {}), False),
        (1, events.Drained(0), True),
        (0, events.NodeLost(0, 1, "why", []), False),  # the head's own
        (0, commands.Finish(leave=True), False),
    ],
)
def test_an_agent_speaks_of_its_own_ranks(node: int, event: Any, may: bool) -> None:
    assert may_send(node, event, NODE_OF) == may


@pytest.mark.parametrize("kind", [*events.EVENTS, *commands.COMMANDS], ids=lambda kind: kind.__name__)
def test_what_a_message_is_about_is_declared_with_it(kind: Any) -> None:
    """What is not declared to be an agent's, only the head says; and an agent speaks of its own ranks alone."""
    message = kind._make([[[0]] if name == "ranks" else 0 for name in kind._fields])
    if kind in commands.COMMANDS or kind.about is None:
        assert not may_send(0, message, NODE_OF)
        return
    named = {"rank": events.its_rank, "ranks": events.each_rank}
    if kind is not events.Sampled:  # which is only shown
        assert kind.about is next((named[name] for name in kind._fields if name in named), events.the_node)
    assert may_send(0, message, NODE_OF)
    assert may_send(1, message, NODE_OF) == (kind.about is events.the_node)


def test_events_and_commands_are_declared_where_they_get_their_numbers() -> None:
    assert {kind.__module__ for kind in Event.__subclasses__()} == {events.__name__}
    assert {kind.__module__ for kind in Command.__subclasses__()} == {commands.__name__}
    assert len(wire.MESSAGES) <= 256


# Some parts.


def on_two_nodes() -> FakeJob:
    nodes = FakeNodes(0, 1)
    plans = (NodePlan(one, f"n{one}", "/", {}, (RankPlan(one, 0, (), {}),), {}) for one in range(2))
    return FakeJob(nodes, Plan("", tuple(plans)))


def test_a_sample_says_nothing_of_ranks_on_other_nodes() -> None:
    job = on_two_nodes()
    samples = Samples(job.hub, 0.0, list)
    job.at(0.0, 0, 1)
    samples.on(-1, SampleRequested(0, 5))
    for node in range(2):
        ranks = [(rank, "running", 1.0, 1, 1, 1, 1) for rank in (0, 1)]
        waits = [(rank, "all_reduce", 1, 1.0) for rank in (0, 1)]
        gpus = [(f"GPU-{node}", 5, 10, 20, {"0": 3, "1": 4, "x": 5})]
        children = [(rank, 71, "sleep 9", "S", 0.0, 1, 1) for rank in (0, 1)]
        samples.on(node, Sampled(0, 1, ranks, waits, gpus, children))
    samples.tick(0.0)
    (told,) = (one for one in job.told if isinstance(one, SamplesTaken))
    for node, sample in enumerate(told.samples):
        assert [row[0] for row in sample.ranks] == [node]
        assert [row[0] for row in sample.waits] == [node]
        assert [row[0] for row in sample.children] == [node]
        assert [users for *_, users in sample.gpus] == [{str(node): 3 + node}]


def test_a_profile_of_lost_ranks_is_answered() -> None:
    job = on_two_nodes()
    profiles = Profiles(job.hub)
    job.at(0.0, 0, 1)
    profiles.on(-1, ProfileRequested(0, 5, -1, 2.0))
    assert [type(one) for one in job.nodes.sent] == [Profile, Profile]
    profiles.on(0, ProfileTaken(0, 0, 1, "", "data"))
    assert job.told == []
    profiles.lose([1], "its node is lost")
    (taken,) = job.told
    assert isinstance(taken, ProfilesTaken)
    assert (taken.asker, [one.problem for one in taken.profiles]) == (5, ["", "its node is lost"])
    profiles.on(-1, ProfileRequested(0, 6, 9, 2.0))
    assert job.told[1].problem == "rank 9 is not running; running now: ranks 0-1"


def test_the_limits_stand_still_while_the_rank_that_has_our_input_waits_for_it() -> None:
    job = on_two_nodes()
    part = RankInput(job.hub, Stdin())
    part.on(0, AtPrompt(0, 0, True))
    assert job.hub.clock.waits_for_person
    part.on(0, AtPrompt(1, 0, False))
    assert not job.hub.clock.waits_for_person
    assert job.happened == [AtPrompt(0, 0, True), AtPrompt(1, 0, False)]
    with pytest.raises(InvalidMessage):
        part.on(1, AtPrompt(0, 1, True))


def test_the_ranks_are_stopped_before_the_allocation_ends_once() -> None:
    job = on_two_nodes()
    part = StopBefore(job.hub, time.time() + 100)
    due = part.deadline
    assert due is not None
    assert 0 < due <= 100
    part.tick(job.at(1.0))
    assert job.happened == []
    part.tick(job.at(101.0))
    part = StopBefore(job.hub, time.time() - 1)
    part.tick(job.at(101.0))
    part.tick(job.at(102.0))
    (stop,) = job.happened
    assert (type(stop), part.deadline) == (StopRequested, None)


def test_a_machine_that_can_not_join_is_told_of() -> None:
    supervisor = supervisor_of(JobSpec(Target("program", "true")))
    told: list[Any] = []
    supervisor._hub.happened = lambda _, event: told.append(event)
    supervisor._route(-1, JoinFailed("b", "no torch"))
    assert [(one.name, one.reason) for one in told] == [("b", "no torch")]
