"""head/healthy_meetings: the nodes of an attempt meet once all of them are healthy."""

from __future__ import annotations

from typing import Any

import pytest

from launchpad.head.health import Unwell
from launchpad.head.healthy_meetings import HealthyMeetings
from launchpad.head.machine import FinishAttempt, Meet
from launchpad.head.part import InvalidMessage
from launchpad.job.membership import Seat
from launchpad.protocol.commands import CheckHealth
from launchpad.protocol.events import HealthChecked, NodeLost, NodeUnwell, SeatsReady
from tests.support.hubs import FakeJob, FakeNodes

FINE = HealthChecked(0, "", False, [], [])
SICK = HealthChecked(0, "ended with exit code 3", False, ["looking", "GPU 3 is gone"], [])
A, B, C = Seat(0, 2), Seat(1, 2), Seat(2, 2)


class FakePlanner:
    """It knows what to ask, and the nodes that the first attempt leaves out."""

    def __init__(self, left_out: dict[int, Unwell] | None = None) -> None:
        self.left_out = left_out or {}

    def must_meet(self, _: Any) -> bool:
        return False

    def take_left_out(self) -> dict[int, Unwell]:
        left_out, self.left_out = self.left_out, {}
        return left_out

    def check_request(self, node: int) -> CheckHealth:
        return CheckHealth([f"check{node}"], "/", {}, 5.0)


def meetings(job: FakeJob, left_out: dict[int, Unwell] | None = None) -> HealthyMeetings:
    return HealthyMeetings(job.hub, FakePlanner(left_out))  # type: ignore[arg-type]


def ready(job: FakeJob) -> list[Any]:
    return [event.seats for event in job.posted if isinstance(event, SeatsReady)]


def test_they_meet_when_the_last_one_is_found_healthy() -> None:
    job = FakeJob(FakeNodes(0, 1))
    part = meetings(job)
    part.on(-1, Meet((A, B)))
    assert [command.words for command in job.nodes.sent] == [["check0"], ["check1"]]
    part.on(1, FINE)
    assert not ready(job)
    part.on(0, FINE)
    assert ready(job) == [(A, B)]


def test_a_sick_one_is_lost_and_others_are_checked_once() -> None:
    job = FakeJob(FakeNodes(0, 1, 2))
    part = meetings(job)
    part.on(-1, Meet((A, B)))
    part.on(1, SICK)
    assert job.lost == [(1, "its health check ended with exit code 3: GPU 3 is gone")]
    assert part.unwell == {1: job.lost[0][1]}
    (told,) = job.told
    assert isinstance(told, NodeUnwell)
    assert told.lines == SICK.lines
    part.on(-1, NodeLost(0, 1, "", []))
    part.on(0, FINE)  # the state machine has nobody for its place yet
    assert not ready(job)
    part.on(-1, Meet((A, C)))
    part.on(2, FINE)
    assert ready(job) == [(A, C)]
    assert len(job.nodes.sent) == 3


def test_each_attempt_has_checks_of_its_own() -> None:
    job = FakeJob(FakeNodes(0))
    part = meetings(job)
    for attempt in (1, 2):
        part.on(-1, FinishAttempt(False))
        part.on(-1, Meet((A,)))
        part.on(0, FINE)
        part.start()
        assert len(job.nodes.sent) == len(ready(job)) == attempt


def test_those_that_the_first_attempt_leaves_out_are_lost_at_its_start() -> None:
    job = FakeJob(FakeNodes(0, 1))
    part = meetings(job, {1: Unwell("ended with exit code 1")})
    part.start()
    part.start()
    assert job.lost == [(1, "its health check ended with exit code 1")]


def test_nobody_answers_unasked() -> None:
    with pytest.raises(InvalidMessage):
        meetings(FakeJob(FakeNodes(0))).on(0, FINE)
