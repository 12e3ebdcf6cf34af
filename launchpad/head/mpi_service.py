"""Serves the MPI libraries of the job's ranks: what they ask over PMI and PMIx, what they spawn, who is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.mpi_worlds import MpiWorlds
from launchpad.head.part import InvalidMessage, Part
from launchpad.job.masking import masked_words
from launchpad.job.plan import NodePlan
from launchpad.protocol.commands import MpiReply, MpiWorld, PmixReply, StartMore
from launchpad.protocol.events import (
    BarrierIn,
    MpiFound,
    MpiRequest,
    NoMpi,
    PmixFetched,
    PmixRequest,
    RankExited,
    RanksSpawned,
    WorldRestarted,
    WorldStopping,
)

_BAD_PARAM = -27  # PMIX_ERR_BAD_PARAM


class MpiService(Part):
    """The worlds of one attempt after the other; of each role its own."""

    takes = (BarrierIn, MpiRequest, PmixRequest, PmixFetched, MpiFound, NoMpi)
    sees = (RankExited, WorldStopping, WorldRestarted)

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._worlds: dict[int, MpiWorlds] = {}  # by node

    def start(self) -> None:
        """Tell the nodes of their ranks' world."""
        self._worlds.clear()
        for nodes in self._hub.plan.mpi_worlds.values():
            self._begin(nodes, self._hub.restarts)

    def _begin(self, nodes: Sequence[NodePlan], restarts: int) -> None:
        worlds = MpiWorlds(nodes, f"launchpad-{os.urandom(8).hex()}-{restarts}", restarts)
        for node in nodes:
            self._worlds[node.index] = worlds
            if node.index in self._hub.nodes.open:
                self._hub.nodes.send(node.index, worlds.begin(node.index))

    def state(self) -> dict[int, MpiWorlds]:
        """The nodes know of the worlds already."""
        return self._worlds

    def go_on(self, started: Collection[int], state: dict[int, MpiWorlds]) -> None:  # noqa: ARG002
        """Go on with them."""
        self._worlds = state

    def on(self, source: int, message: Any) -> None:
        """Take what a library says; hear of the exit of a rank, and of roles that start again."""
        match message:
            case RankExited(rank=rank):
                self._left(self._hub.node_of.get(rank, source), message)
            case WorldStopping(world=role):
                for node in self._hub.plan.mpi_worlds.get(role, ()):
                    self._worlds[node.index].stopping = True
            case WorldRestarted(world=role, restarts=restarts):
                if nodes := self._hub.plan.mpi_worlds.get(role):
                    self._begin(nodes, restarts)
            case _ if source not in self._worlds:
                raise InvalidMessage
            case NoMpi():
                if not self._hub.ends:
                    self._hub.happened(source, message._replace(node=source))
            case MpiFound():
                if failed := self._worlds[source].differs(source, message):
                    self._hub.happened(source, failed)
            case MpiRequest(rank=rank, lines=["mcmd=spawn", *_]):
                self._spawn(self._worlds[source], rank, message)
            case BarrierIn() | PmixRequest() if not self._worlds[source].makes_sense(source, message):
                raise InvalidMessage
            case PmixRequest(verb="spawn"):
                self._spawn(self._worlds[source], self._worlds[source].asker(message), message)
            case _:
                self._answer(self._worlds[source], source, message)

    def _left(self, node: int, event: RankExited) -> None:
        if worlds := self._worlds.get(node):
            worlds.left(node, event)
            self._look_for_absent(worlds)

    def _answer(self, worlds: MpiWorlds, source: int, message: Any) -> None:
        try:
            replies = worlds.on(source, message)
        except ValueError as error:
            raise InvalidMessage from error
        for node, command in replies:
            self._hub.nodes.send(node, command)
        self._look_for_absent(worlds)

    def _look_for_absent(self, worlds: MpiWorlds) -> None:
        failed = worlds.absent() if self._hub.phase == "running" else None
        if failed and failed.rank not in self._hub.dismissed:
            self._hub.happened(self._hub.node_of[failed.rank], failed)

    def _spawn(self, worlds: MpiWorlds, by: int, request: MpiRequest | PmixRequest) -> None:
        """A rank spawns others (MPI_Comm_spawn), which run on the first node of its world."""
        hub = self._hub
        if hub.phase != "running" or worlds.stopping or by in hub.dismissed:
            return  # nobody would stop what it spawned now
        try:
            world, entries = worlds.spawn(request, max(hub.node_of) + 1)
        except (ValueError, LookupError, TypeError) as error:
            self._answer_spawn(by, request, str(error), None)
            return
        first, *others = worlds.nodes
        hub.join(first, world.ranks)
        hub.tell(RanksSpawned(time.monotonic_ns(), by, first, world.ranks, masked_words(entries[0]["argv"])))
        if isinstance(request, PmixRequest):  # the PMIx servers of the other nodes must know the world too
            for other in others:
                hub.nodes.send(other, world._replace(ranks=[], first=0))
        hub.nodes.send(first, world)
        hub.nodes.send(first, StartMore(entries))
        self._answer_spawn(by, request, "", world)

    def _answer_spawn(self, by: int, request: MpiRequest | PmixRequest, problem: str, world: MpiWorld | None) -> None:
        if isinstance(request, PmixRequest):
            number = world.number if world else None
            self._hub.send(by, PmixReply(request.number, 0 if world else _BAD_PARAM, number))
        elif world:
            self._hub.send(by, MpiReply(by, f"cmd=spawn_result rc=0 errcodes={','.join('0' * world.size)}"))
        else:
            self._hub.send(by, MpiReply(by, f"cmd=spawn_result rc=1 msg={problem.replace(' ', '_')}"))
