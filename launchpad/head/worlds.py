"""The MPI worlds of one attempt, as the head keeps them: barriers over several nodes, keys, published names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.commands import BarrierOut, Command, MpiReply, World
from launchpad.events import BarrierIn, MpiRequest
from launchpad.job.mpi import process_mapping
from launchpad.job.plan import Plan


class _Meeting:
    """One world's barriers and keys. Where two nodes have put the same key, the later one counts."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        """`nodes` by their places, and how many ranks each has, in the order of the MPI ranks."""
        self._node_of = [node for node, size in zip(nodes, sizes, strict=True) for _ in range(size)]
        self._in: dict[str, set[int]] = {}  # nodes, by barrier
        self._puts: list[tuple[int, dict[str, str]]] = []  # by whom, in order
        self._told = dict.fromkeys(nodes, 0)  # how many of these

    def enter(self, node: int, event: BarrierIn) -> list[tuple[int, Command]]:
        if event.keys:
            self._puts.append((node, event.keys))
        entered = self._in.setdefault(event.group, set())
        entered.add(node)
        expected = {self._node_of[rank] for rank in event.members} if event.members else set(self._told)
        if not expected <= entered:
            return []
        del self._in[event.group]
        return [(to, BarrierOut(event.world, event.group, self._news(to))) for to in sorted(expected)]

    def _news(self, node: int) -> dict[str, str]:
        start, self._told[node] = self._told[node], len(self._puts)
        return {key: value for by, keys in self._puts[start:] if by != node for key, value in keys.items()}

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
            mapping=process_mapping([len(node.ranks) for node in self._plan.nodes]),
            keys={},
            interface=node.interface,
            python=self._plan.python,
        )

    def makes_sense(self, node: int, event: BarrierIn) -> bool:
        """Whether that node may say this."""
        return 0 <= event.world < len(self._meetings) and self._meetings[event.world].has(event, node)

    def on(self, node: int, event: Any) -> list[tuple[int, Command]]:
        """What to send to whom because a node has said this."""
        match event:
            case BarrierIn():
                return self._meetings[event.world].enter(node, event)
            case MpiRequest(_, rank, lines) if lines[:1] != ["mcmd=spawn"]:
                return [(node, MpiReply(rank, self._name_service(lines[0])))]
            case MpiRequest(_, rank):
                return [(node, MpiReply(rank, "cmd=spawn_result rc=1 msg=launchpad_does_not_spawn_MPI_processes"))]
        return []

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
