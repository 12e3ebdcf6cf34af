"""The head's view of an MPI_COMM_WORLD and what is spawned from it: barriers across nodes, keys, names. Pure."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from launchpad.head.pmix import MOST_PUBLISHED, PmixExchange
from launchpad.job.mpi import MpiSeat, Spawned, check_spawn, process_mapping, python_argv, spawned_programs
from launchpad.job.mpi import environ as mpi_environ
from launchpad.job.plan import NodePlan
from launchpad.protocol.commands import BarrierOut, Command, MpiReply, MpiWorld
from launchpad.protocol.events import (
    NO_INIT,
    BarrierIn,
    MpiFound,
    MpiRequest,
    PmixFetched,
    PmixRequest,
    RankExited,
    RankFailed,
)


class _Barriers:
    """One world's barriers and keys. If two nodes put the same key, the later one wins."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        """`nodes`: the nodes' indices; `sizes`: how many ranks each has; both in the order of the MPI ranks."""
        self._node_of = [node for node, size in zip(nodes, sizes, strict=True) for _ in range(size)]
        self._missing: dict[str, set[int]] = {}  # nodes that have not yet arrived, by barrier
        self._puts: list[tuple[int, dict[str, str]]] = []  # the node and what it put, in order
        self._sent = dict.fromkeys(nodes, 0)  # how many of the puts each node has been sent
        self._silent = set(nodes)  # nodes that have not entered any barrier

    def enter(self, node: int, event: BarrierIn) -> list[tuple[int, Command]]:
        if event.keys:
            self._puts.append((node, event.keys))
        self._silent.discard(node)
        expected = {self._node_of[rank] for rank in event.members} if event.members else set(self._sent)
        missing = self._missing.setdefault(event.group, set(expected))
        missing.discard(node)
        if missing:
            return []
        del self._missing[event.group]
        return [(to, BarrierOut(event.world, event.group, self._new_keys(to))) for to in sorted(expected)]

    def _new_keys(self, node: int) -> dict[str, str]:
        start, self._sent[node] = self._sent[node], len(self._puts)
        return {key: value for by, keys in self._puts[start:] if by != node for key, value in keys.items()}

    def waits_for(self, node: int) -> bool:
        """Whether other nodes wait for this one at its first barrier, which is in MPI_Init."""
        return node in self._silent and any(node in missing for missing in self._missing.values())

    def has(self, event: BarrierIn, node: int) -> bool:
        """Whether the node and the barrier's members belong to this world."""
        return node in self._sent and all(0 <= rank < len(self._node_of) for rank in event.members)


