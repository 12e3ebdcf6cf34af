"""Launchers in a simulated network, which is cut, slow, and loses them: who leads, and whose ranks run.

The job's endpoint is node 0. Time is in ticks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from launchpad.job.succession import (
    Age,
    Dial,
    Lead,
    Peer,
    Roster,
    Rosters,
    Sight,
    Wait,
    in_force,
    may_go_on,
    merged,
    stands_for,
    succession,
    takes_over,
    without_own,
)

SECOND = 4  # ticks
SILENCE = 2 * SECOND  # the heartbeat timeout
DELAY = 3  # the longest that a message takes
HESITATES = 3 * SECOND  # how long a launcher that could lead waits for those before it


class Fault(NamedTuple):
    """Something that happens before `ticks` pass."""

    kind: str  # cut, part, heal, kill, power, leave, pause, resume, return
    nodes: tuple[int, ...]
    ticks: int


class Connection:
    """From one launcher to another one's door."""

    def __init__(self, dialler: Launcher, door: Launcher, now: int) -> None:
        self.ends = dialler, door
        self.sent: dict[Launcher, deque[tuple[int, Any]]] = {dialler: deque(), door: deque()}  # by who gets it
        self.heard = {dialler: now, door: now}

    def other(self, one: Launcher) -> Launcher:
        return self.ends[one is self.ends[0]]


