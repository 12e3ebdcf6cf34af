"""head/rosters: what nodes are told of who belongs to the job, and when too few are left. Values only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launchpad.head.arrivals import Superseded
from launchpad.head.machine import HandOver, Release
from launchpad.head.part import InvalidMessage
from launchpad.head.rosters import RosterKeeper
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.membership import Membership
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.job.spec import JobSpec, Target
from launchpad.job.succession import Peer, Roster, Rosters
from launchpad.protocol.commands import RosterChanged
from launchpad.protocol.events import CantLead, DoorsTried, GaveWay, NodeJoined, NodeLost, RosterHeld
from tests.support.hubs import FakeJob, FakeNodes


def _seat(node: int) -> NodePlan:
    return NodePlan(node, f"h{node}", ".", {}, (RankPlan(0, 0, (), {}),), {})


def of(membership: Membership, *, most: int = 0, period: float | None = None) -> Any:
    """What a planner knows of this job."""
    limits = Limits(max_restarts=RestartLimit(most, period))
    return SimpleNamespace(membership=membership, job="1a2b", spec=JobSpec(Target("program", "true"), limits=limits))


class FakeDoor:
    """Knows the launchers of the nodes that FakeNodes has."""

    def __init__(self) -> None:
        self.own = Peer("head", "", "", 29400)
        self.rosters: Rosters = ()
        self.gave_way: Rosters = ()
        self._came = 0

    def peer(self, link: Any) -> Peer:
        self._came += 1
        return Peer(f"key{self._came}", "", f"10.0.0.{link.number}", 40000)

    @property
    def can_hand_over(self) -> bool:
        return True

    def give_way(self, rosters: Rosters) -> None:
        self.gave_way = rosters

    def goes_on(self, code: int) -> bool:  # noqa: ARG002
        return bool(self.gave_way)

    def open(self, take: Any) -> None: ...
    def close(self) -> None: ...


class Head:
    """A head of these nodes, and what they have been told."""

    def __init__(self, *nodes: int, planner: Any = None, rosters: Rosters = (), restarts: int = 0) -> None:
        planner = planner or of(Membership(1, 4))
        self.door = FakeDoor()
        self.door.rosters = rosters
        self.nodes = FakeNodes(*nodes)
        self.job = FakeJob(self.nodes, Plan("", (_seat(2), _seat(0))))
        self.job.restarts = restarts
        self.keeper = RosterKeeper(self.job.hub, planner, self.door)
        self.keeper.start()

    def restarts(self) -> None:
        """A restart begins that counts."""
        self.job.attempt += 1
        self.job.restarts += 1
        self.keeper.start()

    def told(self) -> list[Rosters]:
        sent, self.nodes.sent = self.nodes.sent, []
        assert all(type(one) is RosterChanged for one in sent)
        return [tuple(one.rosters) for one in sent]

    def names(self) -> list[list[str]]:
        """Who is on the rosters that nodes have just got."""
        return [[peer.name for peer in roster.peers] for roster in self.told()[-1]]

    def holds(self, change: int, *nodes: int) -> None:
        for node in nodes:
            self.keeper.on(node, RosterHeld(0, change))

    def loses(self, node: int) -> list[object]:
        """Returns what happened to the job because of it."""
        self.nodes.open.discard(node)
        self.keeper.on(-1, NodeLost(0, node, "silent", []))
        happened, self.job.happened = self.job.happened, []
        return happened


def test_every_other_node_gets_the_roster_in_the_order_of_its_ranks() -> None:
    head = Head(0, 1, 2, 3)
    (one, *_) = sent = head.told()
    assert len(sent) == 3
    assert [peer.name for peer in one[-1].peers] == ["h2", "h0", "h1", "h3"]


def test_a_smaller_roster_stands_beside_the_larger_one_until_all_have_acknowledged_it() -> None:
    head = Head(0, 1, 2, 3)
    assert head.loses(3) == []
    assert head.names() == [["h2", "h0", "h1", "h3"], ["h2", "h0", "h1"]]
    head.holds(0, 1, 2)
    head.holds(1, 1)
    assert head.loses(2) == []
    assert head.names()[0] == ["h2", "h0", "h1", "h3"], "2 of 4 are here, and the second one has never been in force"
    head.holds(2, 1)
    assert head.loses(1) == [], "one of two"


def test_the_user_is_told_once_who_cannot_lead() -> None:
    head = Head(0, 1, 2, 3)
    (key,) = [peer.key for peer in head.told()[0][-1].peers if peer.name == "h1"]
    head.keeper.on(2, DoorsTried(0, [(key, "refused"), ("gone", "no answer")]))
    head.keeper.on(3, DoorsTried(0, [(key, "no answer")]))
    (cant,) = head.job.happened
    assert cant == CantLead(cant.time, 1, "10.0.0.1:40000", [2], "refused"), "of four, it and another one are too few"
    with pytest.raises(InvalidMessage):
        head.keeper.on(2, DoorsTried(0, [("x", "")] * 5))


def test_a_head_that_loses_more_than_half_at_once_says_so() -> None:
    head = Head(0, 1, 2)
    assert head.loses(1) == []
    (lost,) = head.loses(2)
    assert isinstance(lost, GaveWay)
    assert lost.node == 2
    assert lost.reason == "more than half of the job's 3 nodes were lost, and may go on together: its part here ends"
    (left,) = head.door.gave_way
    assert len(left.peers) == 3, "the smaller one was never in force, and will never be"


def test_a_head_waits_for_no_other_if_the_job_ends_with_the_loss_of_a_node() -> None:
    head = Head(0, 1, 2, planner=of(Membership(2, 2)))
    head.keeper.on(-1, NodeJoined(0, 3, "h3", 1))
    head.nodes.open.difference_update((1, 2, 3))
    for node in (3, 1, 2):
        head.keeper.on(-1, NodeLost(0, node, "silent", []))
    assert GaveWay in map(type, head.job.happened)
    assert head.door.gave_way == ()


def test_a_head_that_leaves_hangs_up_when_the_others_know_that_they_go_on_without_it() -> None:
    head = Head(0, 1, 2)
    head.holds(0, 1, 2)
    head.told()
    head.keeper.on(-1, HandOver())
    assert head.names() == [["h2", "h0", "h1"], ["h2", "h1"]]
    head.holds(1, 1)
    assert (head.told(), head.nodes.hung_up) == ([], [])
    head.holds(1, 2)
    assert head.names() == [["h2", "h1"], ["h2", "h1"]], "they have to know that it counts"
    head.holds(2, 1)
    head.holds(2, 2)
    assert sorted(head.nodes.hung_up) == [1, 2]
    (left,) = head.job.happened
    assert left == GaveWay(left.time, 0, "this node has left the job, which goes on without it")
    (last,) = head.door.gave_way
    assert last.left_by_head
    assert last.earlier[-1].job == "1a2b"


def test_a_head_that_leaves_while_all_others_are_lost() -> None:
    head = Head(0, 1)
    head.holds(0, 1)
    head.keeper.on(-1, HandOver())
    (lost,) = head.loses(1)
    assert isinstance(lost, GaveWay)
    assert head.door.gave_way == ()


def test_nodes_that_take_leave_go_on_nowhere() -> None:
    head = Head(0, 1, 2)
    for node in (1, 2):
        head.nodes.open.discard(node)
        head.keeper.on(-1, Release(node, 15))
    assert head.job.happened == []


def test_newcomers_count_and_a_restart_is_told() -> None:
    head = Head(0, 1)
    head.holds(0, 1)
    head.nodes.open.add(2)
    head.keeper.on(-1, NodeJoined(0, 2, "h2", 1))
    assert head.names() == [["h0", "h1"], ["h2", "h0", "h1"]]
    head.holds(1, 1, 2)
    head.restarts()
    (rosters, _) = head.told()
    assert [(roster.attempt, roster.restarts) for roster in rosters] == [(0, 0), (1, 1)]
    assert len({peer.key for peer in rosters[-1].peers}) == 3


def test_a_node_that_comes_back_is_another_launcher() -> None:
    head = Head(0, 1, 2)
    (before, *_) = head.told()
    head.loses(1)
    head.nodes.open.add(1)
    head.keeper.on(-1, NodeJoined(0, 1, "h1", 1))
    after = head.told()[-1][-1]
    assert {peer.name for peer in after.peers} == {peer.name for peer in before[-1].peers}
    assert len({peer.key for peer in after.peers} & {peer.key for peer in before[-1].peers}) == 2


@pytest.mark.parametrize("change", [-1, 1])
def test_nobody_acknowledges_a_roster_that_there_is_not(change: int) -> None:
    head = Head(0, 1)
    with pytest.raises(InvalidMessage):
        head.holds(change, 1)


@pytest.mark.parametrize(
    ("planner", "survives"),
    [
        (of(Membership(1, 4)), True),
        (of(Membership(2, 2)), False),
        (of(Membership(2, 2), most=1), True),
        (of(Membership(2, 2), most=1, period=60.0), True),
    ],
)
def test_nodes_know_whether_the_job_goes_on_without_one_of_them(planner: Any, *, survives: bool) -> None:
    (told,) = Head(0, 2, planner=planner).nodes.sent
    assert told.survives == survives
    with_a_spare = Head(0, 1, 2, planner=planner)
    assert all(told.survives for told in with_a_spare.nodes.sent)


def test_a_job_that_has_used_up_its_restarts_does_not_go_on() -> None:
    head = Head(0, 2, planner=of(Membership(2, 2), most=1))
    head.restarts()
    assert [told.survives for told in head.nodes.sent] == [True, False]


def test_the_roster_says_where_the_doors_are() -> None:
    peers = Head(0, 1, 2).nodes.sent[0].rosters[-1].peers
    assert [(peer.name, peer.host, peer.port) for peer in peers] == [
        ("h2", "10.0.0.2", 40000),
        ("h0", "", 29400),
        ("h1", "10.0.0.1", 40000),
    ]
    assert [peer.at_endpoint for peer in peers] == [False, True, False]


def test_a_head_ends_its_part_when_another_one_leads_the_job() -> None:
    head = Head(0, 1)
    head.keeper.on(-1, Superseded("h1:29400"))
    (lost,) = head.job.happened
    assert isinstance(lost, GaveWay)
    assert lost.reason == "the job is led from h1:29400 by now: its part here ends"
    head.job.at(0.0, phase="over")
    head.keeper.on(-1, Superseded("h1:29400"))
    assert head.job.happened == [lost]


def test_the_next_term_follows_that_of_the_head_before_and_keeps_its_restarts() -> None:
    first = Roster(4, 0, "head", (Peer("head", "h0"), Peer("key1", "h1")), 1, 8, 2)
    head = Head(0, 1, rosters=(first,), restarts=2)
    (told,) = head.told()
    assert [(roster.term, roster.change, roster.restarts) for roster in told] == [(4, 0, 2), (4, 1, 2)]


def test_the_head_s_own_agent_may_come_back() -> None:
    head = Head(0, 1)
    assert head.loses(0) == []
    head.keeper.on(-1, NodeJoined(0, 0, "h0", 1))
    assert len(head.told()) == 1
