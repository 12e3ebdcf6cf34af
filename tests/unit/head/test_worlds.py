"""head/worlds: what happens to the ranks of a world that may restart is its own, until it may not."""

from __future__ import annotations

import signal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launchpad.head.machine import FinishAttempt, Judgement, Machine
from launchpad.head.worlds import (
    Dismissed,
    FinishWorld,
    RestartWorld,
    RoleWorld,
    SignalWorld,
    StartAgain,
    Worlds,
)
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.membership import Seat
from launchpad.protocol.events import (
    Drained,
    NodeLost,
    NotRestarted,
    PhaseChanged,
    RankExited,
    RankFailed,
    StopRequested,
    WorldStopping,
)
from tests.support.unhurried import UNHURRIED

SEATS = (Seat(0, 2), Seat(1, 2), Seat(2, 1))


class Job:
    """Worlds a and b of two ranks, of which only b may restart, and c of one, which is a service and may too."""

    def __init__(self, most: int = 1, refusal: str = "") -> None:
        once = Limits(max_restarts=RestartLimit(most))
        worlds = [
            RoleWorld("a", [0, 1], SEATS[:1], Limits()),
            RoleWorld("b", [2, 3], SEATS[1:2], once),
            RoleWorld("c", [4], SEATS[2:], once, service=True),
        ]
        self.now = 0.0
        self.asked: list[str] = []
        self.refusal = refusal
        self.worlds = Worlds(Machine(SEATS, Limits(), 0.0), worlds, self._judge, 0.0)

    def _judge(self, world: str) -> Judgement:
        self.asked.append(world)
        return Judgement(self.refusal)

    def on(self, event: Any, node: int = 0) -> list[Any]:
        return self.worlds.on(event, self.now, node)

    def exit(self, rank: int, code: int = 0) -> list[Any]:
        return self.on(RankExited(0, rank, code, 0, False))

    @property
    def cause(self) -> tuple[str, int]:
        assert self.worlds.cause is not None
        return self.worlds.cause.kind, self.worlds.cause.rank

    def drained(self, node: int) -> list[Any]:
        return self.on(Drained(0), node)


def stopping(world: str, *ranks: int) -> list[Any]:
    return [WorldStopping(0, world, signal.SIGTERM, 5.0, list(ranks)), SignalWorld(world, signal.SIGTERM)]


def phases(actions: list[Any]) -> list[tuple[str, list[int]]]:
    return [(one.phase, one.ranks) for one in actions if isinstance(one, PhaseChanged)]


def test_a_world_is_stopped_and_starts_again_alone() -> None:
    job = Job()
    assert job.exit(3, 7) == stopping("b", 2)
    assert job.worlds.running == {0, 1, 2, 4}
    assert job.exit(2, -15) == [FinishWorld("b")]
    assert job.drained(1) == [RestartWorld("b", 1, 1, True)]
    assert job.asked == ["b"]
    assert (job.worlds.phase, job.worlds.running) == ("running", {0, 1, 2, 3, 4})


def test_a_world_that_takes_too_long_to_stop_is_killed() -> None:
    job = Job()
    job.exit(3, 7)
    assert job.worlds.deadline == 5.0
    assert job.worlds.tick(5.0)[1] == SignalWorld("b", signal.SIGKILL)


def test_what_a_world_has_spawned_is_of_it_until_it_starts_again() -> None:
    job = Job()
    job.worlds.join([5, 6], 1)
    assert job.exit(6) == []
    assert job.exit(5, 7) == stopping("b", 2, 3)
    assert [job.exit(2, -15), job.exit(3, -15)] == [[], [FinishWorld("b")]]
    assert job.drained(1) == [RestartWorld("b", 1, 1, True)]
    assert job.worlds.running == {0, 1, 2, 3, 4}
    assert phases(job.exit(3, 7)) == [("stopping", [0, 1, 2, 4])]
    job = Job(most=0)
    job.worlds.join([5], 0)
    job.worlds.join([6], 2)
    assert job.exit(6) == [], "what a service has spawned may end"
    assert [job.exit(0), job.exit(1)] == [[], []]
    assert job.worlds.running == {2, 3, 4, 5}
    job.exit(5, 7)
    assert (job.cause, job.worlds.running) == (("failure", 5), {2, 3, 4})


def test_its_last_failure_is_the_jobs() -> None:
    job = Job()
    for rank, code in ((3, 7), (2, 7)):
        job.exit(rank, code)
    job.drained(1)
    assert job.exit(2) == []
    actions = job.exit(3, 9)
    assert phases(actions) == [("stopping", [0, 1, 2, 4])], "rank 2 left the job only when its world could not go on"
    assert job.worlds.running == {0, 1, 4}
    assert job.cause == ("failure", 3)
    assert job.worlds.exit_code == 9


def test_a_restart_that_would_not_help_ends_the_job() -> None:
    job = Job(refusal="it fails the same way each time")
    job.exit(3, 7)
    job.exit(2, -15)
    refused, *actions = job.drained(1)
    assert isinstance(refused, NotRestarted)
    assert refused.reason == "b: it fails the same way each time"
    assert phases(actions) == [("stopping", [0, 1, 2, 3, 4])]
    assert job.worlds.running == {0, 1, 4}
    assert job.worlds.exit_code == 7


