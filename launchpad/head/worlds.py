"""The state machine above the worlds of a job: each has a machine of its own below it. No I/O.

As long as a world may restart, what happens to its ranks is its own machine's: the job's hears nothing of it, and all
other worlds run on. A failure for which no restart is left, and its end, are the job's, with its ranks:

    its own ──failed without a restart left or that would help, ended well, node lost, dismissed, job stops──► the job's
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from launchpad.head.machine import FinishAttempt, Judgement, Machine, Meet, Phase, Restart, TakeStacks
from launchpad.job.limits import Limits
from launchpad.job.membership import Membership, Seat
from launchpad.job.outcome import Cause
from launchpad.named import NamedTuple
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.events import (
    Drained,
    NodeLost,
    NotRestarted,
    PhaseChanged,
    RankExited,
    RankFailed,
    SeatsReady,
    StacksTaken,
    StartFailed,
    WorldStopping,
)
from launchpad.protocol.message import Message

Judge = Callable[[str], Judgement]  # says of a world whether to start it again


class RoleWorld(NamedTuple):
    """One of several."""

    name: str
    ranks: Sequence[int]  # in the job's numbering
    seats: tuple[Seat, ...]
    limits: Limits
    service: bool = False  # that it ends, even with 0, is a failure


class SignalWorld(Message):
    """Send this signal to the ranks of a world."""

    world: str
    signum: int
    stops: bool = False  # it is the one by which its user wants it to stop


class FinishWorld(Message):
    """Have the agents of a world sweep up and drain the output, and get ready to start its ranks again."""

    world: str


class RestartWorld(Message):
    """Start the ranks of a world again."""

    world: str
    attempt: int  # 1 for the first time
    restarts: int  # how often that was done after a failure, this time included
    counted: bool  # it has failed


class StartAgain(Message):
    """Stop the ranks of a world, and start them again, though none has failed."""

    world: str


class Dismissed(Message):
    """These ranks are about to be stopped, as they are needed no more."""

    ranks: list[int]


class Worlds:
    """One job's state."""

    def __init__(self, job: Machine, worlds: Sequence[RoleWorld], judge: Judge, now: float) -> None:
        """`judge` is asked before each restart of the world that it is called with; see Machine for the rest."""
        self._job = job
        self._own = {one.name: _Own(one, judge, now) for one in worlds}
        self._by_rank = {rank: own for own in self._own.values() for rank in own.world.ranks}
        self._by_node = {seat.node: own for own in self._own.values() for seat in own.world.seats}

    @property
    def phase(self) -> Phase:
        """The job's."""
        return self._job.phase

    @property
    def cause(self) -> Cause | None:
        """What has ended the job."""
        return self._job.cause

    @property
    def exit_code(self) -> int:
        """The job's exit code so far."""
        return self._job.exit_code

    @property
    def attempt(self) -> int:
        """The job's; the worlds count their own."""
        return self._job.attempt

    @property
    def restarts(self) -> int:
        """How often the job was; likewise."""
        return self._job.restarts

    @property
    def stops_at(self) -> float | None:
        """See Machine.stops_at."""
        return self._job.stops_at

    @property
    def running(self) -> Collection[int]:
        """The ranks that have not exited."""
        gone = {rank for own in self._own.values() for rank in own.gone}
        return self._job.running - gone if gone else self._job.running

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        times = [own.machine.deadline for own in self._own.values()]
        return min((at for at in (self._job.deadline, *times) if at is not None), default=None)

    def can_spare(self, node: int, now: float) -> bool:
        """See Machine.can_spare."""
        return self._job.can_spare(node, now)

    def join(self, ranks: Sequence[int], node: int) -> None:
        """A rank of this node has spawned these: they are of its world until that starts again."""
        self._job.join(ranks, node)
        if own := self._by_node.get(node):
            own.machine.join(ranks, node)
            own.spawned.update(ranks)
            self._by_rank.update(dict.fromkeys(ranks, own))

    def on(self, event: Any, now: float, node: int = 0) -> list[Any]:
        """The actions for an event from `node`."""
        match event:
            case RankExited(rank=rank) | RankFailed(rank=rank) | StartFailed(rank=rank) if rank in self._by_rank:
                return self._of_world(self._by_rank[rank], event, now)
            case Drained() if node in self._by_node:
                own = self._by_node[node]
                return list(self._translated(own, own.machine.on(event, now, node), now))
            case NodeLost(node=lost) if lost in self._by_node:
                return self._hand_over(self._by_node[lost], now, event)
            case StartAgain(world=world):
                found = self._own.get(world)
                return list(self._translated(found, found.machine.start_again(now), now)) if found else []
            case Dismissed(ranks=ranks):
                owns = {self._by_rank[rank].world.name: self._by_rank[rank] for rank in ranks if rank in self._by_rank}
                return [action for own in owns.values() for action in self._hand_over(own, now)]
        return self._of_job(event, now, node)

    def tick(self, now: float) -> list[Any]:
        """The actions that are due at `now`."""
        actions = self._with_the_end(self._job.tick(now), now)
        for own in list(self._own.values()):
            actions += self._translated(own, own.machine.tick(now), now)
        return actions

    def _of_job(self, event: Any, now: float, node: int = 0) -> list[Any]:
        return self._with_the_end(self._job.on(event, now, node), now)

    def _with_the_end(self, actions: Sequence[Any], now: float) -> list[Any]:
        """The job's actions. Once it stops, no world starts again."""
        found = list(actions)
        while self._own and self._job.phase != "running":
            found += self._hand_over(next(iter(self._own.values())), now)
        return found

    def _of_world(self, own: _Own, event: RankExited | RankFailed | StartFailed, now: float) -> list[Any]:
        machine, well = own.machine, type(event) is RankExited and event.code == 0
        ends_early = own.world.service and event.rank not in own.spawned
        if (not well or ends_early) and machine.phase == "running" and not machine.may_restart(now):
            return self._hand_over(own, now, event)
        if type(event) is RankExited:
            own.gone.add(event.rank)
        found: list[Any] = []
        if well and ends_early:  # the job's order says why that is a failure
            found += self._translated(own, machine.on(RankFailed(event.time, event.rank, 1, ""), now), now)
        return [*found, *self._translated(own, machine.on(event, now), now)]

    def _translated(self, own: _Own, actions: Sequence[Any], now: float) -> Iterator[Any]:
        """What a world's machine wants, said of this world alone."""
        name, machine = own.world.name, own.machine
        for action in actions:
            match action:
                case SendSignal(signum=signum, stops=stops):
                    yield SignalWorld(name, signum, stops)
                case PhaseChanged(phase="stopping", signum=signum, seconds=seconds, ranks=ranks):
                    yield WorldStopping(0, name, signum, seconds, ranks)
                case PhaseChanged(phase="over"):
                    yield from self._hand_over(own, now, _failure(machine.cause))
                case NotRestarted(reason=reason):
                    yield action._replace(reason=f"{name}: {reason}")
                case FinishAttempt(leave=False):
                    yield FinishWorld(name)
                case Meet(seats=seats):  # its nodes still hold the address at which they have met
                    yield from self._translated(own, machine.on(SeatsReady(0, seats), now), now)
                case TakeStacks():  # it starts again soon, and nobody would see them
                    taken = StacksTaken(0, "failure", 0, False, [], [], [])
                    yield from self._translated(own, machine.on(taken, now), now)
                case Restart(attempt=attempt, restarts=restarts, counted=counted):
                    own.gone.clear()
                    yield from self._forget_spawned(own, now)
                    yield RestartWorld(name, attempt, restarts, counted)

    def _forget_spawned(self, own: _Own, now: float) -> Iterator[Any]:
        """Nobody starts these again."""
        for rank in own.spawned:
            del self._by_rank[rank]
            yield from self._job.on(RankExited(int(now * 1e9), rank, 0, 0, False), now)
        own.spawned.clear()

    def _hand_over(self, own: _Own, now: float, event: Any = None) -> list[Any]:
        """From now on this world's ranks are the job's. `event`: what happens to them now, before it hears who left."""
        if self._own.pop(own.world.name, None) is None:
            return []
        for rank in (*own.world.ranks, *own.spawned):
            del self._by_rank[rank]
        for seat in own.world.seats:
            del self._by_node[seat.node]
        found = self._of_job(event, now) if event is not None else []
        for rank in sorted(own.gone):
            found += self._of_job(RankExited(int(now * 1e9), rank, 0, 0, False), now)
        return found


class _Own:
    """A world that has not failed for good."""

    def __init__(self, world: RoleWorld, judge: Judge, now: float) -> None:
        self.world = world
        self.machine = Machine(
            world.seats,
            world.limits._replace(timeout=None),
            now,
            membership=Membership(len(world.seats), len(world.seats), changes=True),  # may start again unless it failed
            judge=partial(judge, world.name),
            first=world.ranks[0],
        )
        self.gone: set[int] = set()  # ranks that have exited in this attempt
        self.spawned: set[int] = set()  # by ranks of this attempt


def _failure(cause: Cause | None) -> RankFailed | None:
    """Why a world that is not started again has failed, for the job."""
    if cause is None:
        return None
    return RankFailed(0, cause.rank, cause.code or 1, cause.text)
