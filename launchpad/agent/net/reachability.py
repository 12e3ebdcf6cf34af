"""Finds out which of a node's addresses the others can reach: the node listens, and the others try all at once.

Each side proves itself with a secret from the head: several machines may have an address like 172.17.0.1, so whatever
answers there need not be the right node.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from functools import partial

from ... import linux
from ...protocol.commands import Listen, Reach, Start
from ...protocol.events import Listening, Reached
from ..host.probe import addresses
from ..part import AgentHub, AgentPart
from ..poll import earliest
from .strangers import Strangers

_BACKLOG = 4096

# How long to listen: the head has given up long before.
LISTEN_SECONDS = 30.0


class Reachability(AgentPart):
    """One node's role in the check. Nothing here blocks."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._sockets: dict[int, socket.socket] = {}
        self._strangers: Strangers[socket.socket] = Strangers()
        self._until: float | None = None  # when to stop listening

    @property
    def deadline(self) -> float | None:
        """When a stranger has had its time, or the check is over."""
        return earliest((self._strangers.deadline, self._until))

    def tick(self, now: float) -> None:
        """Hang up on those who have said nothing."""
        for peer in self._strangers.late(now):
            self._close(peer)
        if self._until is not None and now >= self._until:
            self.close()

    def on(self, command: Listen | Reach) -> None:
        """Listen, or try to reach those who do."""
        if isinstance(command, Listen):
            self._listen(command)
        else:
            self._reach(command)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """The check is over."""
        self.close()

    def _listen(self, command: Listen) -> None:
        """Listen on each address, and report the ports."""
        ports = []
        self._until = time.monotonic() + LISTEN_SECONDS
        for address in command.addresses:
            try:
                listener = socket.socket(linux.address_family(address), socket.SOCK_STREAM)
                listener.bind((address, 0))
                listener.listen(_BACKLOG)
            except OSError:
                ports.append(-1)
                continue
            ports.append(listener.getsockname()[1])
            self._watch(listener, partial(self._accept, listener, command), select.EPOLLIN)
        self._hub.outbox.say(Listening(time.monotonic_ns(), ports))

    def _accept(self, listener: socket.socket, command: Listen, _: int) -> None:
        try:
            peer, place = listener.accept()
        except OSError as error:  # it has hung up already, or there is no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._hang_up_on(self._strangers.oldest() or listener)
            return
        self._watch(peer, partial(self._reply, peer, command), select.EPOLLIN)
        self._hang_up_on(self._strangers.add(peer, place[0], time.monotonic()))

    def _hang_up_on(self, one: socket.socket | None) -> None:
        if one is not None:
            self._close(one)

    def _reply(self, peer: socket.socket, command: Listen, _: int) -> None:
        self._strangers.forget(peer)
        try:
            if peer.recv(len(command.ask)) == command.ask.encode():
                peer.send(command.answer.encode())
        except OSError:
            pass
        self._close(peer)

    def _reach(self, command: Reach) -> None:
        """Connect to all of these, and report each that gives the right answer."""
        for address, port in command.places:
            try:
                peer = socket.socket(linux.address_family(address), socket.SOCK_STREAM)
                peer.setblocking(False)
                peer.connect_ex((address, port))
            except OSError:
                continue
            self._watch(peer, partial(self._connected, peer, address, command), select.EPOLLOUT)

    def _connected(self, peer: socket.socket, address: str, command: Reach, _: int) -> None:
        try:
            peer.send(command.ask.encode())
        except OSError:
            self._close(peer)
            return
        self._hub.poll.unwatch(peer.fileno())
        self._watch(peer, partial(self._answered, peer, address, command), select.EPOLLIN)

    def _answered(self, peer: socket.socket, address: str, command: Reach, _: int) -> None:
        try:
            right = peer.recv(len(command.answer)) == command.answer.encode()
            own = peer.getsockname()[0]
        except OSError:
            right = False
        if right:
            interface = next((name for one, name in addresses() if one == own), "lo" if own.startswith("127.") else "")
            self._hub.outbox.say(Reached(time.monotonic_ns(), address, interface))
        self._close(peer)

    def close(self) -> None:
        """Stop listening, and give up pending attempts."""
        self._until, self._strangers = None, Strangers()
        for one in list(self._sockets.values()):
            self._close(one)

    def _watch(self, one: socket.socket, handler: partial[None], events: int) -> None:
        one.setblocking(False)
        os.set_inheritable(one.fileno(), False)
        self._sockets[one.fileno()] = one
        self._hub.poll.watch(one.fileno(), handler, events)

    def _close(self, one: socket.socket) -> None:
        self._hub.poll.unwatch(one.fileno())
        del self._sockets[one.fileno()]
        one.close()
