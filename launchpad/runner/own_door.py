"""The door of a launcher that has joined: others wait at it while the job has no head, and this one may lead then."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from launchpad.job.offer import NodeOffer
from launchpad.job.succession import Age, Lead, Peer, Rosters
from launchpad.named import NamedTuple
from launchpad.runner.own_agent import OwnAgent
from launchpad.runner.this_machine import own
from launchpad.transport.join.client import resolve
from launchpad.transport.join.server import Gate, JoinedLink, JoinServer, listen

Guest = tuple[JoinedLink, NodeOffer]


class HeadPlace(NamedTuple):
    """From where a term of the job is led."""

    host: str
    port: int
    term: int


class Following(NamedTuple):
    """This launcher, which has led the job or was about to, follows another head, or looks for one."""

    server: JoinServer  # our door's
    own: Peer
    rosters: Rosters
    head: HeadPlace | None  # None: nobody knows
    failed: str = ""  # why it couldn't lead


class OwnDoor:
    """Says where the job is led from; when it is led from nowhere, lets others wait."""

    def __init__(self, secret: bytes, key: str, named: Sequence[tuple[str, int]] = ()) -> None:
        """`key`: the launcher's own on the rosters. `named`: where others look for the job, perhaps on this machine."""
        self._secret = secret
        self.peer = Peer(key, socket.gethostname())  # this launcher, at this door
        self.changed: Callable[[HeadPlace | None], None] = lambda _: None  # in threads: see `joined`, `told`
        self._named = named
        self._listener: socket.socket | None = None
        self._server: JoinServer | None = None
        self._begins = threading.Thread(target=self._serve, name="door", daemon=True)
        self._guests: dict[JoinedLink, NodeOffer] = {}
        self._state: dict[str, Any] = {}
        self._taken = False  # another gate judges, and closes the server

    # In the launcher's own thread.

    def open(self, towards: str) -> None:
        """Listen at the address from which this machine reaches that one. Where that can't be, there is no door."""
        if self.peer.port:
            return
        for host, port in self._named:
            if self._listen(host, port):
                self.begin()  # they may look here before anybody leads
                return
        family = socket.AF_INET6 if ":" in towards else socket.AF_INET
        with contextlib.suppress(OSError):
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect((towards, 9))  # chooses the route, and sends nothing
                address = str(trial.getsockname()[0])
            self._open(address, 0)

    def _listen(self, host: str, port: int) -> bool:
        """Listen there, if that is a place on this machine."""
        with contextlib.suppress(OSError):
            for address in own(resolve(host, port)):
                self._open(address, port)
                return True
        return False

    def _open(self, address: str, port: int) -> None:
        self._listener = listen((address, port))
        self.peer = self.peer._replace(host=address, port=self._listener.getsockname()[1])

    def begin(self) -> None:
        """Serve who comes. The certificate is made in a thread: the ranks need not wait for it."""
        if self._listener is not None and self._begins.ident is None:
            self._begins.start()

    def _serve(self) -> None:
        assert self._listener is not None
        self._server = JoinServer(self._listener, self._secret, self)

    def take(self, server: JoinServer, own: Peer) -> None:
        """Judge at this door, which is open already, from now on."""
        self.peer, self._server, self._taken = own, server, False
        server.replace(self)

    def led_from(self, head: HeadPlace) -> None:
        """The job is led from there."""
        self._state = {"led": [head.host, head.port], "term": head.term}

    def follow(self) -> None:
        """There is a head, and it will soon be known where. Those that wait here have to look for it."""
        self._state = {}
        guests, self._guests = self._guests, {}
        for link in guests:
            link.abandon()

    def seek(self, age: Age) -> None:
        """The job has no head; this is the age of the newest roster here."""
        self._state = {"seeks": list(age)}

    def waiting(self) -> dict[str, Rosters]:
        """Who waits, by their keys, with the rosters that they hold."""
        here = [offer for link, offer in list(self._guests.items()) if not link.gone.is_set()]
        return {offer.key: offer.rosters for offer in here}

    def hand_over(self, gate: Gate, keys: Collection[str]) -> tuple[JoinServer, list[Guest]]:
        """Let another gate judge, which gets those of the waiting that have these keys. Others have to ask again."""
        if self._begins.ident is not None:
            self._begins.join()
        assert self._server is not None
        self._server.replace(gate)
        self._taken = True
        guests, self._guests = self._guests, {}
        chosen = {offer.key: (link, offer) for link, offer in guests.items() if offer.key in keys}
        for link in guests.keys() - {link for link, _ in chosen.values()}:
            link.abandon()
        return self._server, list(chosen.values())

    def close(self) -> None:
        """Let nobody else in. Those that wait have to look elsewhere."""
        if self._taken:
            return
        if self._begins.ident is not None:
            self._begins.join()
        if self._server is None:
            if self._listener is not None:
                self._listener.close()
            return
        self._server.stop_listening()
        for link in self._guests:
            link.abandon()
        self._server.close()

    # In the server's thread.

    def state(self) -> dict[str, Any]:
        """Whether there is a head."""
        return self._state

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> dict[str, Any]:
        """Let it wait if there is none."""
        offer = NodeOffer.from_json(offered)
        if "seeks" not in self._state:
            return self._state or {"later": True}
        self._guests[link] = offer
        return {"wait": True}

    def joined(self, link: JoinedLink) -> None:  # noqa: ARG002
        """It knows that it may wait."""
        self.changed(None)

    def told(self, place: tuple[str, int], term: int) -> None:
        """Somebody leads the job: that may be what we are looking for."""
        self.changed(HeadPlace(*place, term))

    def refused(self, address: str, reason: str) -> None:
        """Nobody is told of strangers here: the head's user is told of those that matter."""


class Takeover(NamedTuple):
    """This launcher is to lead the job."""

    door: OwnDoor
    lead: Lead
    agent: OwnAgent | None  # of this machine; None: a new one is to be opened
    lost: float  # when the head was, in seconds since 1970
