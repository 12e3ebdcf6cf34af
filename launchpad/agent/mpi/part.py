"""MPI, as a part of the agent: there is an MPI_COMM_WORLD for the ranks from the head's first MpiWorld on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from ...protocol.commands import BarrierOut, MpiReply, MpiWorld, PmixFetch, PmixReply, Start
from ...protocol.events import NoMpi
from ..part import AgentHub, AgentPart
from ..ranks.rank import Rank
from .node_worlds import NodeWorlds


class NodeMpi(AgentPart):
    """The worlds of this node's ranks."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._worlds = NodeWorlds(hub.poll, hub.outbox, hub.folder)

    def on(self, command: MpiWorld | BarrierOut | MpiReply | PmixReply | PmixFetch) -> None:
        """Hand it to the worlds. From the first one on, the starter has ranks join them."""
        if isinstance(command, MpiWorld):
            self._hub.mpi = self._worlds
        self._worlds.on(command)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Find out which MPI the ranks use, and begin to serve it."""
        if self._hub.mpi is not None:
            self._worlds.prepare(environ)
            if start.ranks:
                self._worlds.serve(environ, start.argv, start.cwd)

    def environ(self, rank: int) -> Mapping[str, str]:
        """Where the rank finds its world."""
        return self._worlds.environ(rank) if self._worlds.has(rank) else {}

    def exited(self, rank: Rank, code: int) -> None:
        """A rank that is still inside MPI has failed."""
        self._worlds.exited(rank.rank, code)

    def end(self) -> Collection[int]:
        """The PMIx server is ours."""
        return self._worlds.own

    def finish(self, leave: bool) -> None:
        """Say if no rank has used MPI, and remove what they left in shared memory."""
        if leave and self._hub.mpi is not None and self._worlds.is_unused:
            self._hub.outbox.say(NoMpi(time.monotonic_ns(), self._worlds.library, self._worlds.why_not))
        self._worlds.close()

    def close(self) -> None:
        """Remove what ranks left in shared memory."""
        self._worlds.close()
