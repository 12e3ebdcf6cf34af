"""The nodes before the job runs: greeted, asked what they have, and listened to while they get ready."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad import __version__
from launchpad.commands import Command, Hello, Ping
from launchpad.errors import NodeError
from launchpad.events import AgentFailed, AgentReady, LinkClosed, PeerFailed, Pong, StopRequested, Suspended
from launchpad.head.nodes import Nodes
from launchpad.job.plan import Elsewhere
from launchpad.transport import Link

if TYPE_CHECKING:  # sockets and HMAC, for a world of several launchpads only
    from launchpad.head.rendezvous import Rendezvous

# After so long a wait for other nodes, the user is told what we wait for.
TELL_SECONDS = 3.0

# A node that has not answered by then is not going to.
READY_SECONDS = 30.0


class Gathering:
    """The inbox that all threads put into, as (node, event), -1 for our own; and the nodes."""

    nodes: Nodes

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.early: list[StopRequested] = []  # signals for the ranks, which are yet to be started
        self._stood_still = 0.0  # seconds
        self._unheard: list[tuple[int, Any]] = []  # what nodes said while another answer was waited for

    def clock(self) -> float:
        """A time in seconds, for deadlines: it stands still while we do (Ctrl-Z)."""
        return time.monotonic() - self._stood_still

    def post(self, event: Any) -> None:
        """Put an event of the head's own into the inbox; for other threads."""
        self.inbox.put((-1, event))

    def connect(
        self, links: Sequence[Link], *, count_gpus: bool, port: int = 0, silence: float = 0.0
    ) -> list[AgentReady]:
        """Greet the nodes; return their facts. Raises NodeError where one does not answer.

        `port` is held on the first; `silence`: seconds after which a remote node, or for it the head, counts as gone.
        """
        self.nodes = Nodes(links, self.inbox.put, silence)
        self.nodes.read()
        hellos = {
            node: Hello(__version__, count_gpus, 0 if node else port, silence if link.remote else 0.0)
            for node, link in enumerate(links)
        }
        ready = self.ask(hellos, AgentReady, READY_SECONDS)
        for node, facts in enumerate(ready):
            if not 0 <= facts.wall < 1e11:
                reason = f"the agent's clock makes no sense: it says {facts.wall:g} s since 1970"
                raise NodeError(self._of(node, reason))
        return ready

    def ask(self, commands: Mapping[int, Command], answer: type, seconds: float) -> list[Any]:
        """Send each node its command; return their answers, in the order of the nodes. Raises NodeError."""
        for node, command in commands.items():
            self.nodes.send(node, command)
        answers: dict[int, Any] = {}
        later = []
        deadline = self.clock() + seconds
        while len(answers) < len(commands):
            heard = self.hear(deadline)
            if heard is None:
                silent = min(commands.keys() - answers.keys())
                raise NodeError(self._of(silent, f"no answer from the agent within {seconds:g} s"))
            if type(heard[1]) is answer:
                answers[heard[0]] = heard[1]
            else:
                later.append(heard)
        self._unheard += later
        return [answers[node] for node in sorted(answers)]

    def measure_clocks(self) -> None:
        """Ask the remote nodes for their time. Raises NodeError."""
        self.ask({node: Ping(time.monotonic_ns()) for node in self.nodes.remote}, Pong, READY_SECONDS)

    def hear(self, deadline: float) -> tuple[int, Any] | None:
        """What a node says before the job runs; None at the deadline (by `clock`). NodeError where one has ended."""
        if self._unheard:
            return self._unheard.pop(0)
        while True:
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:  # however much there is to hear
                self.nodes.tick(now)  # that we are there; who is silent now may be looking for its torch
            due, left = self.nodes.deadline, deadline - self.clock()
            try:
                node, event = self.inbox.get(timeout=max(0.0, left if due is None else min(left, due - now)))
            except queue.Empty:
                if self.clock() >= deadline:
                    return None
                continue
            match event:
                case AgentFailed(_, reason):
                    raise NodeError(self._of(node, f"the agent ended before any rank was started: {reason}"))
                case LinkClosed():
                    raise NodeError(self._of(node, "the agent ended before any rank was started"))
                case StopRequested(_, signum) if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    raise SystemExit(128 + signum)
                case StopRequested(_, signal.SIGTSTP):
                    self.nodes.suspend()
                case Suspended():
                    if self.nodes.suspended(node):
                        self._stood_still += self.nodes.stand_still()
                case StopRequested():
                    self.early.append(event)
                case _:
                    return node, event

    def _of(self, node: int, text: str) -> str:
        name = self.nodes.name(node)
        return f"{name}: {text}" if name else text

    def join(self, rendezvous: Rendezvous, nproc: int, say: Callable[[str], None]) -> Elsewhere:
        """Meet the launchpads of the other nodes. Raises NodeError where they don't all come in time."""
        threading.Thread(target=rendezvous.join, args=(nproc, self.post), name="rendezvous", daemon=True).start()
        deadline = self.clock() + rendezvous.seconds
        told = self.clock() + TELL_SECONDS
        while True:
            heard = self.hear(min(deadline, told))
            if heard is None:
                if self.clock() >= deadline:
                    raise NodeError(f"{rendezvous.waiting()}; gave up after {rendezvous.seconds:g} s")
                say(rendezvous.waiting())
                told = deadline
            elif isinstance(heard[1], Elsewhere):
                return heard[1]
            elif isinstance(heard[1], PeerFailed):
                raise NodeError(heard[1].reason)
