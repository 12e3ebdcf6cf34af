"""Serves PMI-1 to this node's ranks: a socket per rank, local barriers, and the messages to and from the head.

For ranks of Open MPI, PMIx takes its place.
"""

from __future__ import annotations

import glob
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ... import linux, mpi_library
from ...protocol.commands import BarrierOut, Command, MpiReply, MpiWorld, PmixFetch, PmixReply
from ...protocol.events import NO_INIT, BarrierIn, MpiFound, MpiRequest, NoMpi, RankFailed
from ..host import resources
from ..outbox import Listener
from ..poll import Poll
from ..ranks import rundir
from . import open_mpi_settings, shm
from .pmi import Ask, Enter, Fail, Keys, PmiConnection, Reply, barrier_out

if TYPE_CHECKING:
    from .pmix_worlds import PmixWorlds

# Variables of a launcher around us. A rank that finds them would join that launcher's world.
_NOT_OURS = ("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_MCA_orte_", "OMPI_MCA_ess")
_USERS = ("PMIX_MCA_", "PMIX_PREFIX", "PMIX_INSTALL_PREFIX")  # settings of PMIx

# Where ranks, spawned ones too, share a core, those that wait would otherwise take the time of those that work.
YIELD = "OMPI_MCA_mpi_yield_when_idle"

NO_FINALIZE = "exited with code 0 after MPI_Init, without calling MPI_Finalize"


class Members:
    """One world's ranks on this node, and the barriers at which they wait."""

    def __init__(self, world: MpiWorld) -> None:
        self.world = world
        known = dict(world.keys)
        if world.mapping:
            known["PMI_process_mapping"] = world.mapping
        self.keys = Keys(world.name, world.size, known)
        self._local = range(world.first, world.first + len(world.ranks))  # their MPI ranks
        self._waiting: dict[str, set[int]] = {}  # ranks in our numbering, by barrier
        self.silent: list[int] = []  # ranks that exited with 0 without sending a PMI command

    def enter(self, rank: int, barrier: Enter) -> tuple[bool, BarrierIn | None]:
        """A rank enters a barrier. Returns whether it is complete, and what to tell the head once all are in here."""
        members = barrier.members
        everyone = members or range(self.world.size)
        local = self._local if members is None else [member for member in self._local if member in everyone]
        waiting = self._waiting.setdefault(barrier.group, set())
        waiting.add(rank)
        if len(waiting) < len(local):
            return False, None
        if members is None or len(local) == len(everyone):
            return True, None
        puts, self.keys.new = self.keys.new, {}
        return False, BarrierIn(time.monotonic_ns(), self.world.number, barrier.group, members, puts)

    def leave(self, group: str) -> set[int]:
        """A barrier is complete. Returns the ranks that wait at it."""
        return self._waiting.pop(group, set())


