"""Leads debugger clients on this machine to ranks anywhere: listens on the loopback address, and uses the nodes' links.

A client is let in only if its end of the connection belongs to the user whom we run as, or to root. Per connection, two
threads read from it and write to it; the loop passes on what they report.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

from launchpad import linux
from launchpad.errors import UsageError
from launchpad.job.outcome import ranks_in_words
from launchpad.protocol.commands import Command, Debug, TunnelCredit, TunnelData, TunnelOpen
from launchpad.protocol.events import DebuggerListening, DebuggerReady, DebugRequested, TunnelRead, TunnelWritten

ADDRESS = "127.0.0.1"

# The most bytes of a connection that are on the way to the node, and the most in one frame.
WINDOW_BYTES = 256 << 10
PIECE_BYTES = 64 << 10


class ClientCame(NamedTuple):
    """A debugger client has connected, to be led to this rank."""

    rank: int
    socket: socket.socket


class ClientRead(NamedTuple):
    """Bytes from a client; none: it has hung up."""

    number: int
    data: bytes


class ClientWritten(NamedTuple):
    """So many bytes were written to a client, or dropped because it is gone."""

    number: int
    size: int


class RankDebuggers:
    """Who has asked for which rank's debugger, the listening ports, and the connections. Used by the loop alone."""

    def __init__(
        self,
        post: Callable[[Any], None],
        send: Callable[[int, Command], None],
        attend: Callable[[Hashable, bool], None],
        folder_of: Callable[[int], str],
        tell: Callable[[DebuggerListening], None],
    ) -> None:
        """`post` reports to the loop; `send(rank, command)` sends to the rank's node.

        `attend(wait, begins)`: something waits for a person, so that the job's time limits are paused, or no more.
        `folder_of` a rank on another machine, else "". `tell` answers who asked, or shows where a debugger listens.
        """
        self._post = post
        self._send = send
        self._attend = attend
        self._folder_of = folder_of
        self._tell = tell
        self._askers: dict[int, list[tuple[int, int]]] = {}  # by rank: who, and the port that each wants
        self._begins: set[int] = set()  # ranks that wait for a client before they begin
        self._ready: set[int] = set()  # ranks whose debuggers listen
        self._listeners: dict[int, socket.socket] = {}  # by rank
        self._clients: dict[int, _Client] = {}
        self._last = 0

    def begin(self, rank: int) -> None:
        """This rank is being started, and waits for a client."""
        self._begins.add(rank)
        self._attend(("begin", rank), True)

    def ask(self, event: DebugRequested, running: Collection[int]) -> None:
        """Someone wants to debug a rank."""
        _, asker, rank, port = event
        if rank not in running:
            there = ranks_in_words(sorted(running)) if running else "none"
            self._answer(rank, asker, port, f"rank {rank} is not running; running now: {there}")
        elif rank in self._ready:
            self._answer(rank, asker, port, "")
        else:
            self._askers.setdefault(rank, []).append((asker, port))
            if rank not in self._begins:
                self._send(rank, Debug(rank))

    def ready(self, event: DebuggerReady) -> None:
        """A rank's debugger listens, or can't."""
        _, rank, problem = event
        if not problem:
            self._ready.add(rank)
            if rank in self._begins:
                self._answer(rank, 0, 0, "")
        for asker, port in self._askers.pop(rank, ()):
            self._answer(rank, asker, port, problem and f"rank {rank}: {problem}")

    def _answer(self, rank: int, asker: int, port: int, problem: str) -> None:
        number = 0
        if not problem:
            try:
                number = self.listen(rank, port)
            except UsageError as error:
                problem = str(error)
        waits, folder = rank in self._begins, "" if problem else self._folder_of(rank)
        self._tell(DebuggerListening(time.monotonic_ns(), rank, asker, number, folder, waits, problem))

    def listen(self, rank: int, port: int) -> int:
        """The port at which the rank's debugger can be reached; `port`: 0 for any free one. Raises UsageError."""
        if rank in self._listeners:
            before = int(self._listeners[rank].getsockname()[1])
            if port not in (0, before):
                raise UsageError(f"the debugger of rank {rank} is at port {before} already; use that one")
            return before
        try:
            listener = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise UsageError(
                f"port {port} can't be used for the debugger of rank {rank}: {os.strerror(error.errno or 0)}"
            ) from None
        self._listeners[rank] = listener
        threading.Thread(target=self._accept, args=(listener, rank), name="debugger", daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket, rank: int) -> None:
        while True:
            try:
                client, peer = listener.accept()
            except OSError:  # it was closed
                return
            with suppress(OSError):
                if linux.owner_of_peer(peer, client.getsockname()) in (os.getuid(), 0):
                    self._post(ClientCame(rank, client))
                    continue
            client.close()

    def take(self, event: Any) -> bool:
        """Handle what our threads report. Returns whether it is that."""
        match event:
            case ClientCame(rank, connection):
                self._last += 1
                self._clients[self._last] = _Client(self._last, rank, connection, self._post)
                self._attend(("client", self._last), True)
                self._attend(("begin", rank), False)
                self._begins.discard(rank)
                self._send(rank, TunnelOpen(self._last, rank))
            case ClientRead(number, data) if number in self._clients:
                self._send(self._clients[number].rank, TunnelData(number, data))
                if not data:
                    self._end(number)
            case ClientWritten(number, size) if number in self._clients:
                self._send(self._clients[number].rank, TunnelCredit(number, size))
            case ClientRead() | ClientWritten():  # of one that we have hung up on
                pass
            case _:
                return False
        return True

    def hear(self, event: TunnelRead | TunnelWritten) -> None:
        """Handle what a node reports."""
        client = self._clients.get(event.number)
        if client is None:
            return
        match event:
            case TunnelRead(_, number, data):
                client.write(data)
                if not data:
                    self._send(client.rank, TunnelData(number, b""))
                    self._end(number)
            case TunnelWritten(_, _, size):
                client.credit(size)

    def rank_of(self, number: int) -> int:
        """The rank that a connection leads to; -1 if there is no such connection."""
        return self._clients[number].rank if number in self._clients else -1

    def _end(self, number: int) -> None:
        self._clients.pop(number).close()
        self._attend(("client", number), False)

    def gone(self, ranks: Collection[int]) -> None:
        """These ranks are gone, or about to start again: hang up on their clients."""
        for number in [number for number, client in self._clients.items() if client.rank in ranks]:
            self._end(number)
        for rank in ranks:
            for asker, port in self._askers.pop(rank, ()):
                self._answer(rank, asker, port, f"rank {rank} is gone")
            self._ready.discard(rank)
            self._begins.discard(rank)
            self._attend(("begin", rank), False)

    def close(self) -> None:
        """Listen no more, and hang up."""
        for listener in self._listeners.values():
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
        self._listeners.clear()
        for number in list(self._clients):
            self._end(number)


