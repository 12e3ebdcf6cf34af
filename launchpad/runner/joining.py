"""Waits for the nodes of a job that were each started by a user or a scheduler, and says which are missing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchpad import linux
from launchpad.console.message import QueuedMessages
from launchpad.errors import NodeError, UsageError
from launchpad.head.arrivals import Dialled, Superseded
from launchpad.job.hosts import some_of
from launchpad.job.offer import NodeOffer
from launchpad.job.outcome import NODE_LOST, STOPPING
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec
from launchpad.job.succession import Lead, Peer, Rosters, first_roster, stands_for, takes_over
from launchpad.job.world import Meeting
from launchpad.job.world import place as _place
from launchpad.protocol.commands import HeadMoved, JobEnded, RosterChanged
from launchpad.runner.options import NodeOptions
from launchpad.runner.own_door import Following, Guest, HeadPlace, Takeover
from launchpad.runner.this_machine import own
from launchpad.transport import Link
from launchpad.transport.join.client import HeadConnection, JoinRefused, LedElsewhere, no_address, place_of, resolve
from launchpad.transport.join.server import Gate, JoinedLink, JoinServer, listen
from launchpad.transport.local import SECRET

# When to tell the user who is missing: seconds after the start, and how often after the last of them.
TELL_AT = (3.0, 30.0)
TELL_EVERY = 60.0

# How often to look for the address of the host where the nodes meet, while its name has none.
RESOLVE_SECONDS = 0.5

# How often those that don't follow a head are told of it.
ANNOUNCE_SECONDS = 1.0

# How long nodes that lost us just before the end have to ask how the job ended. They do at once, and again and again.
MISSED_SECONDS = 2.0

# Exit codes of a launchpad that has left a job.
LEFT = tuple(128 + signum for signum in STOPPING)

LOCALHOST = ("localhost", "127.0.0.1", "::1")


def job_secret(nodes: NodeOptions, environ: Mapping[str, str]) -> bytes:
    """What all nodes of the job know: a file's contents, a variable, or else the job's id. Raises UsageError."""
    if nodes.rdzv_secret_file is None:
        secret = os.fsencode(environ.get(SECRET) or nodes.rdzv_id).strip()
        if not secret:
            raise UsageError("--rdzv-id is empty, and with it the job's secret; give an id, the same on each node")
        return secret
    try:
        secret = linux.whole(nodes.rdzv_secret_file).strip()
    except OSError as error:
        raise UsageError(f"--rdzv-secret-file {nodes.rdzv_secret_file}: {error.strerror}") from None
    if not secret:
        raise UsageError(f"--rdzv-secret-file {nodes.rdzv_secret_file} is empty; write a secret into it")
    return secret


def is_guessable(nodes: NodeOptions, environ: Mapping[str, str]) -> bool:
    """Whether the user has given no secret."""
    return nodes.rdzv_secret_file is None and not environ.get(SECRET) and nodes.rdzv_id == "none"


class Reminders:
    """When to tell the user again who is missing. Times are those of time.monotonic()."""

    def __init__(self, start: float) -> None:
        self._at = [start + seconds for seconds in TELL_AT]

    def due(self, now: float) -> bool:
        """Whether it is time; then the next time is later."""
        if now < self._at[0]:
            return False
        self._at = self._at[1:] or [now + TELL_EVERY]
        return True

    def wait(self, now: float, deadline: float) -> float:
        """How many seconds to wait for news: at most one, to notice a node that has left."""
        return min(1.0, deadline - now, self._at[0] - now)


class Joining:
    """The head's door: admits the job's nodes, one after the other."""

    def __init__(
        self,
        meeting: Meeting,
        spec: JobSpec | None,
        secret: bytes,
        say: Callable[[str], None],
        member: Callable[[NodeOffer], Member] | None,
        takeover: Takeover | None = None,
    ) -> None:
        """Listen. `member` makes one of an offer. Raises OSError if another program listens there.

        Without a spec, the job has roles: the nodes offer their machines only, and nobody joins once it runs.
        `takeover`: lead a job that has lost its head, at our own door, with the nodes that wait there.
        """
        self._meeting = meeting
        self._spec = spec
        self._messages = QueuedMessages(say)
        self._member = member
        self._changed = threading.Condition()
        self._nodes: list[Guest] = []  # by arrival; once all are there, by rank from 1
        self._taken: dict[int, JoinedLink] = {}  # node ranks that nodes must have
        self._ready = 0  # how many nodes have been let in, some of which may have left
        self._failed = ""  # why a node can't take part
        self._waiting = True
        self._take: Callable[[Dialled | Superseded], None] | None = None  # gets machines that join while the job runs
        self._late: dict[JoinedLink, NodeOffer] = {}  # these, until they know that they have joined, and the job runs
        self._over = False
        self._peers: dict[Link, Peer] = {}
        self.rosters: Rosters = ()
        self.lead: Lead | None = None  # the job goes on after its head was lost
        self._lost = takeover.lost if takeover is not None else 0.0  # when, in seconds since 1970
        self._moved: HeadPlace | None = None  # another one leads it
        self._gave_way: Rosters | None = None  # what counts, now that others may go on without us
        self._ended: JobEnded | None = None
        self._missed = False  # nodes lost us when the job was about to end, and ask for us now
        self._secret = secret
        if takeover is not None:
            self._waiting = False
            self.own, self.lead = takeover.door.peer, takeover.lead
            self.address = self.own.host
            with self._changed:
                self._server, guests = takeover.door.hand_over(self, self.lead.with_)
                self._peers |= {link: _peer(link, offer) for link, offer in guests}
                self._nodes = _in_order(guests, len(guests) + 1, self.lead)
            return
        self.own = Peer(os.urandom(8).hex(), socket.gethostname(), "", meeting.port)
        self.address = _listen_at(meeting)
        self._server = JoinServer(listen((self.address, meeting.port)), secret, self)

    # In the server's thread.

    def state(self) -> dict[str, Any]:
        """Whether we lead already, or how the job ended."""
        if self._waiting:
            return {"seeks": None}
        if self._ended is not None:
            return {"ended": [self._ended.code, self._ended.lines], "term": self._term}
        return {"leads": self._term} if self._take else {}

    def told(self, place: tuple[str, int], term: int) -> None:
        """Follow a head of a later term."""
        with self._changed:
            held = [offer.rosters[-1].term for _, offer in self._nodes if offer.rosters] if self._waiting else []
            if term > max(held, default=0 if self._waiting else self._term):
                self._moved = HeadPlace(*place, term)
                self._changed.notify_all()
                if self._take is not None:
                    self._take(Superseded(_place(*place)))

    @property
    def _term(self) -> int:
        return self.lead.term if self.lead else 1

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> dict[str, Any]:
        """Judge a node."""
        if self._moved is not None:  # those that are here already are told by `follow`
            return {"led": self._moved[:2]}
        if self._gave_way is not None:
            return {"later": True}
        offer = NodeOffer.from_json(offered)
        self._peers[link] = _peer(link, offer)
        refusal, notes = self._judge(link, offer)
        return {"error": refusal} if refusal else {"welcome": notes}

    def _judge(self, link: JoinedLink, offer: NodeOffer) -> tuple[str, list[str]]:
        """Why it can't join, "" if it can, and notes for its user."""
        with self._changed:
            here = self._meeting
            if offer.failed:
                self._failed = f"{offer.name} can't take part: {offer.failed}"
                self._changed.notify_all()
                return "the head has been told", []
            if offer.nnodes not in ("", here.size):
                return f"--nnodes differs: {here.size} on the head, {offer.nnodes} here", []
            if offer.beside:  # its head is gone
                return FULL.format(here.nnodes), []
            if self._spec is None and (offer.spec is not None or offer.rosters):
                return "the job has roles; run the head's line here too, or launchpad join", []
            if self._spec is not None and offer.roles:
                return "the job has no roles; run the head's line here too, or launchpad join", []
            exact = here.static or self._spec is None
            if self._over or (not self._waiting and exact):
                return FULL.format(here.nnodes), []
            notes = offer.differences(self._spec) if self._spec is not None else []
            if len(self._nodes) >= here.nnodes - 1:
                self._nodes = [one for one in self._nodes if not one[0].gone.is_set()]
            if len(self._nodes) >= here.nnodes - 1:
                if exact:
                    return FULL.format(here.nnodes), []
                notes.append(f"the job has its {here.nnodes} nodes: this one is a spare, for when one of them is lost")
            if not self._waiting:
                self._late[link] = offer
                self._nodes.append((link, offer))
                return "", notes
            if offer.node_rank is not None and (refusal := self._take_rank(offer.node_rank, link)):
                return refusal, []
            self._nodes.append((link, offer))
        return "", notes

    def _take_rank(self, rank: int, link: JoinedLink) -> str:
        """Give a node the --node-rank that it asks for; or say why not. With c10d it is only for the order."""
        here, has_it = self._meeting, self._taken.get(rank)
        own = 0 if here.static else here.node_rank
        if rank == own or (has_it is not None and not has_it.gone.is_set()):
            leave_out = "" if here.static else ", or leave it out"
            return f"--node-rank {rank} has already joined: give each node its own{leave_out}"
        if here.static and not 0 < rank < here.nnodes:
            return f"--node-rank {rank} is not between 1 and {here.nnodes - 1}"
        self._taken[rank] = link
        return ""

    def joined(self, link: JoinedLink) -> None:
        """An admitted node knows that it is."""
        with self._changed:
            self._ready += 1
            if link in self._late:
                self._hand_over()
            elif self._ready >= (self._meeting.least or self._meeting.nnodes) - 1:  # enough, unless one has left
                self._changed.notify_all()

    def refused(self, address: str, reason: str) -> None:
        """Tell the user."""
        if reason != "the head has been told":
            self._messages.say(f"a node at {address} can't join: {reason}")

    # In the head's own thread.

    def wait(self) -> list[Guest]:
        """Wait for the other nodes; then they are in the order of their ranks. Raises NodeError."""
        start = time.monotonic()
        deadline = start + self._meeting.join_seconds
        enough = last_call = None  # when enough nodes were there, and until when others may come
        reminders = Reminders(start)
        least, most = self._meeting.least or self._meeting.nnodes, self._meeting.nnodes
        with self._changed:
            while True:
                here = [one for one in self._nodes if one[0].ready and not one[0].gone.is_set()]
                if self._failed:
                    raise NodeError(self._failed)
                if self._moved is not None:
                    raise LedElsewhere(self._moved[:2])
                now = time.monotonic()
                goes_on = any(offer.rosters for _, offer in here)
                lead = self._takes_over(here) if goes_on else None
                enough = (enough or now) if len(here) + 1 >= least and bool(lead) == goes_on else None
                last_call = enough + self._meeting.last_call_seconds if enough else None
                complete = last_call is not None and (len(here) + 1 >= most or (lead is not None and _all_back(here)))
                if complete or (last_call is not None and now >= last_call):
                    return self._start_with(here, lead)
                missing = f"{len(here) + 1} of {self._meeting.size} nodes have joined"
                names = some_of([socket.gethostname(), *(offer.name for _, offer in here)])
                if last_call is None and now >= deadline:
                    raise NodeError(f"{missing} ({names}) within {self._meeting.join_seconds:g} s")
                if reminders.due(now):
                    rest = f"on the others, run the same line, or: launchpad join {self._meeting.place}"
                    self._messages.say(f"{missing} ({names}) after {now - start:.0f} s; {rest}")
                self._changed.wait(reminders.wait(now, deadline if last_call is None else last_call))

    def _takes_over(self, here: list[Guest]) -> Lead | None:
        """Whether we may lead a job whose nodes have lost their head, with those that are here."""
        held = {offer.key: offer.rosters for _, offer in here}
        return takes_over(stands_for(held, self.own.key), (), held)

    def _start_with(self, here: list[Guest], lead: Lead | None) -> list[Guest]:
        """Wait no more: the job begins, or goes on."""
        self._waiting = False
        if lead is not None:
            self.lead = lead
            self._lost = min((offer.lost for _, offer in here if offer.lost), default=0.0)
            self.own = self.own._replace(key=stands_for({offer.key: offer.rosters for _, offer in here}, self.own.key))
        not_yet = [one for one in self._nodes if one not in here and not one[0].gone.is_set()]
        for link, offer in here:
            if lead is not None and offer.key not in lead.with_:  # it holds a roster that never counted
                link.abandon()
                here = [one for one in here if one[0] is not link]
        self._late |= dict(not_yet)
        arrived = _in_order(here, self._meeting.nnodes, lead, exact=self._meeting.static)
        self._nodes = [*arrived, *not_yet]
        return arrived

    @property
    def nodes(self) -> list[Guest]:
        """Those that are here, in the order of their ranks."""
        return self._nodes

    def first_roster(self) -> RosterChanged | None:
        """What the nodes must acknowledge before their ranks start again; None if the job has just begun."""
        if self.lead is None:
            return None
        peers = {self._peers[link].key: self._peers[link] for link, _ in self._nodes} | {self.own.key: self.own}
        first = first_roster(self.own.key, self.lead, peers, self._lost)
        self.rosters = (first,)  # once they have
        return RosterChanged([*self.lead.rosters, first], True)

    def follow(self, *, leave: bool = False) -> Following | None:
        """Lead no more, if that is so. The nodes join the next head, or look for one. None if we `leave` the job."""
        if self._moved is None and self._gave_way is None:
            return None
        for link, _ in self._nodes:
            if self._moved is not None:
                link.send(HeadMoved(self._moved.host, self._moved.port))
            else:
                link.abandon()
        if leave:
            return None
        return Following(self._server, self.own, self._gave_way or (), self._moved)

    def give_up(self, failed: str) -> Following:
        """Lead no more: those that were to follow us can't. They look for another head."""
        assert self.lead is not None
        self._gave_way = self.lead.rosters
        following = self.follow()
        assert following is not None
        return following._replace(failed=failed)

    def goes_on(self, code: int) -> bool:
        """Whether the job, which has ended here with this exit code, may go on without us."""
        return self._gave_way is not None and code in (NODE_LOST, *LEFT)

    @property
    def can_hand_over(self) -> bool:
        """Whether another launcher can lead the job after us."""
        links = [link for link, _ in self._nodes if not link.gone.is_set()]
        return not self._meeting.static and any(self._peers[link].port for link in links)

    def give_way(self, rosters: Rosters) -> None:
        """The job ends here, as others may go on with it. These rosters count."""
        self._gave_way = rosters

    # While the job runs.

    def peer(self, link: Link) -> Peer:
        """The launcher on the other end."""
        return self._peers[link]

    def open(self, take: Callable[[Dialled | Superseded], None]) -> None:
        """From now on, `take` gets each machine that joins."""
        with self._changed:
            self._take = take
            self._hand_over()
        if self.lead is not None:
            threading.Thread(target=self._announce, name="announce", daemon=True).start()

    def _announce(self) -> None:
        """Tell those that don't follow us who leads: whoever is started at the endpoint, and earlier heads.

        They may have led on without knowing of us.
        """
        assert self.lead is not None
        places = [] if self.own.at_endpoint else [(self._meeting.host, self._meeting.port), *self._meeting.elsewhere]
        places += self._meeting.others
        places += [(peer.host, peer.port) for roster in self.lead.rosters for peer in roster.peers if peer.host]
        while not self._over:
            peers = [self._peers[link] for link, _ in self._nodes if not link.gone.is_set()]
            here = {(peer.host, peer.port) for peer in (self.own, *peers)}
            for host, port in [one for one in dict.fromkeys(places) if one not in here]:
                with contextlib.suppress(OSError, JoinRefused):
                    self._announce_at(host, port)
            time.sleep(ANNOUNCE_SECONDS)

    def _announce_at(self, host: str, port: int) -> None:
        for address in resolve(host, port):
            own = self.own.host or self._meeting.host
            told = {"led": [own, self.own.port], "term": self._term}
            there = HeadConnection((address, port), self._secret, None, tell=told)
            there.close()
            term, answer = there.answer.get("term", there.answer.get("leads")), there.answer
            if type(term) is int and term > self._term:
                self.told(place_of(answer["led"]) if "led" in answer else (host, port), term)

    def _hand_over(self) -> None:
        for link in [link for link in self._late if link.ready] if self._take else ():
            assert self._take is not None
            assert self._member is not None
            self._take(Dialled(link, self._member(self._late.pop(link))))

    def close(self) -> None:
        """Let nobody else in: the job is over. Those that ask wait for the next one."""
        with self._changed:
            self._take = None
            self._over = True

    def replace(self, gate: Gate) -> None:
        """Have another one judge who comes from now on."""
        self._server.replace(gate)

    def stop_listening(self) -> None:
        """Free the port, for torch's store: static's nodes meet at MASTER_PORT."""
        self._server.stop_listening()

    def tell(self, lines: list[str], code: int) -> None:
        """Tell the nodes how the job ended, unless it goes on without us."""
        if not self.goes_on(code):
            self._gave_way = self._moved = None
            members = {peer.key for roster in self.rosters[-1:] for peer in roster.peers}
            gone = [link for link, _ in self._nodes if link.gone.is_set()]
            self._missed = code == 0 and any(self._peers[link].key in members for link in gone)
            self._ended = JobEnded(code, lines)
            self._server.tell([link for link, _ in self._nodes], self._ended)

    def leave(self) -> None:
        """Wait until the nodes, which have been told, have hung up, and others have asked."""
        if self._missed:
            time.sleep(MISSED_SECONDS)
        self._server.stop_listening()
        for link, _ in self._nodes:
            link.close()
        self._server.close()
        self._messages.close()


