"""Leads debugger clients on this machine to ranks anywhere, over the nodes' links."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from launchpad.errors import UsageError
from launchpad.head.hub import Hub
from launchpad.head.part import InvalidMessage, Part
from launchpad.job.outcome import ranks_in_words
from launchpad.protocol.commands import Debug, TunnelCredit, TunnelData, TunnelOpen
from launchpad.protocol.events import DebuggerListening, DebuggerReady, DebugRequested, TunnelRead, TunnelWritten
from launchpad.protocol.message import Message

if TYPE_CHECKING:
    from launchpad.head.debug_clients import DebugClient, DebugListener


class ClientCame(Message):
    """A debugger client has connected, to be led to this rank."""

    rank: int
    socket: Any


class ClientRead(Message):
    """Bytes from a client; none: it has hung up."""

    number: int
    data: bytes


class ClientWritten(Message):
    """So many bytes were written to a client, or dropped because it is gone."""

    number: int
    size: int


class RankDebuggers(Part):
    """Who has asked for which rank's debugger, the listening ports, and the connections."""

    takes = (
        *(DebugRequested, DebuggerReady, TunnelRead, TunnelWritten),
        *(ClientCame, ClientRead, ClientWritten),
    )

    def __init__(self, hub: Hub, port: int) -> None:
        """`port`: for the rank that waits for a client before it begins; 0 for any free one."""
        self._hub = hub
        self._port = port
        self._askers: dict[int, list[tuple[int, int]]] = {}  # by rank: who, and the port that each wants
        self._begins: set[int] = set()  # ranks that wait for a client before they begin
        self._ready: set[int] = set()  # ranks whose debuggers listen
        self._listeners: dict[int, DebugListener] = {}  # by rank
        self._clients: dict[int, DebugClient] = {}
        self._last = 0

    def start(self) -> None:
        """One rank may have to wait for a client. Raises UsageError if none could reach it."""
        rank = self._hub.plan.debug_rank
        if rank >= 0:
            self._listen(rank, self._port if rank not in self._listeners else 0)
        if rank in self._hub.node_of:  # else the job goes on with fewer ranks
            self._begins.add(rank)
            self._hub.clock.note_wait(("begin", rank), begins=True)

    def on(self, source: int, message: Any) -> None:
        """Take a request, and what agents and our own threads report."""
        match message:
            case DebugRequested(asker=asker, rank=rank, port=port):
                self._ask(asker, rank, port)
            case DebuggerReady(rank=rank, problem=problem):
                self._is_ready(rank, problem)
            case ClientCame(rank=rank):
                self._came(message)
            case ClientRead(number=number) | ClientWritten(number=number) if number in self._clients:
                self._from_client(message)
            case TunnelRead(number=number) | TunnelWritten(number=number) if number in self._clients:
                if self._hub.node_of.get(self._clients[number].rank) != source:
                    raise InvalidMessage
                self._from_rank(message)

    def _ask(self, asker: int, rank: int, port: int) -> None:
        """Someone wants to debug a rank."""
        running = self._hub.running
        if rank not in running:
            there = ranks_in_words(sorted(running)) if running else "none"
            self._answer(rank, asker, port, f"rank {rank} is not running; running now: {there}")
        elif rank in self._ready:
            self._answer(rank, asker, port, "")
        else:
            self._askers.setdefault(rank, []).append((asker, port))
            if rank not in self._begins:
                self._hub.send(rank, Debug(rank))

    def _is_ready(self, rank: int, problem: str) -> None:
        """A rank's debugger listens, or can't."""
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
                number = self._listen(rank, port)
            except UsageError as error:
                problem = str(error)
        waits, folder = rank in self._begins, "" if problem else self._folder_of(rank)
        self._hub.tell(DebuggerListening(time.monotonic_ns(), rank, asker, number, folder, waits, problem))

    def _folder_of(self, rank: int) -> str:
        """Its working folder, if it is on another machine."""
        node = self._hub.node_of[rank]
        return self._hub.plan.nodes[node].cwd if self._hub.nodes[node].link.remote else ""

    def _listen(self, rank: int, port: int) -> int:
        """The port at which the rank's debugger can be reached; `port`: 0 for any free one. Raises UsageError."""
        from launchpad.head.debug_clients import DebugListener

        if rank not in self._listeners:
            self._listeners[rank] = DebugListener(rank, port, lambda client: self._hub.post(ClientCame(rank, client)))
        before = self._listeners[rank].port
        if port not in (0, before):
            raise UsageError(f"the debugger of rank {rank} is at port {before} already; use that one")
        return before

    def _came(self, event: ClientCame) -> None:
        from launchpad.head.debug_clients import DebugClient

        self._last += 1
        number, post = self._last, self._hub.post
        self._clients[number] = DebugClient(
            number,
            event.rank,
            event.socket,
            lambda data: post(ClientRead(number, data)),
            lambda size: post(ClientWritten(number, size)),
        )
        self._hub.clock.note_wait(("client", number), begins=True)
        self._hub.clock.note_wait(("begin", event.rank), begins=False)
        self._begins.discard(event.rank)
        self._hub.send(event.rank, TunnelOpen(number, event.rank))

    def _from_client(self, event: ClientRead | ClientWritten) -> None:
        rank = self._clients[event.number].rank
        match event:
            case ClientRead(number=number, data=data):
                self._hub.send(rank, TunnelData(number, data))
                if not data:
                    self._end(number)
            case ClientWritten(number=number, size=size):
                self._hub.send(rank, TunnelCredit(number, size))

    def _from_rank(self, event: TunnelRead | TunnelWritten) -> None:
        client = self._clients[event.number]
        match event:
            case TunnelRead(number=number, data=data):
                client.write(data)
                if not data:
                    self._hub.send(client.rank, TunnelData(number, b""))
                    self._end(number)
            case TunnelWritten(size=size):
                client.credit(size)

    def _end(self, number: int) -> None:
        self._clients.pop(number).close()
        self._hub.clock.note_wait(("client", number), begins=False)

    def lose(self, ranks: Collection[int], why: str) -> None:  # noqa: ARG002
        """Hang up on the clients of these."""
        for number in [number for number, client in self._clients.items() if client.rank in ranks]:
            self._end(number)
        for rank in ranks:
            for asker, port in self._askers.pop(rank, ()):
                self._answer(rank, asker, port, f"rank {rank} is gone")
            self._ready.discard(rank)
            self._begins.discard(rank)
            self._hub.clock.note_wait(("begin", rank), begins=False)

    def close(self) -> None:
        """Listen no more, and hang up."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for number in list(self._clients):
            self._end(number)
