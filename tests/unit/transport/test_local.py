"""Commands to the agent of this machine, whose part the test plays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from launchpad.image import Cold
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, Ping, StdinData
from launchpad.transport.local import LocalLink


class Agent:
    """Forked in the test itself: it has the far ends of the link."""

    asks = None

    def ask_to_fork(
        self, commands: int, events: int, _: int, __: int | None, ___: Sequence[str], ____: Mapping[str, str]
    ) -> None:
        self.commands, self._events = os.dup(commands), os.dup(events)

    def forked(self) -> int:
        raise Cold("it is no process")

    def hear(self, count: int) -> list[Command]:
        """The next commands."""
        decoder, heard = wire.Decoder(), []
        while len(heard) < count and (data := os.read(self.commands, 1 << 16)):
            heard += decoder.feed(data)
        return heard

    def hang_up(self) -> None:
        os.close(self.commands)
        os.close(self._events)


def test_what_does_not_fit_into_the_pipe_is_sent_later_and_in_order() -> None:
    agent = Agent()
    link = LocalLink(agent)
    sent: list[Command] = [Ping(1), *(StdinData(bytes([number]) * (1 << 16)) for number in range(20)), Ping(2)]
    for command in sent:
        link.send(command)
    assert agent.hear(len(sent)) == sent
    link.send(Ping(3))
    assert agent.hear(1) == [Ping(3)]
    agent.hang_up()
    link.close()
    link.send(Ping(4))


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_an_agent_that_is_gone_is_not_the_senders_concern(size: int) -> None:
    agent = Agent()
    link = LocalLink(agent)
    agent.hang_up()
    link._close_ends()
    link._asked = None
    link.send(StdinData(bytes(size)))
    assert list(link.messages()) == []
    link.close()