# What a node hears that comes when the job has all its nodes.
FULL = "all {} nodes of the job have joined already"


def _peer(link: JoinedLink, offer: NodeOffer) -> Peer:
    return Peer(offer.key, offer.name, link.address if offer.port else "", offer.port)


def _in_order(nodes: list[Guest], most: int, lead: Lead | None = None, *, exact: bool = False) -> list[Guest]:
    """By rank: if `exact`, those that say one, have it; others follow as before, by what they say, or by arrival.

    Then come the spares.
    """
    nodes, spares = nodes[: most - 1], nodes[most - 1 :]
    place = {peer.key: number for number, peer in enumerate(lead.rosters[-1].peers)} if lead else {}
    fixed = {one[1].node_rank: one for one in nodes if exact and one[1].node_rank is not None}
    free = [one for one in nodes if not exact or one[1].node_rank is None]

    def key(one: Guest) -> tuple[int, bool, int]:
        order = one[1].order if one[1].node_rank is None else one[1].node_rank
        return place.get(one[1].key, len(place)), order is None, order or 0

    free.sort(key=key)
    return [fixed[rank] if rank in fixed else free.pop(0) for rank in range(1, len(nodes) + 1)] + spares


def _all_back(nodes: Sequence[Guest]) -> bool:
    """Whether all nodes are here that have lost their head."""
    before = max((offer.rosters[-1] for _, offer in nodes if offer.rosters), key=lambda one: one.age)
    return {peer.key for peer in before.peers} <= {before.head, *(offer.key for _, offer in nodes)}