class NodeWorlds:
    """All MPI worlds of this node, for the lifetime of the agent."""

    def __init__(self, poll: Poll, outbox: Listener, folder: str) -> None:
        self._poll = poll
        self._outbox = outbox
        self._folder = folder
        self._worlds: dict[int, Members] = {}
        self._members: dict[int, Members] = {}  # by rank
        self._connections: dict[int, PmiConnection] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._succeeded = 0  # how many ranks have exited with 0
        self.pmix: PmixWorlds | None = None  # if the ranks use Open MPI
        self.library = ""  # the MPI that the ranks use; "" if that is not known, and all are served
        self.why_not = ""  # why Open MPI is not
        self._settings: dict[str, str] = {}  # of the MPI; each rank gets them, so that a kept image still fits

    def on(self, command: Command) -> None:
        """From the head: a world, or what has been said on other nodes."""
        match command:
            case MpiWorld():
                self.add(command)
            case BarrierOut():
                self._barrier_out(command)
            case MpiReply():
                self.reply(command.rank, command.line)
            case PmixReply() if self.pmix:
                self.pmix.reply(command)
            case PmixFetch() if self.pmix:
                self.pmix.fetch(command)

    def add(self, world: MpiWorld) -> None:
        """Add a world whose ranks are about to start. The job's own, number 0, replaces all previous worlds."""
        if world.number == 0:
            self.close()
        members = self._worlds[world.number] = Members(world)
        self._members.update(dict.fromkeys(world.ranks, members))
        shm.remember(self._folder, world.name)
        if self.pmix:
            self.pmix.add(world)

    def has(self, rank: int) -> bool:
        """Whether this rank belongs to an MPI world."""
        return rank in self._members

    def prepare(self, environ: dict[str, str]) -> None:
        """Adapt the environment that all ranks share, so that MPI finds us and no other launcher."""
        for name in [name for name in environ if name.startswith(_NOT_OURS) and not name.startswith(_USERS)]:
            del environ[name]
        self._settings = {}
        if self._interface:
            # By default they may pick an interface that doesn't reach the other nodes (pmodels/mpich#7863).
            self._settings = dict.fromkeys({"UCX_NET_DEVICES", "FI_TCP_IFACE"} - environ.keys(), self._interface)

    @property
    def _interface(self) -> str:
        """The interface that reaches the other nodes, if MPI has nothing better."""
        return "" if not self._worlds or has_fabric() else self._worlds[0].world.interface

    def serve(self, environ: dict[str, str], argv: Sequence[str], cwd: str) -> None:
        """Begin to serve the MPI that this command line uses; all that are here if that is not known."""
        world = self._worlds[0].world
        library, path, why = mpi_library.which(argv, environ, cwd)
        if world.library and world.library != library:
            library, why = world.library, f"--mpi {world.library}"
            path = mpi_library.installed(library, argv, environ, cwd)
            if path:  # with MPI4PY_MPIABI, mpi4py looks only where the dynamic linker does
                environ.setdefault("MPI4PY_LIBMPI", path)
            else:
                environ.setdefault("MPI4PY_MPIABI", mpi_library.ABIS[library])
        self._outbox.say(MpiFound(time.monotonic_ns(), library, why))
        self.library = library
        if library not in ("", mpi_library.OPEN_MPI):
            return
        path = path or mpi_library.open_mpi(environ, cwd)
        if library or path:
            self.why_not = self._serve_pmix(path, environ)
        if library and self.why_not:
            self._outbox.say(NoMpi(time.monotonic_ns(), library, self.why_not))

    def _serve_pmix(self, libmpi: str, environ: dict[str, str]) -> str:
        """Begin to serve ranks of Open MPI; returns why that can't be, or ""."""
        world = self._worlds[0].world
        libpmix = mpi_library.libpmix(libmpi, environ)
        if not libpmix:
            return f"the libpmix.so.2 of {libmpi or 'Open MPI'} was not found"
        try:
            from . import pmix_worlds
        except (ImportError, OSError) as error:
            return f"the PMIx server for Open MPI can't be started: {error}"
        found = {**pmix_worlds.settings(shm.open_mpis(self._folder)), YIELD: "1"}
        found |= open_mpi_settings.without_absent(libmpi, environ)
        if self._interface:
            found |= open_mpi_settings.interfaces(libmpi, environ, self._interface)
        if not self.library:  # MPICH refuses to choose (MPIR_pmi_init of src/util/mpir_pmi.c)
            found["MPIR_CVAR_PMI_VERSION"] = "1"
        self._settings |= {name: value for name, value in found.items() if name not in environ}
        host = next(host for host, first in zip(world.hosts, _firsts(world), strict=True) if first == world.first)
        try:
            os.mkdir(shm.open_mpis(self._folder), 0o700)  # one that exists is another user's
            self.pmix = pmix_worlds.PmixWorlds(
                self._poll, self._outbox, libpmix, environ, self._pmix_folder, host, self._report_silent
            )
        except OSError as error:
            return f"the PMIx server for Open MPI can't be started: {error.strerror}"
        self.pmix.add(world)
        return ""

    @property
    def _pmix_folder(self) -> str:
        return os.path.join(self._folder, "pmix")

    def world_of(self, rank: int) -> int:
        """The number of a rank's world."""
        return self._members[rank].world.number

    def is_ready(self, world: int) -> bool:
        """Whether the ranks of this world can start."""
        return self.pmix is None or world in self.pmix.ready

    def when_ready(self, world: int, begin: Callable[[], None]) -> None:
        """Call `begin` once the ranks of this world can start."""
        if self.pmix is None:
            begin()
        else:
            self.pmix.when_ready(world, begin)

    def environ(self, rank: int) -> Mapping[str, str]:
        """The variables with which a rank finds us."""
        found = {**self._settings, **(self.pmix.environ(rank) if self.pmix else {})}
        if self._worlds[0].world.beside + len(self._members) <= resources.usable_cores():
            found.pop(YIELD, None)
        return found if self.library == mpi_library.OPEN_MPI else {**found, "PMI_FD": "3"}

    @property
    def own(self) -> set[int]:
        """The pids of our own processes."""
        return {self.pmix.pid} if self.pmix else set()

    def open(self, rank: int) -> int:
        """The rank's end of its connection, or -1; close it once the rank has it. Raises OSError."""
        if self.library == mpi_library.OPEN_MPI:
            return -1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._sockets[rank] = ours
        members = self._members[rank]
        own = members.world.first + members.world.ranks.index(rank)
        self._connections[rank] = PmiConnection(members.keys, members.world.programs[own])
        self._poll.watch(ours.fileno(), lambda _: self._read(rank))
        return theirs.detach()

    def _read(self, rank: int) -> None:
        while rank in self._sockets:
            data = linux.read_now(self._sockets[rank].fileno(), 1 << 16)
            if data is None:
                return
            if not data:
                self._hang_up(rank)
                return
            for action in self._connections[rank].feed(data):
                match action:
                    case Reply(line=line):
                        self.reply(rank, line)
                    case Enter():
                        self._enter(rank, action)
                    case Ask(lines=lines):
                        self._outbox.say(MpiRequest(time.monotonic_ns(), rank, lines))
                    case Fail(code=code, reason=reason):
                        self._outbox.say(RankFailed(time.monotonic_ns(), rank, code, reason))
            self._report_silent(rank)

    def _enter(self, rank: int, barrier: Enter) -> None:
        members = self._members[rank]
        complete, event = members.enter(rank, barrier)
        if event is not None:
            self._outbox.say(event)
        if complete:
            self._release(members, barrier.group)

    def _report_silent(self, rank: int) -> None:
        """Report ranks that exited without calling MPI_Init, once another calls it: it would wait for them forever."""
        silent = self._members[rank].silent
        while silent and self._any_spoken(rank):
            self._outbox.say(RankFailed(time.monotonic_ns(), silent.pop(), 1, NO_INIT))

    def _any_spoken(self, rank: int) -> bool:
        """Whether a local rank of this rank's world has called MPI_Init."""
        return any(map(self._has_spoken, self._members[rank].world.ranks))

    def _has_spoken(self, rank: int) -> bool:
        """Whether a rank has called MPI_Init."""
        by_pmi = rank in self._connections and self._connections[rank].has_spoken
        return by_pmi or (self.pmix is not None and rank in self.pmix.spoken)

    def _is_inside(self, rank: int) -> bool:
        """Whether a rank has called MPI_Init, but not MPI_Finalize."""
        connection = self._connections.get(rank)
        by_pmi = connection is not None and connection.is_inside(self._world_connections(rank))
        return by_pmi or (self.pmix is not None and rank in self.pmix.inside)

    def _release(self, members: Members, group: str) -> None:
        for rank in members.leave(group):
            self.reply(rank, barrier_out(group))

    def _barrier_out(self, out: BarrierOut) -> None:
        """All ranks are in the barrier, and these are the keys that other nodes have put."""
        members = self._worlds.get(out.world)
        if members is not None:
            members.keys.known.update(out.keys)
            self._release(members, out.group)

    def reply(self, rank: int, line: str) -> None:
        """Answer a rank. It waits for one answer at a time, so the socket's buffer has room."""
        if rank in self._sockets:
            try:
                self._sockets[rank].send(line.encode() + b"\n")
            except OSError:  # it is gone, or doesn't read the answers it asked for
                pass

    def exited(self, rank: int, code: int) -> None:
        """A rank has exited. Its last messages are read first."""
        if self.pmix:
            self.pmix.catch_up()
        self._read(rank)
        self._hang_up(rank)
        self._succeeded += code == 0
        if code or rank not in self._members:
            return
        if self._is_inside(rank):
            self._outbox.say(RankFailed(time.monotonic_ns(), rank, 1, NO_FINALIZE))
        elif not self._has_spoken(rank):
            if self._members[rank].world.number:  # those that spawned it wait for it
                self._outbox.say(RankFailed(time.monotonic_ns(), rank, 1, NO_INIT))
                return
            self._members[rank].silent.append(rank)
            self._report_silent(rank)

    @property
    def is_unused(self) -> bool:
        """Whether all ranks here have exited with 0 without calling MPI_Init, and nothing was said of it."""
        said = self.library and self.why_not
        return not said and self._succeeded == len(self._members) and not any(map(self._has_spoken, self._members))

    def _world_connections(self, rank: int) -> list[PmiConnection]:
        """The connections of all local ranks of this rank's world, its own too."""
        return [self._connections[member] for member in self._members[rank].world.ranks if member in self._connections]

    def _hang_up(self, rank: int) -> None:
        ours = self._sockets.pop(rank, None)
        if ours is not None:
            self._poll.unwatch(ours.fileno())
            ours.close()

    def close(self) -> None:
        """All ranks are gone: forget the worlds, and remove their leftovers in shared memory."""
        for rank in list(self._sockets):
            self._hang_up(rank)
        self._worlds.clear()
        self._members.clear()
        self._connections.clear()
        self._succeeded = 0
        self.why_not = ""
        if self.pmix:
            self.pmix.close()
            self.pmix = None
            rundir.remove(self._pmix_folder)
        shm.remove(self._folder)


def _firsts(world: MpiWorld) -> list[int]:
    """The first MPI rank on each node."""
    return [sum(world.counts[:node]) for node in range(len(world.counts))]


def has_fabric(folder: str = "/sys/class/infiniband") -> bool:
    """Whether a fast network is connected, such as InfiniBand, that MPI should pick itself."""
    states = glob.glob(f"{folder}/*/ports/*/state")
    return any("ACTIVE" in linux.text_of(state) for state in states)
