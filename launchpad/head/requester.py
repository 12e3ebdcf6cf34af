"""Asks the agents and waits for their answers, outside the head's loop."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

from launchpad.errors import NodeError
from launchpad.head.nodes import Nodes
from launchpad.protocol.commands import Command
from launchpad.protocol.events import AgentFailed, LinkClosed
from launchpad.protocol.printable import printable


class Requester:
    """Sends requests to some nodes. Whoever reads from them puts (node, event) into its inbox."""

    nodes: Nodes

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._awaited: set[int] = set()  # nodes that have not answered yet
        self._unheard: list[tuple[int, Any]] = []  # events that arrived while we waited for a different answer

    @property
    def awaited(self) -> list[int]:
        """The nodes that have not answered yet. From any thread."""
        return sorted(self._awaited.copy())

    def clock(self) -> float:
        """The time in seconds, for deadlines."""
        return time.monotonic()

    def ask(self, commands: Mapping[int, Command], answer: type, seconds: float) -> list[Any]:
        """Send each node its command and return the answers in node order. Raises NodeError."""
        for node, command in commands.items():
            self.nodes.send(node, command)
        answers: dict[int, Any] = {}
        later = []
        deadline = self.clock() + seconds
        self._awaited = set(commands)
        while self._awaited:
            heard = self.hear(deadline)
            if heard is None:
                raise NodeError(self.of(self.awaited[0], f"no answer from the agent within {seconds:g} s"))
            if type(heard[1]) is answer and heard[0] in self._awaited:
                answers[heard[0]] = heard[1]
                self._awaited.discard(heard[0])
            else:
                later.append(heard)
        self._unheard += later
        return [answers[node] for node in sorted(answers)]

    def hear(self, deadline: float) -> tuple[int, Any] | None:
        """The next event; None at the deadline (by `clock`). Raises NodeError if an agent has ended."""
        if self._unheard:
            return self._unheard.pop(0)
        try:
            node, event = self.inbox.get(timeout=max(0.0, deadline - self.clock()))
        except queue.Empty:
            return None
        self.check(node, event)
        return node, event

    def rest(self) -> list[Any]:
        """The events that nobody has heard, of all nodes."""
        left = [event for _, event in self._unheard]
        while not self.inbox.empty():
            left.append(self.inbox.get()[1])
        return left

    def check(self, node: int, event: Any) -> None:
        """Raise NodeError if the event says that the node's agent has ended."""
        match event:
            case AgentFailed(reason=reason, trace=trace):  # no record exists yet to keep the traceback
                text = f"the agent ended before any rank was started: {printable(reason)}"
                lines = [text, *(f"  {line}" for line in trace.splitlines())]
                raise NodeError(self.of(node, "\n".join(lines).rstrip()))
            case LinkClosed():
                raise NodeError(self.of(node, "the agent ended before any rank was started"))

    def of(self, node: int, text: str) -> str:
        """The text, with the node's name."""
        name = self.nodes.name(node)
        return f"{name}: {text}" if name else text
