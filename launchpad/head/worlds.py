"""The MPI worlds of one attempt, as the head keeps them: barriers over several nodes, keys, published names. Pure."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from launchpad.commands import BarrierOut, Command, MpiReply, World
from launchpad.events import BarrierIn, MpiRequest, RankExited, RankFailed
from launchpad.failures import NO_INIT
from launchpad.job.mpi import Seat, process_mapping, spawned_programs
from launchpad.job.mpi import environ as mpi_environ
from launchpad.job.plan import Plan


class _Meeting:
    """One world's barriers and keys. Where two nodes have put the same key, the later one counts."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        """`nodes` by their places, and how many ranks each has, in the order of the MPI ranks."""
        self._node_of = [node for node, size in zip(nodes, sizes, strict=True) for _ in range(size)]
        self._awaited: dict[str, set[int]] = {}  # nodes that are not yet there, by barrier
        self._puts: list[tuple[int, dict[str, str]]] = []  # by whom, in order
        self._told = dict.fromkeys(nodes, 0)  # how many of these
        self._silent = set(nodes)  # those that have been at no barrier

    def enter(self, node: int, event: BarrierIn) -> list[tuple[int, Command]]:
        if event.keys:
            self._puts.append((node, event.keys))
        self._silent.discard(node)
        expected = {self._node_of[rank] for rank in event.members} if event.members else set(self._told)
        awaited = self._awaited.setdefault(event.group, set(expected))
        awaited.discard(node)
        if awaited:
            return []
        del self._awaited[event.group]
        return [(to, BarrierOut(event.world, event.group, self._news(to))) for to in sorted(expected)]

    def _news(self, node: int) -> dict[str, str]:
        start, self._told[node] = self._told[node], len(self._puts)
        return {key: value for by, keys in self._puts[start:] if by != node for key, value in keys.items()}

    def waits_for(self, node: int) -> bool:
        """Whether others wait for it in its first barrier, that of MPI_Init."""
        return node in self._silent and any(node in awaited for awaited in self._awaited.values())

    def has(self, event: BarrierIn, node: int) -> bool:
        """Whether the node may say this."""
        return node in self._told and all(0 <= rank < len(self._node_of) for rank in event.members)


class Worlds:
    """The job's own world and its names."""

    def __init__(self, plan: Plan, name: str) -> None:
        """`name`: no other job, and no other attempt of this one, has it."""
        self._plan = plan
        self._name = name
        self._meetings = [_Meeting(range(len(plan.nodes)), [len(node.ranks) for node in plan.nodes])]
        self._alive = [{rank.rank for rank in node.ranks} for node in plan.nodes]
        self._next_rank = len(plan.ranks)
        self._published: dict[str, str] = {}

    def begin(self, place: int) -> World:
        """What the node at this place must know before its ranks are started."""
        node = self._plan.nodes[place]
        return World(
            number=0,
            name=self._name,
            size=len(self._plan.ranks),
            first=node.ranks[0].rank,
            ranks=[rank.rank for rank in node.ranks],
            programs=[0] * len(node.ranks),
            mapping=process_mapping([len(node.ranks) for node in self._plan.nodes]),
            keys={},
            interface=node.interface,
        )

    def makes_sense(self, node: int, event: BarrierIn) -> bool:
        """Whether that node may say this."""
        return 0 <= event.world < len(self._meetings) and self._meetings[event.world].has(event, node)

    def on(self, node: int, event: Any) -> list[tuple[int, Command]]:
        """What to send to whom because a node has said this."""
        match event:
            case BarrierIn():
                return self._meetings[event.world].enter(node, event)
            case MpiRequest(_, rank, lines):
                return [(node, MpiReply(rank, self._name_service(lines[0])))]
        return []

    def left(self, node: int, event: RankExited) -> None:
        """A rank has ended."""
        self._alive[node].discard(event.rank)

    def absent(self) -> RankFailed | None:
        """The first rank of a node all of whose ranks are gone, and have left the others waiting in MPI_Init.

        Where some ranks of a node are in it, their agent knows.
        """
        for node, alive in enumerate(self._alive):
            if not alive and self._meetings[0].waits_for(node):
                return RankFailed(time.monotonic_ns(), self._plan.nodes[node].ranks[0].rank, 1, NO_INIT)
        return None

    def spawn(self, request: MpiRequest, attempt: int) -> tuple[World, list[dict[str, Any]]]:
        """The world that a rank asks for, on the first node, and its ranks. ValueError where it makes no sense."""
        programs = spawned_programs(request.lines)
        size = sum(program.nproc for program in programs)
        node = self._plan.nodes[0]
        number, first = len(self._meetings), self._next_rank
        entries: list[dict[str, Any]] = []
        for which, program in enumerate(programs):
            for _ in range(program.nproc):
                place = len(entries)
                seat = Seat(place, size, place, size, node.ranks[0].environ.get("PMI_HOSTNAME", ""))
                own = {"RANK": place, "ROLE_RANK": place, "LOCAL_RANK": place, "TORCHELASTIC_RESTART_COUNT": attempt}
                own |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE"), size)
                environ = {**node.ranks[0].environ, **{name: str(value) for name, value in own.items()}}
                environ |= {**mpi_environ(seat), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "PMI_SPAWNED": "1"}
                cwd = os.path.join(node.cwd, program.cwd)
                entry = {"rank": first + place, "argv": program.argv, "environ": environ, "cwd": cwd, "program": which}
                entry["python"] = program.python
                entries.append(entry)
        self._next_rank += size
        self._meetings.append(_Meeting([0], [size]))
        world = World(
            number=number,
            name=f"{self._name}-{number}",
            size=size,
            first=0,
            ranks=[entry["rank"] for entry in entries],
            programs=[entry["program"] for entry in entries],
            mapping=process_mapping([size]),
            keys=programs[0].keys,
            interface=node.interface,
        )
        return world, entries

    def _name_service(self, line: str) -> str:
        """publish_name, lookup_name, unpublish_name; answered as Hydra does (mpiexec/pmiserv_publish.c)."""
        said = dict(word.partition("=")[::2] for word in line.split(" "))
        verb = said["cmd"].removesuffix("_name")
        service = said.get("service", "")
        failed = f"cmd={verb}_result rc=1 msg="
        if verb == "publish":
            if service in self._published:
                return failed + "key_already_present"
            self._published[service] = said.get("port", "")
        elif service not in self._published:
            return failed + "service_not_found"
        elif verb == "lookup":
            return f"cmd=lookup_result rc=0 port={self._published[service]}"
        else:
            del self._published[service]
        return f"cmd={verb}_result rc=0"
