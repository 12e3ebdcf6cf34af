"""Torch's store for the ranks: holds the job's port, and has the store's process forked when a rank first asks.

Or the rank serves it, if there is no forkserver any more.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from ...protocol.commands import Start
from ...protocol.events import RankFailed
from ..net import port
from ..part import AgentHub
from . import forkserver_client

if TYPE_CHECKING:
    from .forkserver_client import Forkserver


class Store:
    """Owns the port, the socket at which ranks ask for the store, and the store's process."""

    def __init__(self, hub: AgentHub) -> None:
        self.pid = 0  # of its process
        self._hub = hub
        self._port: port.Port | None = None
        self._bell: port.Bell | None = None
        self._forkserver: Forkserver | None = None
        self._serves = False  # it is served, or will be
        self._served = False  # in the last attempt
        self._shared = False  # with other nodes
        self._first = -1  # the node's first rank

    def hold_port(self, wanted: int, address: str = port.ADDRESS) -> tuple[int, str]:
        """Hold this rendezvous port and release any other. Returns its number; or -1, and who has it if known."""
        if self._port is not None:
            self._port.close()
        self._port = port.Port(wanted, address)
        if self._port.number < 0:
            from ... import listeners

            return -1, listeners.holder(wanted)
        return self._port.number, ""

    def starting(self, start: Start) -> None:
        """Ranks are about to start."""
        for entry in start.ranks[:1]:
            self._first, self._shared = entry["rank"], entry["environ"]["GROUP_WORLD_SIZE"] != "1"

    def open_bell(self) -> None:
        """Open the socket, before there is a forkserver that can fork the process. Raises OSError."""
        if self._bell is None:
            self._bell = port.Bell(self._hub.folder)
            self._hub.poll.watch(self._bell.fileno(), lambda _: self._on_bell())

    def close_bell(self) -> None:
        """There will be no forkserver."""
        if self._bell is not None:
            self._hub.poll.unwatch(self._bell.fileno())
            self._bell.close()
            self._bell = None

    def serve_by(self, forkserver: Forkserver) -> None:
        """This one forks the process."""
        self._forkserver = forkserver

    def leave_to_rank(self) -> None:
        """The forkserver becomes the only rank, which serves the store itself."""
        self._forkserver = None

    @property
    def bell(self) -> str:
        """The path of the socket."""
        assert self._bell is not None
        return self._bell.path

    def serve_again(self) -> list[forkserver_client.ForkOrder]:
        """Its process, to be forked without waiting for a request, if there was one in the last attempt."""
        return self._serve() if self._served else []

    def _on_bell(self) -> None:
        """A rank requests the store."""
        assert self._bell is not None
        assert self._port is not None
        orders = self._serve()
        if self._forkserver is not None and orders:
            self._forkserver.order(orders)
        self._bell.answer(self._serves, self._port.fileno() if self._forkserver is None else -1)

    def _serve(self) -> list[forkserver_client.ForkOrder]:
        """The first time, listen on its port; returns its process, which is to be forked."""
        assert self._port is not None
        if self._serves or (self._forkserver is not None and self._forkserver.state != "ready"):
            return []
        self._serves = self._port.listen()
        if not self._serves:
            return []
        address = [self._port.address, self._port.number, os.getpid(), self._shared]
        return [forkserver_client.ForkOrder(forkserver_client.STORE, {"serve": address}, (self._port.fileno(),))]

    def forked(self, pid: int) -> None:
        """This is its process, unless that comes too late for its attempt."""
        if self._serves:
            self.pid = pid
        else:
            os.kill(pid, signal.SIGKILL)

    def failed(self, reason: str) -> None:
        """Nobody answers at the port any more: refuse who connects to it, and have the job end."""
        assert self._port is not None
        self._port.stop_listening()
        self._serves = False
        self._hub.outbox.say(RankFailed(time.monotonic_ns(), self._first, 1, reason))

    def exited(self) -> None:
        """Its process has ended."""
        self.pid = 0
        if self._serves:
            self.failed("lost torch's store: its process died")

    def end(self) -> None:
        """All ranks are gone: kill its process, if there is one."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0
        self._served = self._serves
        if self._serves and self._port is not None:
            self._port.stop_listening()
            self._serves = False