class Launcher:
    """One process."""

    def __init__(self, world: World, node: int) -> None:
        world.started += 1
        self.key = f"{node}.{world.started}"
        self.node = node
        self.world = world
        self.alive, self.paused = True, False
        self.leaves = False  # as a head that has been told to
        self.handed_over = False  # a roster without us has been in force
        self.leads = False
        self.settled = False  # a roster of ours is in force
        self.runs = False  # as a head: its ranks and those of its nodes
        self.rosters: Rosters = ()
        self.head: Connection | None = None
        self.waits: dict[str, Connection] = {}  # at whose doors, while there is no head
        self.guests: dict[
            Connection, Rosters | None
        ] = {}  # those at our door; None until they have said what they hold
        self.acknowledged: dict[Connection, Age] = {}  # by those that we lead
        self.admitted: list[Connection] = []  # those of them that we lead
        self.renews = False  # all have to acknowledge a new roster, though nobody came or went
        self.able_since: int | None = None  # when enough began to wait here

    @property
    def peer(self) -> Peer:
        return Peer(self.key, f"n{self.node}", "" if self.leads and self.node == 0 else f"n{self.node}", 29400)

    @property
    def connections(self) -> list[Connection]:
        return [*([self.head] if self.head else []), *self.waits.values(), *self.guests]

    def act(self) -> None:
        self._hear()
        if self.leads:
            self._lead()
        elif self.head is None:
            self._seek()
        for connection in self.connections:
            self._send(connection, "beat", None)

    def _send(self, connection: Connection, kind: str, value: Any) -> None:
        self.world.send(connection, connection.other(self), kind, value)

    def _hear(self) -> None:
        for connection in self.connections:
            queue = connection.sent[self]
            reaches = self.world.meets(*connection.ends)
            while reaches and queue and queue[0][0] <= self.world.now and connection in self.connections:
                connection.heard[self] = self.world.now
                self._take(connection, *queue.popleft()[1])
            if self.world.now - connection.heard[self] > SILENCE:
                self._hang_up(connection)

    def _take(self, connection: Connection, kind: str, value: Any) -> None:
        match kind:
            case "gone":
                self._hang_up(connection)
            case "offer":
                self.guests[connection] = value
            case "ack":
                self.acknowledged[connection] = value
            case "rosters":  # from our head, or from one that begins to lead
                if self.leads:
                    return
                self.rosters = value
                self.head = connection
                self.waits = {key: one for key, one in self.waits.items() if one is not connection}
                for other in [*self.waits.values(), *self.guests]:
                    self._hang_up(other)
                self._send(connection, "ack", value[-1].age)

    def _hang_up(self, connection: Connection) -> None:
        self._send(connection, "gone", None)
        if connection is self.head:
            self.head = None
        self.waits = {key: one for key, one in self.waits.items() if one is not connection}
        self.guests.pop(connection, None)
        self.acknowledged.pop(connection, None)

    # As a head.

    def _lead(self) -> None:
        self._let_in()
        if not self.leads:
            return
        newest = self.rosters[-1]
        here = {one.key: one.peer for one in (self, *(guest.other(self) for guest in self.admitted))}
        if not may_go_on(self.rosters, here):
            self._step_down()
            return
        if self.leaves:
            del here[self.key]
            if not here:
                self._leave()
                return
        known = [peer for peer in newest.peers if peer.key in here]
        peers = (*known, *(here[key] for key in sorted(here.keys() - {peer.key for peer in known})))
        if peers != newest.peers or self.renews:
            self._change(peers)
        acknowledged = {one.other(self).key: age for one, age in self.acknowledged.items()}
        settled = in_force(self.rosters, acknowledged | {self.key: self.rosters[-1].age})
        if settled != self.rosters:
            self._tell(settled)
        self.settled = self.settled or len(self.rosters) == 1
        self.runs = self.settled and len(here) >= newest.least and not self.leaves
        if self.leaves and len(self.rosters) == 1 and self.rosters[0].left_by_head:
            if self.handed_over:
                self._leave()
            else:
                self.handed_over = True
                self._change(peers)

    def _leave(self) -> None:
        self.alive = self.runs = False
        for connection in self.connections:
            self._send(connection, "gone", None)

    def _let_in(self) -> None:
        """Newcomers, once a roster of ours is in force."""
        self.renews = False
        for connection, held in list(self.guests.items()):
            if connection in self.admitted or held is None or not self.settled:
                continue
            counted = merged({self.key: self.rosters, connection.other(self).key: held})
            if counted[0] != self.rosters[0]:
                self._step_down()  # a later term has been in force
                return
            if counted != self.rosters:
                self.renews = True  # then its roster won't count any more
                self._hang_up(connection)
            else:
                self.admitted.append(connection)
                self.renews = True  # it may have hung up and come back between two of our turns
        self.admitted = [one for one in self.admitted if one in self.guests]

    def _change(self, peers: Sequence[Peer]) -> None:
        last = self.rosters[-1]
        new = Roster(last.term, last.change + 1, self.key, tuple(peers), last.least, last.attempt + 1)
        self._tell((*self.rosters, new))

    def _tell(self, rosters: Rosters) -> None:
        self.rosters = rosters
        self.world.made.update(rosters)
        if len(rosters) == 1:
            self.world.forced.add(rosters[0])
        for connection in self.admitted:
            self._send(connection, "rosters", rosters)

    def begin(self, rosters: Rosters, term: int, with_: Collection[str]) -> None:
        """Lead a new term."""
        for connection in list(self.waits.values()):
            self._hang_up(connection)
        self.leads, self.able_since = True, None
        self.admitted = [one for one in self.guests if one.other(self).key in with_]
        self.acknowledged.clear()
        order = [peer.key for one in rosters for peer in one.peers]
        here = sorted([self, *(one.other(self) for one in self.admitted)], key=lambda one: _place(order, one.key))
        least = rosters[-1].least if rosters else self.world.least
        self._tell((*rosters, Roster(term, 0, self.key, tuple(one.peer for one in here), least)))

    def _step_down(self) -> None:
        self.leads = self.settled = self.runs = False
        self.rosters = without_own(self.key, self.rosters)
        for connection in list(self.guests):
            self._hang_up(connection)

    # Without a head.

    def _seek(self) -> None:
        leading = {key: one.rosters[-1].term for key, one in self.world.answers(self, leads=True).items()}
        seeking = {key: one.rosters[-1].age for key, one in self.world.answers(self, leads=False).items()}
        seeking |= {
            key: self.world.by_key[key].rosters[-1].age
            for key in self.waits.keys() - seeking.keys() - leading.keys()
            if self.world.by_key[key].alive and self.world.by_key[key].rosters
        }
        if not self.rosters and self.node == 0:
            self._gather(leading)
            return
        if not self.rosters:  # a newcomer asks everywhere
            self._wait_at(sorted(leading)[-1:] or sorted(seeking))
            return
        newest = self.rosters[-1]
        at_endpoint = {peer.key for peer in newest.peers if peer.at_endpoint}
        if self.world.gathers(self) and (newest.head in at_endpoint or (newest.left_by_head and not at_endpoint)):
            there = newest.head if at_endpoint else self.world.nodes[0].key
            seeking[there] = (newest.term, newest.change + 1, newest.head)
        waiting = {one.other(self).key: held for one, held in self.guests.items() if held is not None}
        hesitated = self.able_since is not None and self.world.now - self.able_since > HESITATES
        match succession(self.key, self.rosters, Sight(waiting, leading, seeking, hesitated)):
            case Lead(rosters=rosters, term=term, with_=with_):
                self.begin(rosters, term, with_)
            case Dial(key=key):
                self._wait_at([key])
            case Wait(at=at, enough=enough):
                self._wait_at(at)
                self.able_since = (self.able_since or self.world.now) if enough else None

    def _gather(self, leading: dict[str, int]) -> None:
        """Started again at the endpoint: play the part of the head that was lost there, unless another one leads."""
        held = {one.other(self).key: rosters or () for one, rosters in self.guests.items()}
        latest = max((rosters[-1].term for rosters in held.values() if rosters), default=0)
        later = [key for key, term in leading.items() if term > latest]
        if later:
            for connection in list(self.guests):
                self._hang_up(connection)
            self._wait_at([max(later, key=lambda key: leading[key])])
            return
        own = stands_for(held, self.key)
        lead = takes_over(own, (), held)
        if lead is not None:
            self.key = own
            self.world.by_key[own] = self
            self.begin(lead.rosters, lead.term, lead.with_)

    def _wait_at(self, doors: Sequence[str]) -> None:
        for key in self.waits.keys() - set(doors):
            self._hang_up(self.waits[key])
        for key in doors:
            if key not in self.waits:
                door = self.world.by_key[key]
                if not door.alive:
                    door = self.world.nodes[door.node]
                self.waits[key] = connection = Connection(self, door, self.world.now)
                door.guests[connection] = None
                self._send(connection, "offer", self.rosters)


