"""Parts in front of the features that are none themselves yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launchpad.head.hub import Hub
from launchpad.head.machine import TakeStacks
from launchpad.head.part import Part
from launchpad.head.stack_requests import StackRequests
from launchpad.protocol.events import (
    Listening,
    Output,
    RankExited,
    RankStarted,
    Reached,
    StackDump,
    StacksRequested,
    StopRequested,
)

if TYPE_CHECKING:
    pass


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
