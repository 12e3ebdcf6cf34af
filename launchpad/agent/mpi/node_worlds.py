"""Serves PMI-1 to this node's ranks: a socket per rank, local barriers, and the messages to and from the head."""

from __future__ import annotations

import os
import socket
import time

from ... import linux
from ...protocol.commands import BarrierOut, MpiWorld
from ...protocol.events import NO_INIT, BarrierIn, MpiRequest, RankFailed
from ..outbox import Listener
from ..poll import Poll
from . import shm
from .pmi import Ask, Enter, Fail, Keys, PmiSession, Reply, barrier_out

# Variables of a launcher around us. A rank that finds them would join that launcher's world.
_NOT_OURS = ("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL")

NO_FINALIZE = "exited with code 0 after MPI_Init, without calling MPI_Finalize"


class Members:
    """One world's ranks on this node, and the barriers at which they wait."""

    def __init__(self, world: MpiWorld) -> None:
        self.world = world
        known = {**world.keys, "PMI_process_mapping": world.mapping}
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
        self._sessions: dict[int, PmiSession] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._succeeded = 0  # how many ranks have exited with 0

    def add(self, world: MpiWorld) -> None:
        """Add a world whose ranks are about to start. The job's own, number 0, replaces all previous worlds."""
        if world.number == 0:
            self.close()
        members = self._worlds[world.number] = Members(world)
        self._members.update(dict.fromkeys(world.ranks, members))
        shm.remember(self._folder, world.name)

    def has(self, rank: int) -> bool:
        """Whether this rank belongs to an MPI world."""
        return rank in self._members

    def prepare(self, environ: dict[str, str]) -> None:
        """Adapt the environment that all ranks share, so that MPI finds us and no other launcher."""
        interface = self._worlds[0].world.interface if self._worlds else ""
        for name in [name for name in environ if name.startswith(_NOT_OURS)]:
            del environ[name]
        if interface and not _has_fabric():
            # By default both may pick an interface that doesn't reach the other nodes (pmodels/mpich#7863).
            environ.setdefault("UCX_NET_DEVICES", interface)
            environ.setdefault("FI_TCP_IFACE", interface)

    def open(self, rank: int) -> int:
        """The rank's end of its connection; close it once the rank has it. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._sockets[rank] = ours
        members = self._members[rank]
        self._sessions[rank] = PmiSession(members.keys, members.world.programs[members.world.ranks.index(rank)])
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
            for action in self._sessions[rank].feed(data):
                match action:
                    case Reply(line):
                        self.reply(rank, line)
                    case Enter():
                        self._enter(rank, action)
                    case Ask(lines):
                        self._outbox.say(MpiRequest(time.monotonic_ns(), rank, lines))
                    case Fail(code, reason):
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
        while silent and any(session.has_spoken for session in self._world_sessions(rank)):
            self._outbox.say(RankFailed(time.monotonic_ns(), silent.pop(), 1, NO_INIT))

    def _release(self, members: Members, group: str) -> None:
        for rank in members.leave(group):
            self.reply(rank, barrier_out(group))

    def barrier_out(self, out: BarrierOut) -> None:
        """From the head: all ranks are in the barrier, and these are the keys that other nodes have put."""
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
        self._read(rank)
        self._hang_up(rank)
        if code == 0 and rank in self._sessions:
            self._check_exit(rank, self._sessions[rank])
        self._succeeded += code == 0

    def _check_exit(self, rank: int, session: PmiSession) -> None:
        if session.is_inside(self._world_sessions(rank)):
            self._outbox.say(RankFailed(time.monotonic_ns(), rank, 1, NO_FINALIZE))
        elif not session.has_spoken:
            self._members[rank].silent.append(rank)
            self._report_silent(rank)

    @property
    def unused(self) -> bool:
        """Whether all ranks here have exited with 0 without sending a PMI command."""
        sessions = self._sessions.values()
        return self._succeeded == len(sessions) and not any(session.has_spoken for session in sessions)

    def _world_sessions(self, rank: int) -> list[PmiSession]:
        """The sessions of all local ranks of this rank's world, its own too."""
        return [self._sessions[member] for member in self._members[rank].world.ranks if member in self._sessions]

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
        self._sessions.clear()
        self._succeeded = 0
        shm.remove(self._folder)


def _has_fabric() -> bool:
    """Whether there is a fast network, such as InfiniBand, that MPI should pick itself."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
