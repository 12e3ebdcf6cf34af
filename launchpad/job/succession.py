"""Decides who leads a job after its head is lost, and whether a head may go on. Pure.

A head sends its nodes a roster with each change, and they acknowledge it. A roster is in force once all who are on it
have acknowledged it. Until then the one before counts too, so what a launcher must keep is a row of rosters: the newest
that it knows to be in force, and those after it. A head goes on with half of each roster of its own, itself included;
others take over with more than half of each. So two heads never have enough nodes at the same time, but for as long as
the loss of a node goes unnoticed.
"""

from collections.abc import Collection, Mapping

from launchpad.named import NamedTuple

Age = tuple[int, int, str]


class Peer(NamedTuple):
    """A launcher on one of the nodes. Started again, it is another one."""

    key: str  # no other launcher has it
    name: str  # its node's
    host: str = ""  # where its door is; "": at the job's endpoint
    port: int = 0  # 0: it has none, and so can't lead

    @property
    def at_endpoint(self) -> bool:
        """Whether the others find it where the nodes of the job meet."""
        return bool(self.port) and not self.host


class EarlierHead(NamedTuple):
    """One that has been lost."""

    name: str  # its node's
    job: str  # its id of the job, under which its record is there; "" if it had none yet
    lost: float  # when those that went on lost it, in seconds since 1970; 0: they don't know


class Roster(NamedTuple):
    """Who belongs to the job."""

    term: int  # of the head that says so; each head has a higher one than those before it
    change: int  # how many rosters that head had made before
    head: str  # its key
    peers: tuple[Peer, ...]  # in the order in which they take the lead
    least: int  # on so many nodes the job can run
    attempt: int = 0
    restarts: int = 0  # that have been used up
    job: str = ""  # the head's id of the job
    earlier: tuple[EarlierHead, ...] = ()  # the last of them

    @property
    def left_by_head(self) -> bool:
        """Whether its head is about to leave the others, and has told them so."""
        return all(peer.key != self.head for peer in self.peers)

    @property
    def age(self) -> Age:
        """Grows from roster to roster. Of two heads of one term at most one gets a roster in force."""
        return self.term, self.change, self.head

    def share(self, here: Collection[str]) -> float:
        """Which part of its peers is here."""
        return sum(peer.key in here for peer in self.peers) / len(self.peers)


MOST_EARLIER = 16

Rosters = tuple[Roster, ...]  # the newest that is known to be in force, and those after it


class Sight(NamedTuple):
    """What a launcher without a head knows of the others, by their keys."""

    waiting: Mapping[str, Rosters] = {}  # those that have dialled us and wait, with their rosters; a newcomer has none
    leading: Mapping[str, int] = {}  # those that answer and lead a job, with its term
    seeking: Mapping[str, Age] = {}  # those that answer and have no head either, with the age of their newest roster
    hesitated: bool = False  # enough have been waiting for a while
    late: bool = False  # we have been without a head for as long as we may


class Lead(NamedTuple):
    """Lead this term, with these."""

    rosters: Rosters  # that it must have more than half of, until one of its own is in force
    term: int
    with_: frozenset[str]


class Dial(NamedTuple):
    """Join this head."""

    key: str


class Wait(NamedTuple):
    """Wait at the doors of these, and at our own."""

    at: tuple[str, ...]
    enough: bool  # wait here: we lead if none of those does soon


class End(NamedTuple):
    """Give up."""


def succession(me: str, rosters: Rosters, seen: Sight) -> Lead | Dial | Wait | End:
    """What a launcher does that has lost its head, whenever it has seen something new.

    It joins a head. Where there is none, all wait at the doors of those who know of a newer roster, or who stand before
    them on the same one, and the first at whose door enough wait leads. It hesitates while one of those before it
    answers, who may have enough a moment later.
    """
    if seen.leading:
        return Dial(max(seen.leading, key=lambda key: (seen.leading[key], key)))
    newest = rosters[-1]
    order = [peer.key for peer in newest.peers]
    before = order[: order.index(me)] if me in order else order
    at = tuple(key for key, age in seen.seeking.items() if age > newest.age or (age == newest.age and key in before))
    lead = takes_over(me, rosters, seen.waiting)
    if lead and (seen.hesitated or not at):
        return lead
    return End() if seen.late else Wait(at, bool(lead))


