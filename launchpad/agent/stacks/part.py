"""Stacks, as a part of the agent: the head asks where the ranks are."""

from __future__ import annotations

from collections.abc import Collection

from ...protocol.commands import DumpStacks
from ..part import AgentHub, AgentPart
from .dump import StackDumper


class NodeStacks(AgentPart):
    """The dumper, for all ranks that run."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._dumper = StackDumper(hub.poll, hub.outbox, hub.channel)

    @property
    def deadline(self) -> float | None:
        """When to look for answers."""
        return self._dumper.deadline

    def tick(self, now: float) -> None:
        """Look for answers."""
        self._dumper.tick(now)

    def on(self, command: DumpStacks) -> None:
        """Ask all ranks."""
        self._dumper.begin(command, self._hub.ranks.values())

    def end(self) -> Collection[int]:
        """There is nobody left to ask. The py-spys are ours."""
        self._dumper.end()
        return self._dumper.own