class _Client:
    """One connection to a client."""

    def __init__(self, number: int, rank: int, connection: socket.socket, post: Callable[[Any], None]) -> None:
        self.rank = rank
        self._number = number
        self._socket = connection
        self._post = post
        self._room = WINDOW_BYTES
        self._more_room = threading.Condition()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"debugger-{number}", daemon=True).start()

    def _read(self) -> None:
        data = b"."
        while data:
            with self._more_room:
                while self._room <= 0:
                    self._more_room.wait()
                room = self._room
            try:
                data = self._socket.recv(min(room, PIECE_BYTES))
            except OSError:
                data = b""
            with self._more_room:
                self._room -= len(data)
            self._post(ClientRead(self._number, data))

    def _write(self) -> None:
        while data := self._outbox.get():
            with suppress(OSError):
                self._socket.sendall(data)
            self._post(ClientWritten(self._number, len(data)))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends the thread that reads
        with self._more_room:
            self._room = WINDOW_BYTES
            self._more_room.notify()

    def write(self, data: bytes) -> None:
        """Queue bytes for the client."""
        if data:
            self._outbox.put(data)

    def credit(self, size: int) -> None:
        """The node has written so many bytes."""
        with self._more_room:
            self._room += size
            self._more_room.notify()

    def close(self) -> None:
        """Hang up, once everything is written."""
        self._outbox.put(b"")
