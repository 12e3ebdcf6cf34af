"""Brings up the nodes before the job runs: greets the agents, queries them, and waits until they are ready."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Sequence
from typing import Any

from launchpad._version import __version__
from launchpad.errors import NodeError
from launchpad.head.nodes import Nodes
from launchpad.head.own_signals import Stopped
from launchpad.head.requester import Requester
from launchpad.job.hosts import ACCELERATORS
from launchpad.job.outcome import STOPPING
from launchpad.protocol.commands import Hello, Ping, RosterChanged
from launchpad.protocol.events import AgentReady, Pong, RosterHeld, StopRequested, Suspended
from launchpad.transport import Link

# A node that has not answered after this long never will.
READY_SECONDS = 30.0

# The same for the launcher of a node that is to acknowledge a roster.
HELD_SECONDS = 5.0


class BringUp(Requester):
    """The nodes before the job runs, and the inbox into which all threads put (node, event); -1 is the head itself."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[StopRequested] = []  # signals for ranks that have not started yet
        self.ready: list[AgentReady] = []  # by node
        self.job = os.urandom(4).hex()  # the job's id
        self.since: int | None = None  # when it began if that was before the nodes were there, by time.monotonic_ns()
        self._stood_still = 0.0  # seconds

    def clock(self) -> float:
        """The time in seconds, for deadlines. It stops while the head is suspended (Ctrl-Z)."""
        return time.monotonic() - self._stood_still

    def post(self, event: Any) -> None:
        """Put one of the head's own events into the inbox, from any thread."""
        self.inbox.put((-1, event))

    def connect(
        self,
        links: Sequence[Link],
        *,
        count_gpus: bool,
        port: int = 0,
        silence: float = 0.0,
        accelerators: Sequence[tuple[int | str, str]] = (),
        roster: RosterChanged | None = None,
    ) -> list[AgentReady]:
        """Greet the nodes and return their facts. Raises NodeError if one does not answer.

        The first node holds `port`. `silence`: seconds without a heartbeat after which a remote node is considered
        lost by the head, and the head by a remote node. `accelerators`: the value of --nproc for each node, with the
        ranks' interpreter. `roster`: what the launchers of the others must acknowledge before anything else.
        """
        self.nodes = Nodes(links, self.inbox.put, silence)
        self.nodes.read()
        if roster is not None:
            self.ask(dict.fromkeys(self.nodes.remote, roster), RosterHeld, HELD_SECONDS)
        hellos = {
            node: Hello(__version__, count_gpus, 0 if node else port, silence if link.remote else 0.0)
            for node, link in enumerate(links)
        }
        for node, (nproc, python) in enumerate(accelerators):
            if nproc in ACCELERATORS:
                hellos[node] = hellos[node]._replace(accelerator=str(nproc), python=python)
        self.ready = ready = self.ask(hellos, AgentReady, READY_SECONDS)
        for node, facts in enumerate(ready):
            if not 0 <= facts.wall < 1e11:
                reason = f"the agent's clock is wrong: it says {facts.wall:g} s since 1970"
                raise NodeError(self.of(node, reason))
        return ready

    def measure_clocks(self) -> None:
        """Ping the remote nodes to learn their clocks. Raises NodeError."""
        self.ask({node: Ping(time.monotonic_ns()) for node in self.nodes.remote}, Pong, READY_SECONDS)

    def hear(self, deadline: float) -> tuple[int, Any] | None:
        """The next event before the job runs; None at the deadline (by `clock`). Raises NodeError if an agent ended."""
        if self._unheard:
            return self._unheard.pop(0)
        while True:
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:  # even if the inbox is never empty
                # Send heartbeats, but lose nobody: a node may be silent because it is looking for its torch.
                self.nodes.tick(now)
            due, left = self.nodes.deadline, deadline - self.clock()
            try:
                node, event = self.inbox.get(timeout=max(0.0, left if due is None else min(left, due - now)))
            except queue.Empty:
                if self.clock() >= deadline:
                    return None
                continue
            match event:
                case StopRequested(signum=signum) if signum in STOPPING:
                    raise Stopped(signum)
                case StopRequested(signum=signal.SIGTSTP):
                    self.nodes.suspend()
                case Suspended():
                    if self.nodes.suspended(node):
                        self._stood_still += self.nodes.stand_still()
                case StopRequested():
                    self.early.append(event)
                case _:
                    self.check(node, event)
                    return node, event
