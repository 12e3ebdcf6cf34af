"""Serves the MPI libraries of the job's ranks: what they ask over PMI and PMIx, what they spawn, who is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.mpi_worlds import MpiWorlds
from launchpad.head.part import InvalidMessage, Part
from launchpad.job.masking import masked_words
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
)

_BAD_PARAM = -27  # PMIX_ERR_BAD_PARAM


class MpiService(Part):
    """The worlds of one attempt after the other."""

    takes = (BarrierIn, MpiRequest, PmixRequest, PmixFetched, MpiFound, NoMpi)
    sees = (RankExited,)

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._worlds = self._of_attempt()

    def _of_attempt(self) -> MpiWorlds:
        return MpiWorlds(self._hub.plan, f"launchpad-{os.urandom(8).hex()}-{self._hub.attempt}")

    def start(self) -> None:
        """Tell the nodes of their ranks' world."""
        if self._hub.attempt:
            self._worlds = self._of_attempt()
        for node in self._hub.plan.taking_part:
            if node.index in self._hub.nodes.open:
                self._hub.nodes.send(node.index, self._worlds.begin(node.index))

    def state(self) -> MpiWorlds:
        """The nodes know of the worlds already."""
        return self._worlds

    def go_on(self, started: Collection[int], state: MpiWorlds) -> None:  # noqa: ARG002
        """Go on with them."""
        self._worlds = state

    def on(self, source: int, message: Any) -> None:
        """Take what a library says, and the exit of a rank."""
        match message:
            case RankExited():
                self._worlds.left(source, message)
                self._look_for_absent()
            case NoMpi():
                if not self._hub.ends:
                    self._hub.happened(source, message._replace(node=source))
            case MpiFound():
                if failed := self._worlds.differs(source, message):
                    self._hub.happened(source, failed)
            case MpiRequest(rank=rank, lines=["mcmd=spawn", *_]):
                self._spawn(rank, message)
            case BarrierIn() | PmixRequest() if not self._worlds.makes_sense(source, message):
                raise InvalidMessage
            case PmixRequest(verb="spawn"):
                self._spawn(self._worlds.asker(message), message)
            case _:
                self._answer(source, message)

    def _answer(self, source: int, message: Any) -> None:
        try:
            replies = self._worlds.on(source, message)
        except ValueError as error:
            raise InvalidMessage from error
        for node, command in replies:
            self._hub.nodes.send(node, command)
        self._look_for_absent()

    def _look_for_absent(self) -> None:
        failed = self._worlds.absent() if self._hub.phase == "running" else None
        if failed:
            self._hub.happened(self._hub.node_of[failed.rank], failed)

    def _spawn(self, by: int, request: MpiRequest | PmixRequest) -> None:
        """A rank spawns others (MPI_Comm_spawn), which run on the first node."""
        hub = self._hub
        if hub.phase != "running":
            return
        try:
            world, entries = self._worlds.spawn(request, hub.attempt)
        except (ValueError, LookupError, TypeError) as error:
            self._answer_spawn(by, request, str(error), None)
            return
        first, *others = hub.plan.taking_part
        hub.join(first.index, world.ranks)
        hub.tell(RanksSpawned(time.monotonic_ns(), by, first.index, world.ranks, masked_words(entries[0]["argv"])))
        if isinstance(request, PmixRequest):  # the PMIx servers of the other nodes must know the world too
            for other in others:
                hub.nodes.send(other.index, world._replace(ranks=[], first=0))
        hub.nodes.send(first.index, world)
        hub.nodes.send(first.index, StartMore(entries))
        self._answer_spawn(by, request, "", world)

    def _answer_spawn(self, by: int, request: MpiRequest | PmixRequest, problem: str, world: MpiWorld | None) -> None:
        if isinstance(request, PmixRequest):
            number = world.number if world else None
            self._hub.send(by, PmixReply(request.number, 0 if world else _BAD_PARAM, number))
        elif world:
            self._hub.send(by, MpiReply(by, f"cmd=spawn_result rc=0 errcodes={','.join('0' * world.size)}"))
        else:
            self._hub.send(by, MpiReply(by, f"cmd=spawn_result rc=1 msg={problem.replace(' ', '_')}"))