def takes_over(me: str, rosters: Rosters, waiting: Mapping[str, Rosters]) -> Lead | None:
    """Lead if enough wait here.

    One of them may have a roster of a head that never got enough nodes, and which asks for nodes that are gone: then
    the others do without that one.
    """
    held = {**waiting, me: rosters}
    while any(held.values()):
        counted = merged(held)
        wrong = {one for one in counted if one.share(held) <= 0.5}
        if not wrong and len(held) >= counted[-1].least:
            return Lead(counted, counted[-1].term + 1, frozenset(held))
        holders = [key for key, own in held.items() if key != me and not wrong.isdisjoint(own[1:])]
        if not holders:
            return None
        for key in holders:
            del held[key]
    return None


def stands_for(held: Mapping[str, Rosters], key: str) -> str:
    """Whose part a launcher plays that has just been started at the endpoint, and at whose door these wait.

    The head's that they have lost, if that was there: two can't listen at the same place. Otherwise it is new (`key`).
    """
    every = [rosters[-1] for rosters in held.values() if rosters]
    newest = max(every, key=lambda one: one.age, default=None)
    found = [peer.key for peer in newest.peers if peer.key == newest.head and peer.at_endpoint] if newest else []
    return found[0] if found else key


def merged(held: Mapping[str, Rosters]) -> Rosters:
    """What counts for launchers that hold these.

    A roster that is in force replaces all that were to follow older ones. One whose head is here, and holds it no more,
    never comes into force. Who plays the part of a lost head (`stands_for`) holds nothing, and can't know.
    """
    every = list(filter(None, held.values()))
    newest = max((rosters[0] for rosters in every), key=lambda one: one.age)
    later = {one for rosters in every if rosters[0] == newest for one in rosters[1:]}
    return (newest, *sorted(one for one in later if one in (held.get(one.head) or (one,))))


def first_roster(me: str, lead: Lead, peers: Mapping[str, Peer], lost: float = 0.0) -> Roster:
    """The first one of a new head, in the order of those before. `peers`: the launchers here, by their keys.

    `lost`: when the one before was.
    """
    order = list(dict.fromkeys(peer.key for roster in reversed(lead.rosters) for peer in roster.peers))
    place = {key: number for number, key in enumerate(order)}
    here = sorted(peers, key=lambda key: place.get(key, len(place)))
    last = lead.rosters[-1]
    names = [peer.name for peer in last.peers if peer.key == last.head]
    head_lost = [EarlierHead(name, last.job, lost) for name in names or [""] if not last.left_by_head]
    earlier = (*last.earlier, *head_lost)[-MOST_EARLIER:]
    members = tuple(peers[key] for key in here)
    return Roster(lead.term, 0, me, members, last.least, last.attempt + 1, last.restarts, earlier=earlier)


def without_own(me: str, rosters: Rosters) -> Rosters:
    """What is left to a head that ends its part: none of its rosters that wait to be in force will ever be."""
    return (rosters[0], *(one for one in rosters[1:] if one.head != me))


def may_go_on(rosters: Rosters, here: Collection[str]) -> bool:
    """Whether a head, whose own roster is the last of these, may go on with those that are here (itself included).

    Of a roster from before its term it needs more than half, as others might take over with that as well.
    """
    term = rosters[-1].term
    return all(one.share(here) >= 0.5 if one.term == term else one.share(here) > 0.5 for one in rosters)


def can_lead(peers: int, least: int, cut_off: int) -> bool:
    """Whether one of these peers can lead when the head is lost, though so many others don't reach it."""
    meet = peers - 1 - cut_off
    return meet > peers / 2 and meet >= least


def in_force(rosters: Rosters, acknowledged: Mapping[str, Age]) -> Rosters:
    """What is left to a head of its rosters, by the age of the last one that each launcher has acknowledged.

    Only for a head that may go on.
    """
    for number in reversed(range(1, len(rosters))):
        one = rosters[number]
        if one.term == rosters[-1].term and all(
            acknowledged.get(peer.key, (0, 0, "")) >= one.age for peer in one.peers
        ):
            return rosters[number:]
    return rosters
