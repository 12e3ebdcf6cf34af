"""Parts in front of the features that are none themselves yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from launchpad.head.hub import Hub
from launchpad.head.machine import TakeStacks
from launchpad.head.part import InvalidMessage, Part
from launchpad.head.stack_requests import StackRequests
from launchpad.protocol.events import (
    DebuggerReady,
    DebugRequested,
    Listening,
    Output,
    RankExited,
    RankStarted,
    Reached,
    StackDump,
    StacksRequested,
    StopRequested,
    TunnelRead,
    TunnelWritten,
)
from launchpad.protocol.message import Message

if TYPE_CHECKING:
    from launchpad.head.debuggers import RankDebuggers


class StacksPart(Part):
    """Requests for stacks."""

    takes = (StackDump, Listening, Reached, TakeStacks)
    sees = (RankStarted, Output, RankExited, StacksRequested, StopRequested)

    def __init__(self, hub: Hub, stall_timeout: float | None) -> None:
        self._hub = hub
        self._attended = False
        addresses = {node.index: node.address for node in hub.plan.nodes}
        self._stacks = StackRequests(hub.nodes, hub.post, stall_timeout, hub.clock.now(), addresses)

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return self._stacks.deadline

    def on(self, source: int, message: Any) -> None:
        """Pass it on."""
        match message:
            case TakeStacks(why=why):
                self._stacks.ask(why)
            case StopRequested(signum=signum):
                if signum == 3:
                    self._stacks.ask("asked")
            case Listening() | Reached():
                self._stacks.answers(source, message, self._hub.clock.now())
            case _:
                self._stacks.on(message, self._hub.clock.now())

    def tick(self, now: float) -> None:
        """Pass it on."""
        attended = self._hub.clock.attended
        if self._attended and not attended:
            self._stacks.look_afresh(now)
        self._attended = attended
        self._stacks.tick(now, self._hub.running, watching=self._hub.phase == "running" and not attended)


class ClientEvent(Message):
    """What a debugger's thread has posted."""

    event: Any


class DebuggersPart(Part):
    """Debuggers."""

    takes = (ClientEvent, DebugRequested, DebuggerReady, TunnelRead, TunnelWritten)

    def __init__(self, hub: Hub, port: int) -> None:
        self._hub = hub
        self._port = port
        self._debuggers: RankDebuggers | None = None
        self._listens = False

    def _made(self) -> RankDebuggers:
        if self._debuggers is None:
            from launchpad.head.debuggers import RankDebuggers

            hub = self._hub
            self._debuggers = RankDebuggers(
                lambda event: hub.post(ClientEvent(event)),
                hub.send,
                lambda wait, begins: hub.clock.attend(wait, begins=begins),
                lambda rank: hub.plan.nodes[hub.node_of[rank]].cwd if hub.nodes[hub.node_of[rank]].link.remote else "",
                hub.tell,
            )
        return self._debuggers

    def start(self) -> None:
        """A rank may wait for a client."""
        rank = self._hub.plan.debug_rank
        if rank >= 0 and not self._listens:
            self._listens = True
            self._made().listen(rank, self._port)
        if rank in self._hub.node_of:
            self._made().begin(rank)

    def on(self, source: int, message: Any) -> None:
        """Pass it on."""
        match message:
            case ClientEvent(event=event):
                self._made().take(event)
            case DebugRequested():
                self._made().ask(message, self._hub.running)
            case DebuggerReady():
                self._made().ready(message)
            case TunnelRead() | TunnelWritten():
                rank = self._made().rank_of(message.number)
                if rank >= 0 and self._hub.node_of.get(rank) != source:
                    raise InvalidMessage
                self._made().hear(message)

    def lose(self, ranks: Collection[int], why: str) -> None:  # noqa: ARG002
        """Pass it on."""
        if self._debuggers:
            self._debuggers.gone(list(ranks))

    def close(self) -> None:
        """Pass it on."""
        if self._debuggers:
            self._debuggers.close()
