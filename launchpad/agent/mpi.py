"""The MPI worlds of this node: a socket for each rank, barriers, and what is told to, and asked of, the head."""

from __future__ import annotations

import os
import socket
import time

from ..commands import BarrierOut, World
from ..events import BarrierIn, MpiRequest, RankFailed
from ..failures import NO_INIT
from . import shm
from .outbox import Outbox
from .pmi import Ask, Enter, Fail, Keys, Reply, Talk, barrier_out
from .poll import Poll

# What a launcher around us may have set for itself; a rank that finds it would join that world.
_NOT_OURS = ("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL")

LEFT = "left without MPI_Finalize, after MPI_Init; its exit code was 0"


class Members:
    """The ranks of one world here, and where they wait."""

    def __init__(self, world: World) -> None:
        self.world = world
        known = {**world.keys, "PMI_process_mapping": world.mapping}
        self.keys = Keys(world.name, world.size, known)
        self._here = range(world.first, world.first + len(world.ranks))  # their MPI ranks
        self._waiting: dict[str, set[int]] = {}  # ranks as we number them, by barrier
        self.silent: list[int] = []  # the ranks that are gone with 0 and have not said a word

    def enter(self, rank: int, barrier: Enter) -> tuple[bool, BarrierIn | None]:
        """A rank has come to a barrier: whether it is complete, and what the head must know if it is complete here."""
        members = barrier.members
        everyone = members or range(self.world.size)
        here = self._here if members is None else [one for one in self._here if one in everyone]
        waiting = self._waiting.setdefault(barrier.group, set())
        waiting.add(rank)
        if len(waiting) < len(here):
            return False, None
        if members is None or len(here) == len(everyone):
            return True, None
        puts, self.keys.new = self.keys.new, {}
        return False, BarrierIn(time.monotonic_ns(), self.world.number, barrier.group, members, puts)

    def leave(self, group: str) -> set[int]:
        """A barrier is complete: who has waited there."""
        return self._waiting.pop(group, set())


class Mpi:
    """All of them, for the length of the agent."""

    def __init__(self, poll: Poll, outbox: Outbox, folder: str) -> None:
        self._poll = poll
        self._outbox = outbox
        self._folder = folder
        self._worlds: dict[int, Members] = {}
        self._of: dict[int, Members] = {}  # by rank
        self._talks: dict[int, Talk] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._done = 0  # how many have left with 0

    def add(self, world: World) -> None:
        """A world whose ranks are about to be started; the job's own (number 0) is followed by no other of before."""
        if world.number == 0:
            self.close()
        members = self._worlds[world.number] = Members(world)
        self._of.update(dict.fromkeys(world.ranks, members))
        shm.remember(self._folder, world.name)

    def has(self, rank: int) -> bool:
        """Whether this rank is to speak PMI."""
        return rank in self._of

    def prepare(self, environ: dict[str, str]) -> None:
        """Make the environment that all ranks share one in which MPI finds nobody but us."""
        interface = self._worlds[0].world.interface if self._worlds else ""
        for name in [name for name in environ if name.startswith(_NOT_OURS)]:
            del environ[name]
        if interface and not _has_fabric():
            # By themselves both may take an interface by which the other nodes are not reached (pmodels/mpich#7863).
            environ.setdefault("UCX_NET_DEVICES", interface)
            environ.setdefault("FI_TCP_IFACE", interface)

    def open(self, rank: int) -> int:
        """The rank's end of its connection; to be closed when it has it. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._sockets[rank] = ours
        members = self._of[rank]
        self._talks[rank] = Talk(members.keys, members.world.programs[members.world.ranks.index(rank)])
        self._poll.watch(ours.fileno(), lambda _: self._hear(rank))
        return theirs.detach()

    def _hear(self, rank: int) -> None:
        while rank in self._sockets:
            try:
                data = self._sockets[rank].recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up(rank)
                return
            for action in self._talks[rank].feed(data):
                match action:
                    case Reply(line):
                        self.reply(rank, line)
                    case Enter():
                        self._enter(rank, action)
                    case Ask(lines):
                        self._outbox.say(MpiRequest(time.monotonic_ns(), rank, lines))
                    case Fail(code, reason):
                        self._outbox.say(RankFailed(time.monotonic_ns(), rank, code, reason))
            self._miss(rank)

    def _enter(self, rank: int, barrier: Enter) -> None:
        members = self._of[rank]
        complete, tell = members.enter(rank, barrier)
        if tell is not None:
            self._outbox.say(tell)
        if complete:
            self._release(members, barrier.group)

    def _miss(self, rank: int) -> None:
        """MPI_Init is everyone's: who is in it would wait for ever for those that are gone without it."""
        silent = self._of[rank].silent
        while silent and any(talk.has_spoken for talk in self._beside(rank)):
            self._outbox.say(RankFailed(time.monotonic_ns(), silent.pop(), 1, NO_INIT))

    def _release(self, members: Members, group: str) -> None:
        for rank in members.leave(group):
            self.reply(rank, barrier_out(group))

    def barrier_out(self, out: BarrierOut) -> None:
        """The head says that all are in, and what the other nodes have put."""
        members = self._worlds.get(out.world)
        if members is not None:
            members.keys.known.update(out.keys)
            self._release(members, out.group)

    def reply(self, rank: int, line: str) -> None:
        """Answer a rank. It waits for one answer at a time, so there is room for it."""
        if rank in self._sockets:
            try:
                self._sockets[rank].send(line.encode() + b"\n")
            except OSError:  # it is gone, or reads nothing it has asked for
                pass

    def exited(self, rank: int, code: int) -> None:
        """A rank is gone; what it said last is heard first."""
        self._hear(rank)
        self._hang_up(rank)
        if code == 0 and rank in self._talks:
            self._left(rank, self._talks[rank])
        self._done += code == 0

    def _left(self, rank: int, talk: Talk) -> None:
        if talk.is_inside(self._beside(rank)):
            self._outbox.say(RankFailed(time.monotonic_ns(), rank, 1, LEFT))
        elif not talk.has_spoken:
            self._of[rank].silent.append(rank)
            self._miss(rank)

    @property
    def unused(self) -> bool:
        """Whether all ranks here are gone with 0, and none of them has said a word."""
        talks = self._talks.values()
        return self._done == len(talks) and not any(talk.has_spoken for talk in talks)

    def _beside(self, rank: int) -> list[Talk]:
        return [self._talks[one] for one in self._of[rank].world.ranks if one in self._talks]

    def _hang_up(self, rank: int) -> None:
        ours = self._sockets.pop(rank, None)
        if ours is not None:
            self._poll.unwatch(ours.fileno())
            ours.close()

    def close(self) -> None:
        """No rank is left: forget the worlds, and remove what they left in shared memory."""
        for rank in list(self._sockets):
            self._hang_up(rank)
        self._worlds.clear()
        self._of.clear()
        self._talks.clear()
        self._done = 0
        shm.remove(self._folder)


def _has_fabric() -> bool:
    """Whether there is a network that MPI had better find itself: InfiniBand and the like."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
