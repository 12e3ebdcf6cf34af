"""Waits for the nodes of a job that were each started by a user or a scheduler, and says which are missing."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchpad import linux
from launchpad.console.message import QueuedMessages
from launchpad.errors import NodeError, UsageError
from launchpad.head.arrivals import Dialled
from launchpad.job.hosts import some_of
from launchpad.job.offer import NodeOffer
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec
from launchpad.job.succession import Roster
from launchpad.job.world import Meeting
from launchpad.protocol.commands import JobEnded
from launchpad.runner.options import NodeOptions
from launchpad.runner.this_machine import own_addresses
from launchpad.transport.join.client import no_address, resolve
from launchpad.transport.join.server import JoinedLink, JoinServer
from launchpad.transport.local import SECRET

# When to tell the user who is missing: seconds after the start, and how often after the last of them.
TELL_AT = (3.0, 30.0)
TELL_EVERY = 60.0

# How often to look for the address of the host where the nodes meet, while its name has none.
RESOLVE_SECONDS = 0.5

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
        spec: JobSpec,
        secret: bytes,
        say: Callable[[str], None],
        member: Callable[[NodeOffer], Member],
    ) -> None:
        """Listen. `member` makes one of an offer. Raises OSError if another program listens there."""
        self._meeting = meeting
        self._spec = spec
        self._messages = QueuedMessages(say)
        self._member = member
        self._changed = threading.Condition()
        self._nodes: list[tuple[JoinedLink, NodeOffer]] = []  # by arrival; once all are there, by rank from 1
        self._taken: dict[int, JoinedLink] = {}  # node ranks that nodes must have
        self._ready = 0  # how many nodes have been let in, some of which may have left
        self._failed = ""  # why a node can't take part
        self._waiting = True
        self._take: Callable[[Dialled], None] | None = None  # gets machines that join while the job runs
        self._late: dict[JoinedLink, NodeOffer] = {}  # these, until they know that they have joined, and the job runs
        self._over = False
        self.address = _listen_at(meeting)
        self._server = JoinServer((self.address, meeting.port), secret, self)

    # In the server's thread.

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> tuple[str, list[str]]:
        """Judge a node."""
        offer = NodeOffer.from_json(offered)
        with self._changed:
            here = self._meeting
            if offer.failed:
                self._failed = f"{offer.name} can't take part: {offer.failed}"
                self._changed.notify_all()
                return "the head has been told", []
            if offer.nnodes not in ("", here.size):
                return f"--nnodes differs: {here.size} on the head, {offer.nnodes} here", []
            if self._over or (not self._waiting and here.static):
                return FULL.format(here.nnodes), []
            notes = offer.differences(self._spec)
            if len(self._nodes) >= here.nnodes - 1:
                self._nodes = [one for one in self._nodes if not one[0].gone.is_set()]
            if len(self._nodes) >= here.nnodes - 1:
                if here.static:
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

    def wait(self) -> list[tuple[JoinedLink, NodeOffer]]:
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
                now = time.monotonic()
                enough = (enough or now) if len(here) + 1 >= least else None
                last_call = enough + self._meeting.last_call_seconds if enough else None
                complete = len(here) + 1 >= most or (last_call is not None and _all_back(here))
                if complete or (last_call is not None and now >= last_call):
                    self._waiting = False
                    not_yet = [one for one in self._nodes if one not in here and not one[0].gone.is_set()]
                    self._late |= dict(not_yet)
                    arrived = _in_order(here, most, exact=self._meeting.static)
                    self._nodes = [*arrived, *not_yet]
                    return arrived
                missing = f"{len(here) + 1} of {self._meeting.size} nodes have joined"
                names = some_of([socket.gethostname(), *(offer.name for _, offer in here)])
                if last_call is None and now >= deadline:
                    raise NodeError(f"{missing} ({names}) within {self._meeting.join_seconds:g} s")
                if reminders.due(now):
                    rest = f"on the others, run the same line, or: launchpad join {self._meeting.place}"
                    self._messages.say(f"{missing} ({names}) after {now - start:.0f} s; {rest}")
                self._changed.wait(reminders.wait(now, deadline if last_call is None else last_call))

    # While the job runs.

    def open(self, take: Callable[[Dialled], None]) -> None:
        """From now on, `take` gets each machine that joins."""
        with self._changed:
            self._take = take
            self._hand_over()

    def _hand_over(self) -> None:
        for link in [link for link in self._late if link.ready] if self._take else ():
            assert self._take is not None
            self._take(Dialled(link, self._member(self._late.pop(link))))

    def close(self) -> None:
        """Let nobody else in: the job is over. Those that ask wait for the next one."""
        with self._changed:
            self._take = None
            self._over = True

    def stop_listening(self) -> None:
        """Free the port, for torch's store: static's nodes meet at MASTER_PORT."""
        self._server.stop_listening()

    def tell(self, lines: list[str], code: int) -> None:
        """Tell the nodes how the job ended."""
        self._server.tell([link for link, _ in self._nodes], JobEnded(code, lines))

    def leave(self) -> None:
        """Wait until the nodes, which have been told, have hung up."""
        self._server.stop_listening()
        for link, _ in self._nodes:
            link.close()
        self._server.close()
        self._messages.close()


# What a node hears that comes when the job has all its nodes.
FULL = "all {} nodes of the job have joined already"


def _in_order(
    nodes: list[tuple[JoinedLink, NodeOffer]], most: int, *, exact: bool = False
) -> list[tuple[JoinedLink, NodeOffer]]:
    """By rank: if `exact`, those that say one, have it; others follow as before, by what they say, or by arrival.

    Then come the spares.
    """
    nodes, spares = nodes[: most - 1], nodes[most - 1 :]
    place = {peer.key: number for number, peer in enumerate(before.peers)} if (before := roster_of(nodes)) else {}
    fixed = {one[1].node_rank: one for one in nodes if exact and one[1].node_rank is not None}
    free = [one for one in nodes if not exact or one[1].node_rank is None]

    def key(one: tuple[JoinedLink, NodeOffer]) -> tuple[int, bool, int]:
        order = one[1].order if one[1].node_rank is None else one[1].node_rank
        return place.get(one[1].key, len(place)), order is None, order or 0

    free.sort(key=key)
    return [fixed[rank] if rank in fixed else free.pop(0) for rank in range(1, len(nodes) + 1)] + spares


def roster_of(nodes: Sequence[tuple[JoinedLink, NodeOffer]]) -> Roster | None:
    """The last one of the head that these nodes have lost, if they come from one."""
    return max((offer.rosters[-1] for _, offer in nodes if offer.rosters), key=lambda one: one.age, default=None)


def _all_back(nodes: Sequence[tuple[JoinedLink, NodeOffer]]) -> bool:
    """Whether all nodes are here that have lost their head."""
    before = roster_of(nodes)
    if before is None:
        return False
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
            return bool(_own(resolve(meeting.host, meeting.port)))
        except OSError as error:
            waiting = f"waiting for the head of the job at {meeting.place}: {no_address(meeting.host, error)}"
        now = time.monotonic()
        if now >= start + meeting.join_seconds:
            raise NodeError(f"{waiting}; gave up after {meeting.join_seconds:g} s")
        if reminders.due(now):
            say(waiting)
        time.sleep(RESOLVE_SECONDS)


def _own(addresses: list[str]) -> list[str]:
    """Those that this machine has."""
    here = own_addresses()
    return [one for one in addresses if linux.is_loopback(one) or ipaddress.ip_address(one) in here]


def _listen_at(meeting: Meeting) -> str:
    """The address to listen at: that of the host, or all if others know this machine by another one. Raises OSError.

    Debian's /etc/hosts has 127.0.1.1 for the machine's own name; and `is_host` may stand for a forwarded address.
    """
    host, addresses = meeting.host, resolve(meeting.host, 0)
    own = _own(addresses)
    outward = [address for address in own if not linux.is_loopback(address)]
    if outward:
        return outward[0]
    if not own and meeting.static:
        return addresses[0]  # can't be listened at, which the user should know
    is_name = host not in LOCALHOST and host not in own
    return "0.0.0.0" if is_name or not own else own[0]


def order_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """This node's place according to the scheduler that started it."""
    given = environ.get("SLURM_NODEID", "")
    return int(given) if given.isdecimal() else None
