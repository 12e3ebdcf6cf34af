"""The further worlds of a job on a node that has joined: each has a connection to the head, and an agent of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from launchpad.errors import NodeError
from launchpad.job.offer import NodeOffer
from launchpad.named import NamedTuple
from launchpad.protocol.commands import JobEnded, Signal
from launchpad.protocol.events import AgentLeft, SignalPassedOn
from launchpad.runner.links import LocalAgent
from launchpad.runner.own_agent import OwnAgent
from launchpad.transport.join.client import HeadConnection, JoinRefused, LedElsewhere


class _FurtherWorld(NamedTuple):
    head: HeadConnection
    agent: OwnAgent


class MoreWorlds:
    """Those of one node. What is said goes from agents to the head and back by threads of ours."""

    def __init__(self) -> None:
        self._worlds: list[_FurtherWorld] = []
        self._locals: list[LocalAgent] = []
        self._thread: threading.Thread | None = None
        self._over = False

    def start(self, further: int, head: HeadConnection, secret: bytes, offer: NodeOffer) -> None:
        """Join the head so many more times. If an agent can't be started, it is told; else it waits in vain."""
        offer = offer._replace(beside=offer.key)
        self._thread = threading.Thread(target=self._start, args=(further, head.place, secret, offer), daemon=True)
        self._thread.start()

    def _start(self, further: int, place: tuple[str, int], secret: bytes, offer: NodeOffer) -> None:
        with contextlib.suppress(OSError, JoinRefused, LedElsewhere):  # the head is gone, or needs us no more
            try:
                self._locals = [LocalAgent() for _ in range(further)]
                for local in self._locals:
                    local.begin()
                agents = [OwnAgent(local.link()) for local in self._locals]
            except NodeError as error:
                HeadConnection(place, secret, offer._replace(failed=str(error)).as_json()).close()
                return
            for agent in agents:
                if self._over:
                    return
                world = _FurtherWorld(HeadConnection(place, secret, offer.as_json()), agent)
                self._worlds.append(world)
                agent.deliver(partial(_pass_up, world.head))
                world.head.begin(partial(_pass_down, agent))

    def signal(self, signum: int) -> None:
        """Pass a signal on to the ranks."""
        for head, agent in self._worlds:
            agent.send(Signal(signum))
            head.send(SignalPassedOn(time.monotonic_ns(), signum))

    def close(self) -> None:
        """End what is left of them here, then hang up: so the head knows that it is done."""
        self._over = True
        if self._thread is None:
            return
        self._thread.join()
        with ThreadPoolExecutor(len(self._locals) or 1) as pool:
            list(pool.map(LocalAgent.close, self._locals))
        for head, _ in self._worlds:
            head.close()


def _pass_up(head: HeadConnection, event: Any) -> None:
    head.send(AgentLeft(time.monotonic_ns()) if event is None else event)


def _pass_down(agent: OwnAgent, command: Any) -> None:
    """The node's own connection hears how the job ended, or that the head is gone."""
    if command is not None and type(command) is not JobEnded:
        agent.send(command)