def test_a_world_without_restarts_fails_for_all() -> None:
    job = Job()
    assert phases(job.exit(1, 3)) == [("stopping", [0, 2, 3, 4])]
    assert job.exit(3, -15) == []
    assert job.worlds.running == {0, 2, 4}


def test_a_world_starts_again_because_somebody_asks_for_it() -> None:
    job = Job(most=0)
    assert job.on(StartAgain("b")) == [
        WorldStopping(0, "b", signal.SIGTERM, 30.0, [2, 3]),
        SignalWorld("b", signal.SIGTERM),
    ]
    assert job.on(StartAgain("b")) == []
    assert [job.exit(2), job.exit(3, -15)] == [[], [FinishWorld("b")]]
    assert job.drained(1) == [RestartWorld("b", 1, 0, False)]
    assert (job.asked, job.worlds.running) == ([], {0, 1, 2, 3, 4})
    assert phases(job.exit(3, 7)) == [("stopping", [0, 1, 2, 4])], "and a failure is one"


def test_the_job_ends_when_all_worlds_have() -> None:
    job = Job()
    assert [action for rank in (2, 0, 3, 1) for action in job.exit(rank)] == []
    job.on(Dismissed([4]))
    assert phases(job.exit(4)) == [("over", [])]
    assert job.worlds.exit_code == 0


def test_a_service_that_exits_with_0_starts_again() -> None:
    job = Job()
    assert job.exit(4)[-1] == FinishWorld("c")
    assert job.on(RankFailed(0, 4, 1, "is a service")) == []
    assert job.drained(2) == [RestartWorld("c", 1, 1, True)]
    assert job.exit(4) == [], "it has no restart left, and its order says so"
    assert phases(job.on(RankFailed(0, 4, 1, "is a service"))) == [("stopping", [0, 1, 2, 3])]


def test_a_service_that_is_needed_no_more_does_not_start_again() -> None:
    job = Job()
    job.exit(4, 3)
    for rank in range(4):
        job.exit(rank)
    assert phases(job.on(Dismissed([4]))) == [("over", [])]
    assert job.drained(2) == []


def test_a_signal_to_the_job_ends_what_is_about_to_start_again() -> None:
    job = Job()
    job.exit(3, 7)
    job.exit(2, -15)
    assert phases(job.on(StopRequested(0, signal.SIGINT))) == [("stopping", [0, 1, 2, 3, 4])]
    assert job.worlds.running == {0, 1, 4}
    assert job.drained(1) == []
    for rank in (0, 1):
        job.exit(rank, -2)
    actions = job.exit(4, -2)
    assert phases(actions) == [("over", [])]
    assert actions[-1] == FinishAttempt(leave=True, grace=0.0)


def test_a_node_that_is_lost_ends_the_job() -> None:
    job = Job()
    job.exit(3, 7)
    assert phases(job.on(NodeLost(0, 1, "gone", [2, 3])))
    assert job.cause == ("lost", -1)
    assert job.worlds.running == {0, 1, 4}


@UNHURRIED
@given(st.data())
def test_whatever_happens_it_ends(data: st.DataObject) -> None:
    """A model of the agents: ranks exit, nodes drain what is over, and time passes."""
    job = Job(most=data.draw(st.integers(1, 3)))
    running = {0, 1, 2, 3, 4}
    ranks_of = {"b": {2, 3}, "c": {4}}
    draining: set[str] = set()
    restarts = {"b": 0, "c": 0}

    def act(actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SignalWorld(world=world, signum=signum) if signum == signal.SIGKILL:
                    for rank in sorted(ranks_of[world] & running):
                        running.discard(rank)
                        act(job.exit(rank, -9))
                case FinishWorld(world=world):
                    assert not ranks_of[world] & running
                    draining.add(world)
                case RestartWorld(world=world, restarts=count, counted=True):
                    restarts[world] += 1
                    assert count == restarts[world]
                    running.update(ranks_of[world])

    for _ in range(200):
        if job.worlds.phase == "over":
            break
        choice = data.draw(st.integers(0, 9))
        if choice == 0 and draining:
            world = draining.pop()
            act(job.drained(1 if world == "b" else 2))
        elif choice == 1 and job.worlds.deadline is not None:
            job.now = job.worlds.deadline
            act(job.worlds.tick(job.now))
        elif running:
            rank = data.draw(st.sampled_from(sorted(running)))
            running.discard(rank)
            act(job.exit(rank, data.draw(st.sampled_from([0, 0, 0, 1, -15]))))
        assert job.worlds.running <= running, "who has exited isn't waited for"
    while draining and job.worlds.phase != "over":
        world = draining.pop()
        act(job.drained(1 if world == "b" else 2))
    for rank in sorted(running):
        running.discard(rank)
        act(job.exit(rank, 0))
    assert job.worlds.phase == "over" or draining or job.worlds.deadline is not None
