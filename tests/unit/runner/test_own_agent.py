"""The agent of a launcher that has joined: what one head has started is ended before the next one gets the agent."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from launchpad.protocol.commands import Finish, Hello, Ping, Signal, Start
from launchpad.protocol.events import Drained, Pong, RankExited, StartFailed
from launchpad.runner.own_agent import PATIENCE, OwnAgent
from tests.support.command import DEADLINE, wait_until


class Agent:
    """The other end of the link, whose launcher takes what comes."""

    name, remote = "n", False

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.own = OwnAgent(self)
        self.own.deliver(self.heard.put)

    def send(self, command: Any) -> None:
        self.got.append(command)

    def messages(self) -> Iterator[Any]:
        while (event := self._says.get()) is not None:
            yield event

    def close(self) -> None:
        self._says.put(None)

    def abandon(self) -> None:
        raise NotImplementedError

    def start(self, *ranks: int) -> None:
        entries = [{"rank": rank} for rank in ranks]
        self.own.send(Start(0, "/", {}, {}, {}, entries, [], "", [], 1, "", -1, False, False, [], False, True))

    def say(self, event: Any) -> None:
        """Say it, and wait until it has come through."""
        self._says.put(event)
        assert self.heard.get(timeout=DEADLINE) == event


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.own.close()
    assert agent.heard.get(timeout=DEADLINE) is None
    assert agent.own.gone


KILLED = [Signal(signal.SIGCONT), Signal(signal.SIGKILL)]


def test_ranks_are_ended_before_what_they_leave_is_swept_up(agent: Agent) -> None:
    agent.start(0, 1, 2)
    agent.say(RankExited(1, 0, 0, 0, False))
    agent.own.clear()
    assert agent.got[1:] == KILLED
    agent.say(RankExited(2, 1, -9, 0, False))
    assert agent.got[1:] == KILLED
    agent.say(StartFailed(3, 2, "why"))
    assert agent.got[1:] == [*KILLED, Finish(leave=False)]
    assert not agent.own.cleared
    agent.say(Drained(4))
    assert agent.own.cleared


def test_it_is_not_asked_twice_to_sweep_up(agent: Agent) -> None:
    """The head was lost between two attempts."""
    agent.start(0)
    agent.say(RankExited(1, 0, 0, 0, False))
    agent.own.send(Finish(leave=False))
    agent.own.clear()
    assert agent.got[1:] == [Finish(leave=False), *KILLED]
    agent.say(Drained(2))
    assert agent.own.cleared


def test_a_head_that_ended_an_attempt_has_cleared_nothing(agent: Agent) -> None:
    agent.start(0)
    agent.own.send(Finish(leave=False))
    agent.say(Drained(1))
    assert not agent.own.cleared
    agent.start(0)
    agent.own.clear()
    agent.say(RankExited(2, 0, -9, 0, False))
    agent.say(Drained(3))
    assert agent.own.cleared
    agent.own.send(Hello("1", False, 0, 0.0))
    assert not agent.own.cleared


def test_what_it_answers_to_us_is_not_for_the_head(agent: Agent) -> None:
    agent.own.keep()
    assert agent.got == [Ping(0)]
    agent._says.put(Pong(1, 0))
    agent.say(Pong(2, 5))
    agent.say(Pong(3, 0))  # a sign of life


def test_the_launcher_is_less_patient_than_its_agent(agent: Agent) -> None:
    agent.own.send(Hello("1", False, 0, 2.0))
    assert agent.got == [Hello("1", False, 0, 2.0 * PATIENCE)]


def test_a_head_that_is_stopped_loses_its_own_ranks_too(agent: Agent) -> None:
    agent.own.serve(0.4)
    agent.own.send(Hello("1", False, 0, 0.0))
    wait_until(lambda: agent.got.count(Ping(0)) > 1, "the agent to hear from us")
    assert Hello("1", False, 0, 0.4) in agent.got


def test_the_next_one_hears_the_rest(agent: Agent) -> None:
    agent.say(Drained(1))
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agent.own.deliver(heard.put)
    agent._says.put(Drained(2))
    assert heard.get(timeout=DEADLINE) == Drained(2)
    agent.own.deliver(agent.heard.put)