def leads(meeting: Meeting, say: Callable[[str], None]) -> bool:
    """Whether the launchpad on this machine is the one that leads the job.

    Waits until the host's name has an address: that of a pod may come a while after the pod. Raises NodeError.
    """
    if meeting.is_head is not None:
        return meeting.is_head
    if meeting.host in (*LOCALHOST, socket.gethostname()):
        return True
    start = time.monotonic()
    reminders = Reminders(start)
    while True:
        try:
            return bool(own(resolve(meeting.host, meeting.port)))
        except OSError as error:
            waiting = f"waiting for the head of the job at {meeting.place}: {no_address(meeting.host, error)}"
        now = time.monotonic()
        if now >= start + meeting.join_seconds:
            raise NodeError(f"{waiting}; gave up after {meeting.join_seconds:g} s")
        if reminders.due(now):
            say(waiting)
        time.sleep(RESOLVE_SECONDS)


def _listen_at(meeting: Meeting) -> str:
    """The address to listen at: that of the host, or all if others know this machine by another one. Raises OSError.

    Debian's /etc/hosts has 127.0.1.1 for the machine's own name; and `is_host` may stand for a forwarded address.
    """
    host, addresses = meeting.host, resolve(meeting.host, 0)
    here = own(addresses)
    outward = [address for address in here if not linux.is_loopback(address)]
    if outward:
        return outward[0]
    if not here and meeting.static:
        return addresses[0]  # can't be listened at, which the user should know
    is_name = host not in LOCALHOST and host not in here
    return "0.0.0.0" if is_name or not here else here[0]


def name_here(environ: Mapping[str, str] = os.environ) -> str:
    """What this node is called in a job that it joins."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def order_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """This node's place according to the scheduler that started it."""
    given = environ.get("SLURM_NODEID", "")
    return int(given) if given.isdecimal() else None
