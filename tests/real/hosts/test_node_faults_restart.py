"""Faults on several hosts with --max-restarts: the job goes on, and nothing of the lost attempt is left."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.support.command import wait_until
from tests.support.needs import needs_torch
from tests.support.netns import needs_namespaces
from tests.support.node_faults import FAMILY, HOSTS, REDUCES, Start
from tests.support.node_faults import head as head
from tests.support.node_faults import network as network
from tests.support.node_faults import start as start

pytestmark = needs_namespaces


@pytest.mark.parametrize(
    ("name", "words"),
    [pytest.param("h1", (REDUCES, "forever"), marks=needs_torch), (f"h{HOSTS}", (FAMILY, "deaf"))],
    ids=["first, torch", "last"],
)
def test_stopped_agent_is_replaced_and_leaves_nothing(
    start: Start,
    name: str,
    words: tuple[object, ...],
) -> None:
    job = start(HOSTS, "--max-restarts", 2, *words)
    job.wait_for_ranks()
    stopped, guard = job.agent(name), job.guard(name)
    os.kill(stopped.pid, signal.SIGSTOP)
    job.wait_for_ranks()  # of the second attempt
    # The old guard, its agent, its ranks and its folder go by themselves: the link is closed.
    old = {stopped.pid, guard.pid}
    wait_until(lambda: not old & {one.pid for one in job.network.processes(name)}, "the old guard and agent to be gone")
    wait_until(lambda: len(os.listdir(job.network.hosts[name].scratch)) == 1, "the old folder to be gone")
    job.send(signal.SIGTERM)
    code, err = job.end()
    assert code == 143, err
    assert re.search(
        rf"failed: {name} was lost \(no heartbeat for .* s\); restarting all ranks \(restart 1 of 2\)", err
    )
    job.wait_for_clean_hosts()


def test_stopped_guard_and_agent_of_an_ended_job_leave_nothing(start: Start) -> None:
    """They are continued when sshd ends their connection, and wake up to a head that is gone."""
    job = start(HOSTS, FAMILY, "deaf")
    job.wait_for_ranks()
    agent, guard = job.agent("h2"), job.guard("h2")
    for one in (guard, agent):
        os.kill(one.pid, signal.SIGSTOP)
    code, err = job.end()
    assert code == 4, err
    job.wait_for_clean_hosts()
