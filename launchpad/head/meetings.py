"""Has the nodes of the next attempt meet: where they need a new address that all of them reach, it is looked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from launchpad.head.hub import Hub
from launchpad.head.machine import Meet, Release
from launchpad.head.master_search import MasterSearch, Met
from launchpad.head.part import Part
from launchpad.head.planner import Planner
from launchpad.job.membership import Seat
from launchpad.protocol.events import Listening, NodeLost, PortHeld, Reached, SeatsReady


class Meetings(Part):
    """One search at a time: the agents answer whoever asks."""

    takes: ClassVar[tuple[type, ...]] = (Meet, Met, Listening, Reached, PortHeld)
    sees: ClassVar[tuple[type, ...]] = (NodeLost, Release)

    def __init__(self, hub: Hub, planner: Planner) -> None:
        self._hub = hub
        self._planner = planner
        self._search: MasterSearch | None = None
        self._wanted: Sequence[Seat] = ()  # the nodes that are to meet
        self.apart: set[int] = set()  # nodes that the others can't reach, so that it is no use to reconnect to them

    def on(self, source: int, message: Any) -> None:
        """Take a wish, what nodes say, and what comes of a search."""
        match message:
            case Meet(seats=seats):
                self._meet(seats)
            case Met():
                self._met(message)
            case _ if self._search is None:
                pass
            case NodeLost(node=node) | Release(node=node):
                self._search.lose(node)
            case Listening() | Reached() | PortHeld():
                self._search.inbox.put((source, message))

    def _meet(self, seats: Sequence[Seat]) -> None:
        self._wanted = seats
        if self._search is not None:
            return
        if self._planner.must_meet(seats):
            self._search = MasterSearch(self._planner, self._hub.nodes, seats, self._hub.post)
        else:
            self._hub.post(SeatsReady(time.monotonic_ns(), seats))

    def _met(self, met: Met) -> None:
        self._search = None
        seats = met.search.seats
        if seats != self._wanted:  # the nodes have changed meanwhile
            if self._wanted:
                self._meet(self._wanted)
            return
        self._wanted = ()
        if met.rendezvous:
            self._planner.set_rendezvous(seats, met.rendezvous)
            self._hub.happened(-1, SeatsReady(time.monotonic_ns(), seats))
        for node, reason in met.reasons.items():
            if node in self._hub.nodes.open:
                self.apart.add(node)
                self._hub.lose(node, reason)
