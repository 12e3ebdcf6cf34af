"""Finds out which of a node's addresses the others reach: one node listens, the others try all of them at once.

Both sides say a secret that the head gave them: an address like 172.17.0.1 may be had by several machines, and what
answers there need not be the node that is meant.
"""

from __future__ import annotations

import os
import select
import socket
import time
from functools import partial

from ..commands import Listen, Reach
from ..events import Listening, Reached
from .outbox import Outbox
from .poll import Poll
from .survey import addresses

_BACKLOG = 4096


class Meeting:
    """One node's part. Nothing here blocks."""

    def __init__(self, poll: Poll, outbox: Outbox) -> None:
        self._poll = poll
        self._outbox = outbox
        self._sockets: dict[int, socket.socket] = {}

    def listen(self, asked: Listen) -> None:
        """Listen on each address, at a port of its own, and say which."""
        ports = []
        for address in asked.addresses:
            try:
                listener = socket.socket(family(address), socket.SOCK_STREAM)
                listener.bind((address, 0))
                listener.listen(_BACKLOG)
            except OSError:
                ports.append(-1)
                continue
            ports.append(listener.getsockname()[1])
            self._watch(listener, partial(self._accept, listener, asked), select.EPOLLIN)
        self._outbox.say(Listening(time.monotonic_ns(), ports))

    def _accept(self, listener: socket.socket, asked: Listen, _: int) -> None:
        try:
            caller, _address = listener.accept()
        except OSError:  # it has thought better of it
            return
        self._watch(caller, partial(self._hear, caller, asked), select.EPOLLIN)

    def _hear(self, caller: socket.socket, asked: Listen, _: int) -> None:
        try:
            if caller.recv(len(asked.ask)) == asked.ask.encode():
                caller.send(asked.answer.encode())
        except OSError:
            pass
        self._drop(caller)

    def reach(self, asked: Reach) -> None:
        """Connect to all places, and tell of each that answers."""
        for address, port in asked.places:
            try:
                caller = socket.socket(family(address), socket.SOCK_STREAM)
                caller.setblocking(False)
                caller.connect_ex((address, port))
            except OSError:
                continue
            self._watch(caller, partial(self._ask, caller, address, asked), select.EPOLLOUT)

    def _ask(self, caller: socket.socket, address: str, asked: Reach, _: int) -> None:
        try:
            caller.send(asked.ask.encode())
        except OSError:
            self._drop(caller)
            return
        self._poll.unwatch(caller.fileno())
        self._watch(caller, partial(self._answered, caller, address, asked), select.EPOLLIN)

    def _answered(self, caller: socket.socket, address: str, asked: Reach, _: int) -> None:
        try:
            right = caller.recv(len(asked.answer)) == asked.answer.encode()
            own = caller.getsockname()[0]
        except OSError:
            right = False
        if right:
            interface = next((name for one, name in addresses() if one == own), "lo" if own.startswith("127.") else "")
            self._outbox.say(Reached(time.monotonic_ns(), address, interface))
        self._drop(caller)

    def close(self) -> None:
        """Give up what is still tried, and listen no more."""
        for held in list(self._sockets.values()):
            self._drop(held)

    def _watch(self, one: socket.socket, handler: partial[None], events: int) -> None:
        one.setblocking(False)
        os.set_inheritable(one.fileno(), False)
        self._sockets[one.fileno()] = one
        self._poll.watch(one.fileno(), handler, events)

    def _drop(self, one: socket.socket) -> None:
        self._poll.unwatch(one.fileno())
        del self._sockets[one.fileno()]
        one.close()


def family(address: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
