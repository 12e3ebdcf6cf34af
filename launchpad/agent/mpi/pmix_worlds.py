"""This node's ranks of Open MPI: a PMIx server for them, and its requests to and from the head."""

from __future__ import annotations

import binascii
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...protocol.commands import MpiWorld, PmixFetch, PmixReply
from ...protocol.events import PmixFetched, PmixRequest, RankFailed
from ..outbox import Listener
from ..poll import Poll
from .pmix_server import PmixServer

_ALL = 0xFFFFFFFE  # PMIX_RANK_WILDCARD
_BAD_PARAM, _NOT_FOUND = -27, -46


class PmixWorlds:
    """The worlds that one PMIx server serves, for one attempt."""

    def __init__(
        self,
        poll: Poll,
        outbox: Listener,
        library: str,
        environ: Mapping[str, str],
        folder: str,
        host: str,
        spoke: Callable[[int], None],
    ) -> None:
        """`library`: libpmix; `environ`, `folder`: the environment of the ranks, and a folder for their files.

        `host`: this node's name in the worlds; `spoke`: a rank has called MPI_Init. Raises OSError.
        """
        self._outbox = outbox
        self._spoke = spoke
        self._worlds: dict[int, MpiWorld] = {}
        self._environs: dict[int, dict[str, str]] = {}  # by rank in launchpad's numbering
        self.ready: set[int] = set()  # worlds whose ranks can start
        self._waiting: dict[int, list[Callable[[], None]]] = {}  # by world
        self.spoken: set[int] = set()  # ranks that have called MPI_Init
        self.inside: set[int] = set()  # … and not MPI_Finalize
        self._held: dict[int, tuple[str, list[tuple[str, int]], tuple[Any, ...]]] = {}  # requests, by their numbers
        self._gone = False
        self._server = PmixServer(poll, library, environ, folder, host, self._hear, self._lost)

    @property
    def pid(self) -> int:
        """The helper's process."""
        return self._server.pid

    def add(self, world: MpiWorld) -> None:
        """Serve a world, which may have all its ranks on other nodes."""
        self._worlds[world.number] = world
        starts = [sum(world.counts[:node]) for node in range(len(world.counts))]
        parent = (self._worlds[world.parent[0]].name, world.parent[1]) if world.parent else ()
        self._server.send(
            "world",
            {
                "number": world.number,
                "name": world.name,
                "hosts": world.hosts,
                "ranks": [list(range(at, at + count)) for at, count in zip(starts, world.counts, strict=True)],
                "programs": world.programs,
                "local": [world.first + place for place in range(len(world.ranks))],
                "parent": parent,
            },
        )

    def when_ready(self, number: int, begin: Callable[[], None]) -> None:
        """Call `begin` once the ranks of this world can start."""
        if number in self.ready:
            begin()
        else:
            self._waiting.setdefault(number, []).append(begin)

    def environ(self, rank: int) -> dict[str, str]:
        """The variables with which a rank finds the server."""
        return self._environs[rank]

    def catch_up(self) -> None:
        """Handle what the server has said so far."""
        self._server.catch_up()

    def close(self) -> None:
        """The ranks are gone."""
        self._gone = True
        self._server.close()

    # From the server.

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready", number, environs):
                self._environs.update(zip(self._worlds[number].ranks, environs, strict=True))
                self.ready.add(number)
                for begin in self._waiting.pop(number, ()):
                    begin()
            case ("connected", name, mpi_rank):
                rank = self._rank(name, mpi_rank)
                self.spoken.add(rank)
                self.inside.add(rank)
                self._spoke(rank)
            case ("finalized", name, mpi_rank):
                self.inside.discard(self._rank(name, mpi_rank))
            case ("abort", name, mpi_rank, status, _):
                # An aborted job has failed, even if it was aborted with code 0.
                self._fail(self._rank(name, mpi_rank), status & 0xFF or 1, f"called MPI_Abort({status})")
            case ("fetched", number, status, data):
                self._outbox.say(PmixFetched(time.monotonic_ns(), number, status, _text(data)))
            case ("fence", number, members, data):
                if all(self._is_here(*member) for member in members):
                    self._server.send("answer", number, 0, data)
                else:
                    self._ask(number, "fence", members, _text(data))
            case ("publish", number, member, once, values):
                self._ask(number, "publish", [member], once, [[key, kind, _text(data)] for key, kind, data in values])
            case ("group", number, members, name, data):
                self._ask(number, "group", members, name, _text(data))
            case ("connect" | "disconnect" as verb, number, members):
                self._ask(number, verb, members)
            case (verb, number, member, *given):
                self._ask(number, verb, [member], *given)

    def _ask(self, number: int, verb: str, members: list[tuple[str, int]], *given: Any) -> None:
        if verb == "modex" and members[0][1] == _ALL:
            # Of a world as a whole, ours knows all that there is once it has been told of it.
            self._server.send("answer", number, _NOT_FOUND, None)
        elif self._are_known(members):
            numbers = {world.name: world.number for world in self._worlds.values()}
            listed = [(numbers[name], -1 if rank == _ALL else rank) for name, rank in members]
            self._outbox.say(PmixRequest(time.monotonic_ns(), number, verb, listed, list(given)))
        else:  # ranks may have told ours of a world before the head has told us
            self._held[number] = verb, members, given
            self._outbox.say(PmixRequest(time.monotonic_ns(), number, "worlds", [(0, self._worlds[0].first)], []))

    def _are_known(self, members: list[tuple[str, int]]) -> bool:
        return {name for name, _ in members} <= {world.name for world in self._worlds.values()}

    def _is_here(self, name: str, rank: int) -> bool:
        for world in self._worlds.values():
            if world.name == name:
                here = range(world.first, world.first + len(world.ranks))
                return rank in here or (rank == _ALL and len(here) == world.size)
        return False

    def _rank(self, name: str, mpi_rank: int) -> int:
        for world in self._worlds.values():
            if world.name == name:
                return world.ranks[mpi_rank - world.first]
        raise LookupError(name)

    def _lost(self, reason: str) -> None:
        if not self._gone:
            self._gone = True
            self._fail(next(iter(self._worlds.values())).ranks[0], 1, f"lost its PMIx server, which {reason}")

    def _fail(self, rank: int, code: int, reason: str) -> None:
        self._outbox.say(RankFailed(time.monotonic_ns(), rank, code, reason))

    # From the head.

    def reply(self, reply: PmixReply) -> None:
        """The answer to a request."""
        if reply.number in self._held:  # the head has told us of all worlds now
            verb, members, given = self._held.pop(reply.number)
            if self._are_known(members):
                self._ask(reply.number, verb, members, *given)
            else:
                self._server.send("answer", reply.number, _BAD_PARAM, None)
            return
        found = reply.found
        if isinstance(found, str):
            found = binascii.a2b_base64(found)
        elif isinstance(found, dict):  # what the nodes have brought to a fence or a group
            data = b"".join(map(binascii.a2b_base64, found["data"]))
            found = (found["group"], data) if "group" in found else data
        elif isinstance(found, int):  # a spawned world
            found = self._worlds[found].name
        elif isinstance(found, list):
            found = [
                (self._worlds[world].name, rank, key, kind, binascii.a2b_base64(data))
                for world, rank, key, kind, data in found
            ]
        self._server.send("answer", reply.number, reply.status, found)

    def fetch(self, fetch: PmixFetch) -> None:
        """A rank on another node wants data of one of ours."""
        self._server.send("fetch", fetch.number, self._worlds[fetch.world].name, fetch.rank)


def settings(memory: str) -> dict[str, str]:
    """Variables for the ranks of Open MPI. `memory`: a folder in shared memory."""
    # Without a launcher that it knows, Open MPI 4 starts each rank on its own. JSM is one that uses PMIx (schizo/jsm).
    found = {"JSM_JSRUN_PORT": "1", "OMPI_MCA_shmem_mmap_backing_file_base_dir": memory}
    return found | {f"OMPI_MCA_{part}_backing_directory": memory for part in ("btl_vader", "btl_sm", "osc_sm")}


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()
