"""head/stop_by: what the nodes are told of the time until their ranks are stopped."""

from __future__ import annotations

import time
from typing import Any

import pytest

from launchpad.head.stop_by import StopTimes
from launchpad.job.limits import Limits
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.protocol.commands import StopBy
from tests.support.hubs import FakeJob, FakeNodes


class _Nodes(FakeNodes):
    def send(self, node: int, command: Any) -> None:
        self.sent.append((node, None if command.seconds is None else round(command.seconds)))
        assert type(command) is StopBy


def job_of(*ends: float | None) -> FakeJob:
    """A job with a rank on each node; `ends`: when the allocation of each ends."""
    nodes = tuple(
        NodePlan(number, f"h{number}", "/", {}, (RankPlan(number, 0, (), {}),), {}, ends_at=end)
        for number, end in enumerate(ends)
    )
    return FakeJob(_Nodes(*range(len(ends))), Plan("", nodes))


def test_nothing_is_said_where_nothing_is_known() -> None:
    job = job_of(None, None)
    part = StopTimes(job.hub, Limits())
    part.start()
    part.tick(job.at(1.0))
    assert job.nodes.sent == []


def test_the_first_of_the_times_counts_on_each_node() -> None:
    now = time.time()
    job = job_of(None, now + 50, now + 500)
    part = StopTimes(job.hub, Limits(stop_at=now + 200, ends_at=now + 300))
    part.start()
    assert job.nodes.sent == [(0, 200), (1, 50), (2, 200)]
    job.stops_at = 100.0
    part.start()
    assert job.nodes.sent[3:] == [(0, 100), (1, 50), (2, 100)]


def test_a_change_is_told_once() -> None:
    job = job_of(None)
    job.stops_at = 100.0
    part = StopTimes(job.hub, Limits())
    part.start()
    part.tick(job.at(0.0))
    job.stops_at = 30.0  # it is stopping
    part.on(-1, None)
    part.tick(job.at(0.0, phase="stopping"))
    assert job.nodes.sent == [(0, 100), (0, 30)]
    part.tick(job.at(0.0, phase="over"))
    job.stops_at = None
    part.tick(job.at(0.0, phase="clearing"))
    assert len(job.nodes.sent) == 2


def test_the_time_is_told_again_when_the_job_has_stood_still() -> None:
    job = job_of(None)
    job.stops_at = 100.0
    part = StopTimes(job.hub, Limits())
    part.start()
    job.hub.clock.stood_still(20.0)
    part.tick(job.at(0.0))
    assert job.nodes.sent == [(0, 100), (0, 120)]


@pytest.mark.parametrize(("attempt", "sent"), [(0, []), (1, [(0, None)])])
def test_a_restart_takes_back_what_the_end_of_the_last_attempt_said(attempt: int, sent: list[Any]) -> None:
    job = job_of(None)
    job.attempt = attempt
    StopTimes(job.hub, Limits()).start()
    assert job.nodes.sent == sent