def _place(order: Sequence[str], key: str) -> int:
    return order.index(key) if key in order else len(order)


class World:
    """The nodes, the network, and what must hold."""

    def __init__(self, nodes: int, least: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.least = least
        self.now = self.started = 0
        self.made: set[Roster] = set()
        self.forced: set[Roster] = set()  # those that have been in force
        self.apart: set[frozenset[int]] = set()  # nodes between which nothing passes
        self.nodes = [Launcher(self, node) for node in range(nodes)]
        self.by_key = {one.key: one for one in self.nodes}
        self.longest = 0  # for how many ticks at most two heads had ranks that ran
        self._two: dict[frozenset[str], int] = {}
        head, *others = self.nodes
        for one in others:
            connection = Connection(one, head, 0)
            one.head = connection
            head.guests[connection] = ()
        head.begin((), 1, {one.key for one in self.nodes})
        for one in others:
            one.rosters = head.rosters

    def meets(self, one: Launcher, other: Launcher) -> bool:
        return frozenset((one.node, other.node)) not in self.apart

    def send(self, connection: Connection, to: Launcher, kind: str, value: Any) -> None:
        """A message arrives after the ones before it; where the network is cut, once it isn't any more."""
        if to.alive:
            queue = connection.sent[to]
            soonest = max(self.now, queue[-1][0] if queue else 0)
            queue.append((max(soonest, self.now + self.random.randint(0, DELAY)), (kind, value)))

    def answers(self, asks: Launcher, *, leads: bool) -> dict[str, Launcher]:
        """Who answers this launcher, of those that lead or of those that have no head."""
        return {
            one.key: one
            for one in self.nodes
            if one is not asks and one.alive and not one.paused and self.meets(asks, one) and self.random.random() < 0.9
            if (one.settled if leads else not one.leads and one.head is None and one.rosters)
        }

    def gathers(self, asks: Launcher) -> bool:
        """Whether a launcher that was started again at the endpoint answers this one, and waits for others."""
        one = self.nodes[0]
        return (
            one.alive
            and not (one.paused or one.leads or one.head or one.rosters)
            and self.meets(asks, one)
            and self.random.random() < 0.9
        )

    def happen(self, fault: Fault) -> None:
        """Let it happen."""
        chosen = [self.nodes[number % len(self.nodes)] for number in fault.nodes]
        numbers = {one.node for one in chosen}
        match fault.kind:
            case "part":  # the network falls into two
                rest = set(range(len(self.nodes))) - numbers
                self.apart |= {frozenset((one, other)) for one in numbers for other in rest}
            case "cut":  # between some nodes only
                self.apart |= {frozenset((one, other)) for one in numbers for other in numbers if one != other}
            case "heal":
                self.apart.clear()
            case "kill" | "power":  # without power, nobody says that it is gone
                for one in chosen:
                    one.alive = one.runs = False
                    for connection in one.connections if fault.kind == "kill" else ():
                        one._send(connection, "gone", None)
            case "leave":
                for one in chosen:
                    one.leaves = one.leads and one.settled
                    one.runs = one.runs and not one.leaves
            case "pause" | "resume":
                for one in chosen:
                    one.paused = fault.kind == "pause"
            case "return":
                for one in chosen:
                    if not one.alive:
                        self.nodes[one.node] = new = Launcher(self, one.node)
                        self.by_key[new.key] = new

    def run(self, ticks: int) -> None:
        """Let time pass."""
        for _ in range(ticks):
            self.now += 1
            order = [one for one in self.nodes if one.alive and not one.paused]
            self.random.shuffle(order)
            for one in order:
                one.act()
            self._look()

    def _look(self) -> None:
        heads = [one.key for one in self.nodes if one.alive and one.runs and not one.paused]
        pairs = {frozenset((one, other)) for one in heads for other in heads if one != other}
        self._two = {pair: self._two.get(pair, 0) + 1 for pair in pairs}
        self.longest = max(self.longest, *self._two.values()) if self._two else self.longest

    def must_be_up(self, together: set[int]) -> bool:
        """Whether enough of all rosters is here that may still count for these nodes, which now reach each other."""
        there = [one for one in self.nodes if one.node in together and one.alive and not (one.paused or one.leaves)]
        held = {one.key: one.rosters for one in there if one.rosters}
        if not held or len(there) < self.least:
            return False
        newest = max(self.forced, key=lambda one: one.age)
        counted = {*merged(held), *(one for one in self.made if one.age >= newest.age)}
        return all(one.share({other.key for other in there}) > 0.5 for one in counted)

    @property
    def is_up(self) -> bool:
        return any(one.alive and one.runs and not one.paused for one in self.nodes)


def play(nodes: int, least: int, seed: int, faults: Sequence[Fault]) -> str:
    """Play a history. Returns what went wrong, or ""."""
    world = World(nodes, min(least, nodes), seed)
    world.run(2 * SECOND)
    for fault in faults:
        world.happen(fault)
        world.run(fault.ticks)
    apart = {node for pair in world.apart for node in pair}
    together = {one.node for one in world.nodes} - apart
    if not together or world.random.random() < 0.5:
        world.apart.clear()
        together = {one.node for one in world.nodes}
    for one in world.nodes:
        one.paused = False
    must = world.must_be_up(together)
    world.run(60 * SECOND)
    if world.longest > SILENCE + 2 * DELAY:
        return f"two heads for {world.longest / SECOND} s"
    return "it stays down" if must and not world.is_up else ""
