"""Tells the nodes that have joined who belongs to the job, and ends it when too few of them are left here to go on."""

from __future__ import annotations

import time
from typing import Any

from launchpad.head.arrivals import Door, Superseded
from launchpad.head.hub import Hub
from launchpad.head.machine import HEADS_OWN, HandOver, Release
from launchpad.head.part import InvalidMessage, Part
from launchpad.head.planner import Planner
from launchpad.job.succession import (
    MOST_EARLIER,
    Age,
    EarlierHead,
    Peer,
    Roster,
    Rosters,
    can_lead,
    in_force,
    may_go_on,
    without_own,
)
from launchpad.job.world import place
from launchpad.protocol.commands import RosterChanged
from launchpad.protocol.events import CantLead, DoorsTried, GaveWay, NodeJoined, NodeLost, RosterHeld


class RosterKeeper(Part):
    """Sends a new roster with every change, and keeps those that may count."""

    takes = (RosterHeld, DoorsTried, Superseded, HandOver)
    sees = (NodeJoined, NodeLost, Release)

    def __init__(self, hub: Hub, planner: Planner, door: Door) -> None:
        assert planner.membership is not None
        self._hub = hub
        self._door = door
        self._membership = planner.membership
        self._limit = planner.spec.limits.max_restarts
        self._job = planner.job
        self._own = door.own.key
        self._rosters: Rosters = door.rosters
        self._term = self._rosters[-1].term if self._rosters else 1
        self._earlier = self._rosters[-1].earlier if self._rosters else ()
        self._peers: dict[int, Peer] = {}  # by node: those that are here
        self._left: set[str] = set()  # those that took leave, and so can't go on without us
        self._held: dict[str, Age] = {}  # the newest that each has acknowledged
        self._goes_on = False  # the job, when it loses a node
        self._leaves = False  # we do
        self._handed_over = False  # a roster without us has been in force
        self._missed: dict[str, dict[str, str]] = {}  # who may lead, and can't be reached by whom, and why
        self._told: set[str] = set()  # who can't lead, as the user knows

    def start(self) -> None:
        """Say who is here, and that a restart is used up: before ranks start, as we may be lost the moment they do."""
        if not self._peers:
            for node in sorted({HEADS_OWN, *self._hub.nodes.open}):
                self._add(node)
        self._change()

    def on(self, source: int, message: Any) -> None:
        """Take what nodes acknowledge, and note who comes and goes."""
        match message:
            case RosterHeld(change=change):
                if not (source in self._peers and 0 <= change <= self._rosters[-1].change):
                    raise InvalidMessage
                self._held[self._peers[source].key] = (self._rosters[-1].term, change, self._own)
                self._settle()
            case DoorsTried(missed=missed):
                self._miss(source, missed)
            case Superseded(by=by):
                self._give_way(HEADS_OWN, f"the job is led from {by} by now: its part here ends")
            case NodeJoined(node=node) if node:
                self._add(node)
                self._change()
            case NodeLost(node=node) if node in self._peers and node:
                self._forget(node)
                self._lost(node)
            case Release(node=node):
                self._left.add(self._forget(node).key)
                self._change()
            case HandOver():
                self._leaves = True
                own = self._forget(HEADS_OWN)
                self._left.add(own.key)
                self._earlier = (*self._earlier, EarlierHead(own.name, self._job, time.time()))[-MOST_EARLIER:]
                self._change()

    def _add(self, node: int) -> None:
        peer = self._door.peer(self._hub.nodes[node].link) if node else self._door.own
        self._peers[node] = peer._replace(name=self._hub.nodes.name(node))

    def _forget(self, node: int) -> Peer:
        peer = self._peers.pop(node)
        self._held.pop(peer.key, None)
        return peer

    def _miss(self, source: int, missed: list[tuple[str, str]]) -> None:
        """Tell the user who can't lead after us."""
        if source not in self._peers or len(missed) > len(self._peers):
            raise InvalidMessage
        nodes = {peer.key: node for node, peer in self._peers.items()}
        for key, why in missed:
            if key not in nodes or key in self._told:
                continue
            by = self._missed.setdefault(key, {})
            by[self._peers[source].key] = why
            cut_off = [one for one in by if one in nodes]
            if not can_lead(len(nodes), self._membership.least, len(cut_off)):
                self._told.add(key)
                peer = self._peers[nodes[key]]
                cant = CantLead(
                    *(time.monotonic_ns(), nodes[key], place(peer.host, peer.port)),
                    *([nodes[one] for one in cut_off], by[cut_off[0]]),
                )
                self._hub.happened(-1, cant)

    def _lost(self, node: int) -> None:
        here = {peer.key for peer in self._peers.values()}
        if not here:  # all others, while we were about to leave
            self._hub.happened(-1, GaveWay(time.monotonic_ns(), node, "the other nodes were lost"))
        elif may_go_on(self._rosters, here | self._left):
            self._change()
        else:
            most = max(len(roster.peers) for roster in self._rosters)
            reason = f"more than half of the job's {most} nodes were lost, and may go on together: its part here ends"
            self._give_way(node, reason)

    def _give_way(self, node: int, reason: str) -> None:
        if self._hub.phase != "over":
            if self._goes_on:  # otherwise the others end as well
                self._door.give_way(without_own(self._own, self._rosters))
            self._hub.happened(-1, GaveWay(time.monotonic_ns(), node, reason))

    def _change(self) -> None:
        """Make a roster of those that are here, in the order of their ranks."""
        seats = [seat.node for seat in self._hub.plan.seats]
        order = [*(node for node in seats if node in self._peers), *sorted(self._peers.keys() - set(seats))]
        peers = tuple(self._peers[node] for node in order)
        change = self._rosters[-1].change + 1 if self._rosters else 0
        least = self._membership.least
        used = self._hub.attempt, self._hub.restarts
        new = Roster(self._term, change, self._own, peers, least, *used, self._job, self._earlier)
        self._rosters = (*self._rosters, new)
        self._held[self._own] = new.age
        self._settle()
        self._goes_on = survives = self._leaves or self._survives(len(peers) > len(seats))
        for node in self._peers.keys() & self._hub.nodes.open - {HEADS_OWN}:
            self._hub.nodes.send(node, RosterChanged(list(self._rosters), survives))

    def _survives(self, spares: bool) -> bool:
        """Whether the job goes on when it loses a node: with others, or by a restart."""
        most, period = self._limit
        return self._membership.elastic or spares or self._hub.restarts < most or (most > 0 and period is not None)

    def _settle(self) -> None:
        """Forget the rosters that don't count any more."""
        self._rosters = in_force(self._rosters, self._held)
        if self._leaves and len(self._rosters) == 1:
            self._leave()

    def _leave(self) -> None:
        """Hang up on the others, once they know that a roster without us is in force: any of them may lead by it."""
        if not self._handed_over:
            self._handed_over = True
            self._change()  # acknowledging this one, they know it of the one before
            return
        self._door.give_way(self._rosters)
        for node in self._peers:
            self._hub.nodes.hang_up(node)
        reason = "this node has left the job, which goes on without it"
        self._hub.happened(-1, GaveWay(time.monotonic_ns(), HEADS_OWN, reason))
