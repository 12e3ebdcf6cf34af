"""Checks, when a job hangs, which of its nodes can't reach each other: each listens, and the others call.

A network can fail between two nodes while both are in touch with the head; no heartbeat shows that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping

from launchpad import linux
from launchpad.protocol.commands import Command, Listen, Reach
from launchpad.protocol.events import Listening, Reached

# How long the nodes have to listen, and then to reach each other: a lost packet is sent again after 1, 3 and 7 s.
LISTEN_SECONDS = 3.0
REACH_SECONDS = 5.0

# A node calls no more others than this, its neighbours in the order of the ranks: collectives use those most.
MOST_CALLS = 64


class PairCheck:
    """One check. Times are in seconds of one clock."""

    def __init__(self, addresses: Mapping[int, str], send: Callable[[int, Command], None], now: float) -> None:
        """`addresses`: by node, what the other nodes reach it by."""
        common = Counter(addresses.values())
        # Several nodes behind one address, as on one machine, can't be told apart by what was reached.
        self._addresses = {
            node: address
            for node, address in sorted(addresses.items())
            if address and common[address] == 1 and not linux.is_loopback(address)
        }
        self._node_at = {address: node for node, address in self._addresses.items()}
        self._send = send
        self._ask, self._answer = os.urandom(16).hex(), os.urandom(16).hex()
        self._ports: dict[int, int] = {}  # by node that listens
        self._silent = set(self._addresses)  # nodes that don't listen yet
        self._missing: set[tuple[int, int]] = set()  # who has not reached whom yet
        self._calling = False
        self.deadline = now + LISTEN_SECONDS
        for node, address in self._addresses.items():
            send(node, Listen([address], self._ask, self._answer))
        self.tick(now)

    @property
    def over(self) -> bool:
        """Whether the result is known."""
        return self._calling and not self._missing

    @property
    def apart(self) -> list[tuple[int, int]]:
        """The pairs of nodes of which the first has not reached the second."""
        return sorted(self._missing)

    def on(self, node: int, event: Listening | Reached, now: float) -> None:
        """Take a node's answer."""
        if isinstance(event, Reached):
            self._missing.discard((node, self._node_at.get(event.address, -1)))
        elif node in self._silent:
            self._silent.discard(node)
            if event.ports[:1] > [0]:
                self._ports[node] = event.ports[0]
        self.tick(now)

    def tick(self, now: float) -> None:
        """Have the nodes call each other once all that will listen do."""
        if self._calling or (self._silent and now < self.deadline):
            return
        self._calling = True
        self.deadline = now + REACH_SECONDS
        nodes = list(self._ports)
        for place, node in enumerate(nodes):
            near = sorted(range(1, len(nodes)), key=lambda step: min(step, len(nodes) - step))[:MOST_CALLS]
            others = [nodes[(place + step) % len(nodes)] for step in near]
            self._missing.update((node, other) for other in others)
            if others:
                places = [[self._addresses[other], self._ports[other]] for other in others]
                self._send(node, Reach(places, self._ask, self._answer))