class MpiWorlds:
    """The world that is planned, the worlds spawned from it, and the published names."""

    def __init__(self, nodes: Sequence[NodePlan], name: str, restarts: int = 0) -> None:
        """`nodes`: in the order of the ranks, which follow one another. `name`: unique to this world and attempt.

        `restarts`: how many there have been.
        """
        self._nodes = {node.index: node for node in nodes}
        self._name = name
        self._restarts = restarts
        self._worlds = [_Barriers([node.index for node in nodes], [len(node.ranks) for node in nodes])]
        self._alive = {node.index: {rank.rank for rank in node.ranks} for node in nodes}
        self._spawned: set[int] = set()  # those of the spawned ranks that have not exited; all on the first node
        self._published: dict[str, str] = {}
        self._ranks = [[rank.rank for node in nodes for rank in node.ranks]]  # of each world, by MPI rank
        self._pmix = PmixExchange()
        self._pmix.add([node.index for node in nodes for _ in node.ranks])
        self._found: tuple[int, MpiFound] | None = None  # the first node's
        self.stopping = False  # its ranks are being stopped to start again: nobody is missed

    @property
    def nodes(self) -> list[int]:
        """Those of the world that is planned, in the order of its ranks."""
        return list(self._nodes)

    def begin(self, index: int) -> MpiWorld:
        """What the node at this index must know before its ranks start."""
        node, nodes = self._nodes[index], list(self._nodes.values())
        return MpiWorld(
            number=0,
            name=self._name,
            size=len(self._ranks[0]),
            first=self._ranks[0].index(node.ranks[0].rank),
            ranks=[rank.rank for rank in node.ranks],
            programs=[rank.program.number if rank.program else 0 for one in nodes for rank in one.ranks],
            hosts=[one.name or "localhost" for one in nodes],
            counts=(counts := [len(one.ranks) for one in nodes]),
            mapping=process_mapping(counts),
            parent=[],
            keys={},
            interface=node.interface,
            library=node.mpi_library,
            beside=node.beside,
        )

    def makes_sense(self, node: int, event: BarrierIn | PmixRequest) -> bool:
        """Whether this node can have sent this."""
        if isinstance(event, PmixRequest):
            return self._pmix.makes_sense(node, event)
        return 0 <= event.world < len(self._worlds) and self._worlds[event.world].has(event, node)

    def on(self, node: int, event: Any) -> list[tuple[int, Command]]:
        """The replies to a node's event: pairs of a node and a command."""
        match event:
            case BarrierIn():
                return self._worlds[event.world].enter(node, event)
            case MpiRequest(rank=rank, lines=lines):
                return [(node, MpiReply(rank, self._name_service(lines[0])))]
            case PmixRequest():
                return self._pmix.on(node, event)
            case PmixFetched():
                return self._pmix.fetched(event)
        return []

    def differs(self, node: int, found: MpiFound) -> RankFailed | None:
        """The failure of a node whose ranks use another MPI than those of the first that told; None if none."""
        if not found.library:  # nobody knows yet
            return None
        first, other = self._found = self._found or (node, found)
        if found.library == other.library:
            return None
        reason = f"uses another MPI than {self._nodes[first].name}: {found.why}, and there {other.why}"
        return RankFailed(found.time, self._nodes[node].ranks[0].rank, 2, reason)

    def left(self, node: int, event: RankExited) -> None:
        """A rank has exited."""
        self._alive[node].discard(event.rank)
        self._spawned.discard(event.rank)

    def absent(self) -> RankFailed | None:
        """The failure of a node whose ranks have all exited while the others wait for it in MPI_Init; None if none.

        If only some of a node's ranks are missing, its agent reports it.
        """
        for node, alive in self._alive.items():
            if not (alive or self.stopping) and (self._worlds[0].waits_for(node) or self._pmix.waits_for(node)):
                return RankFailed(time.monotonic_ns(), self._nodes[node].ranks[0].rank, 1, NO_INIT)
        return None

    def spawn(self, request: MpiRequest | PmixRequest, first: int) -> tuple[MpiWorld, list[dict[str, Any]]]:
        """The world that a rank asks for, on the first node, and its ranks, of which the first gets the number `first`.

        Raises ValueError for a bad request.
        """
        if isinstance(request, MpiRequest):
            programs, parent = spawned_programs(request.lines), [0, 0]
        else:
            programs, parent = _programs(request.given), list(request.members[0])
        size = sum(program.nproc for program in programs)
        node = next(iter(self._nodes.values()))
        check_spawn(programs, node.ranks[0].environ, node.most - len(self._alive[node.index]) - len(self._spawned))
        number = len(self._worlds)
        entries: list[dict[str, Any]] = []
        for which, program in enumerate(programs):
            for _ in range(program.nproc):
                rank = len(entries)
                seat = MpiSeat(rank, size, rank, size, node.ranks[0].environ.get("PMI_HOSTNAME", ""))
                own = dict.fromkeys(("RANK", "ROLE_RANK", "LOCAL_RANK"), rank)
                own["TORCHELASTIC_RESTART_COUNT"] = self._restarts
                own |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE"), size)
                environ = {**node.ranks[0].environ, **{name: str(value) for name, value in own.items()}}
                environ |= {**mpi_environ(seat), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "PMI_SPAWNED": "1"}
                environ |= program.environ
                cwd = os.path.join(node.cwd, program.cwd)
                entry = {"rank": first + rank, "argv": program.argv, "environ": environ, "cwd": cwd, "program": which}
                entry["python"] = program.python and node.hooks
                entries.append(entry)
        self._spawned.update(entry["rank"] for entry in entries)
        self._worlds.append(_Barriers([node.index], [size]))
        self._ranks.append([entry["rank"] for entry in entries])
        self._pmix.add([node.index] * size)
        world = MpiWorld(
            number=number,
            name=f"{self._name}-{number}",
            size=size,
            first=0,
            ranks=[entry["rank"] for entry in entries],
            programs=[entry["program"] for entry in entries],
            hosts=[node.name or "localhost"],
            counts=[size],
            mapping=process_mapping([size]),
            parent=parent,
            keys=programs[0].keys,
            interface=node.interface,
            library=node.mpi_library,
            beside=node.beside,
        )
        return world, entries

    def asker(self, request: PmixRequest) -> int:
        """The rank that spawns, in launchpad's numbering."""
        ((world, rank),) = request.members
        return self._ranks[world][rank]

    def _name_service(self, line: str) -> str:
        """Answer publish_name, lookup_name and unpublish_name like Hydra (mpiexec/pmiserv_publish.c)."""
        verb = line.partition(" ")[0].removeprefix("cmd=").removesuffix("_name")
        service, port = line.partition(" service=")[2].rstrip(), ""  # a name may have spaces
        if verb == "publish":
            service, _, port = service.rpartition(" port=")
        failed = f"cmd={verb}_result rc=1 msg="
        if verb == "publish":
            if service in self._published:
                return failed + "key_already_present"
            if len(self._published) >= MOST_PUBLISHED:
                return failed + "too_many_names"
            self._published[service] = port
        elif service not in self._published:
            return failed + "service_not_found"
        elif verb == "lookup":
            return f"cmd=lookup_result rc=0 port={self._published[service]}"
        else:
            del self._published[service]
        return f"cmd={verb}_result rc=0"


def _programs(given: list[Any]) -> list[Spawned]:
    """The programs of a spawn by PMIx. Raises ValueError or LookupError if it is malformed."""
    programs = []
    for app in given[0]:
        if type(app["count"]) is not int or app["count"] < 1 or not app["argv"][0]:
            raise ValueError("a spawn of nothing")
        if not all(isinstance(text, str) for text in (*app["argv"], *app["environ"], app["cwd"])):
            raise TypeError("a spawn with what is no text")
        argv, python = python_argv(app["argv"])
        environ = dict(line.partition("=")[::2] for line in app["environ"])
        own = {name: value for name, value in environ.items() if not name.startswith(("PMIX_", "PMI_"))}
        programs.append(Spawned(argv, app["count"], app["cwd"], python, {}, own))
    return programs
