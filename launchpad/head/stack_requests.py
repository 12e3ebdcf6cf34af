"""Collects the stacks of all ranks, one request at a time, and samples them to see whether the job goes on.

If a job of several nodes has stalled, it also finds out which of them can't reach each other.
"""

import signal
import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from launchpad.head.hub import Hub
from launchpad.head.machine import TakeStacks
from launchpad.head.part import InvalidMessage, Part
from launchpad.job.limits import IDLE_SECONDS
from launchpad.job.spec import named
from launchpad.named import NamedTuple
from launchpad.protocol.commands import DumpStacks
from launchpad.protocol.events import (
    SILENT,
    LeftBehind,
    Listening,
    NodesApart,
    Output,
    RankExited,
    RankStarted,
    Reached,
    StackDump,
    StackDumps,
    StacksRequested,
    StacksTaken,
    Stalled,
    StopRequested,
    WorldAnswered,
)
from launchpad.protocol.stacks import separate

if TYPE_CHECKING:
    from launchpad.head.pair_check import PairCheck
    from launchpad.head.stall import StallWatch
    from launchpad.head.vain_waits import VainWatch
    from launchpad.head.world_stalls import WorldStalls

# An agent gives its ranks 2 s, or up to 8 under a high load (agent/stacks/dump.py), and tells of each what it knows. So
# this is the time for an agent that does not answer itself.
ANSWER_SECONDS = 10.0
# Native frames take seconds per rank, and the ranks of a node are dumped one after the other.
NATIVE_SECONDS = 10.0
NATIVE_SECONDS_PER_RANK = 6.0

SAMPLE = "sample"

# What a sample may find: the job has stalled; it waits for what nobody is left to do; it is quiet, which is only told.
STALL, VAIN, IDLE = "stall", "vain", "idle"

# To have them when the job's time is up. Like a sample, it must not interrupt a rank.
SOON = "soon"


# Requests that say nothing of the next attempt.
_OF_ATTEMPT = (SAMPLE, SOON, STALL, VAIN, IDLE)


class _StackRequest(NamedTuple):
    why: str
    watch: str = ""  # of a sample: what it may find
    asker: int = 0
    native: bool = False
    full: bool = False
    insists: bool = True
    rank: int = -1  # only this one; -1: all
    ranks: Collection[int] | None = None  # only these; None: all

    def wants(self, rank: int) -> bool:
        """Whether it is about this rank."""
        return self.rank in (-1, rank) and (self.ranks is None or rank in self.ranks)


class StackRequests(Part):
    """Posts a StacksTaken for each request, and a Stalled after the request that finds that the job hangs."""

    takes = (StackDumps, Listening, Reached, TakeStacks, LeftBehind)
    sees = (RankStarted, Output, RankExited, StacksRequested, StopRequested)

    def __init__(
        self,
        hub: Hub,
        stall_timeout: float | None,
        worlds: Collection[str] = (),
        *,
        advises: bool = False,
    ) -> None:
        """`worlds`: of a job with roles, those that may stall.

        `advises`: the user is told once if nothing moves for long, unless the job ends then.
        """
        self._hub = hub
        self._watches: dict[str, StallWatch | WorldStalls | VainWatch] = {}
        if stall_timeout is not None:
            self._watches[STALL] = _watch_for_stalls(stall_timeout, worlds, hub)
        elif advises:
            self._watches[IDLE] = _watch_for_stalls(IDLE_SECONDS, worlds, hub)
        self._waited = False  # when last looked at: a job in which someone waits for a person has not stalled
        self._pairs: PairCheck | None = None  # while the nodes of a stalled job try to reach each other
        self._left_behind = False  # ranks of this attempt have left processes behind
        self._quiet = 0.0  # how long the stalled job had been quiet
        self._stalled = ""  # which of its worlds has stalled
        self._waiting: deque[_StackRequest] = deque()
        self._current: _StackRequest | None = None
        self._number = 0
        self._ranks: Collection[int] = ()  # those that the current request asks
        self._started: set[int] = set()  # ranks that have a process
        self._missing: set[int] = set()  # of these, those that can answer, and have not
        self._answers: dict[int, StackDump] = {}
        self._same: dict[str, Any] = {}  # the stacks in them, each once
        self._early: dict[int, StackDump] = {}  # the answers with stacks to the request SOON, if nothing came since
        self._until = 0.0

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        if self._pairs is not None:
            return min(self._pairs.deadline, self._until) if self._current is not None else self._pairs.deadline
        if self._current is not None:
            return self._until
        if self._waiting:
            return 0.0
        return min((watch.deadline for watch in self._watches.values()), default=None)

    def on(self, source: int, message: Any) -> None:
        """Take an event of the job, a request, or an answer."""
        match message:
            case Output(rank=rank):
                self._look_afresh(rank)
            case RankExited(rank=rank, code=code):
                self._look_afresh(rank)
                if code == 0 and not self._left_behind:
                    self._watch_store()
            case LeftBehind():  # they may do what the others wait for
                self._left_behind = True
                self._watches.pop(VAIN, None)
            case RankStarted(rank=rank):
                self._started.add(rank)
                self._look_afresh(rank)
            case StackDumps(number=number) if self._current is not None and number == self._number:
                self._answered(message)
            case StacksRequested():
                self._requested(message)
            case TakeStacks(why=why):
                self._ask(why)
            case StopRequested(signum=signal.SIGQUIT):
                self._ask("asked")
            case Listening() | Reached() if self._pairs is not None:  # else it is late, or somebody else has asked
                self._pairs.on(source, message, self._hub.clock.now())

    def _requested(self, message: StacksRequested) -> None:
        ranks: Collection[int] | None = None
        if message.role:
            roles = self._hub.plan.roles
            ranks = {rank for name, own in roles if named(name, message.role) for rank in own}
            if not ranks:
                known = f", only {', '.join(name for name, _ in roles)}" if roles else ""
                text = f"there is no role {message.role!r}{known}"
                self._hub.tell(WorldAnswered(message.asker, text, True))
                return
        asked = _StackRequest("asked", "", message.asker, message.native, message.full, rank=message.rank, ranks=ranks)
        self._waiting.append(asked)

    def _answered(self, message: StackDumps) -> None:
        try:
            dumps = separate(message, self._same)
        except (LookupError, TypeError, ValueError, RecursionError):
            raise InvalidMessage from None
        for one in dumps:
            if one.threads or one.rank not in self._answers:
                self._answers[one.rank] = one
                self._missing.discard(one.rank)

    def start(self) -> None:
        """Forget the last attempt: what was found about it says nothing of this one."""
        self._started.clear()
        self._pairs = None
        self._left_behind = False
        self._watches.pop(VAIN, None)
        if self._current is not None and self._current.why in _OF_ATTEMPT:
            self._current = None
        self._waiting = deque(one for one in self._waiting if one.why not in _OF_ATTEMPT)
        self._look_afresh()

    def lose(self, ranks: Collection[int], why: str) -> None:  # noqa: ARG002
        """These have no process any more."""
        self._started.difference_update(ranks)

    def _watch_store(self) -> None:
        """A rank has returned: look whether the others wait for what only it could have set in our store."""
        ranks = self._hub.plan.ranks
        if VAIN not in self._watches and any(node.store for node in self._hub.plan.taking_part):
            from launchpad.head.vain_waits import VainWatch

            port = int(ranks[0].environ["MASTER_PORT"])
            self._watches[VAIN] = VainWatch(port, self._hub.clock.now())

    def _look_afresh(self, rank: int = -1) -> None:
        """What was seen until now of this rank (-1: of any) says nothing about a stall, or about where it is."""
        self._early = {}
        for watch in self._watches.values():
            watch.moved(self._hub.clock.now(), rank)

    def _ask(self, why: str) -> None:
        """Request the stacks for everybody. `why`: "soon", "timeout", "failure", "asked"."""
        self._waiting.append(_StackRequest(why, insists=why != SOON))
        if self._current is not None and self._current.why == SOON:
            self._until = 0.0

    def go_on(self, started: Collection[int], state: Any) -> None:  # noqa: ARG002
        """Those can answer."""
        self._started = set(started)

    def tick(self, now: float) -> None:
        """Finish the current request if it is complete, and begin the next."""
        running, waits = self._hub.running, self._hub.clock.waits_for_person
        if self._waited and not waits:
            self._look_afresh()
        self._waited = waits
        watching = self._hub.phase == "running" and not waits  # a stall would end the job
        if self._pairs is not None:
            self._check(self._pairs, now)
        request = self._current
        if request is not None and (now >= self._until or self._has_all(running)):
            self._current = None
            self._ended(request, now, running)
        for why, watch in self._watches.items():
            if self._current is None and watch.deadline <= now and not self._waiting:
                watch.asked(now)
                if watching and self._pairs is None:
                    self._begin(_StackRequest(SAMPLE, why, insists=False), now, running)
        if self._current is None and self._waiting:
            self._begin(self._waiting.popleft(), now, running)

    def _has_all(self, running: Collection[int]) -> bool:
        """Whether every rank that can answer has, or has exited."""
        return not any(rank in running for rank in self._missing)

    def _begin(self, request: _StackRequest, now: float, running: Collection[int]) -> None:
        self._current = request
        self._number += 1
        self._ranks = tuple(running)
        self._answers, self._same = {}, {}
        self._missing = {rank for rank in running if rank in self._started}
        if request.why == "timeout":
            self._answers = {rank: self._early[rank] for rank in running if rank in self._early}
            self._missing -= self._answers.keys()
            if self._answers and self._has_all(running):
                self._until = now
                return
        extra = NATIVE_SECONDS + NATIVE_SECONDS_PER_RANK * len(running) if request.native else 0.0
        self._until = now + (ANSWER_SECONDS + extra if running else 0.0)
        self._hub.nodes.send_all(DumpStacks(self._number, request.why != SAMPLE, request.insists, request.native))

    def _ended(self, request: _StackRequest, now: float, running: Collection[int]) -> None:
        if request.why == SAMPLE:
            self._sampled(request, now, running)
            return
        if request.why in (STALL, VAIN, IDLE) and not self._is_confirmed(request.why, running):
            return
        if request.why == SOON:
            self._early = {rank: one for rank, one in self._answers.items() if one.threads}
            return
        asked = [rank for rank in sorted(self._ranks) if rank in running or rank in self._answers]
        ranks = [rank for rank in asked if request.wants(rank)]
        answers = [self._answers[rank] for rank in sorted(self._answers) if request.wants(rank)]
        at = time.monotonic_ns()
        starting = [rank for rank in ranks if rank not in self._started]
        self._hub.post(StacksTaken(at, request.why, request.asker, request.full, ranks, answers, starting))
        if request.why == IDLE:
            del self._watches[IDLE]  # it is said once
        elif request.why == VAIN:
            self._hub.post(Stalled(at, self._watches[VAIN].quiet(now), vain=True))
        elif request.why == STALL:
            self._quiet, self._stalled = self._watches[STALL].quiet(now), self._watches[STALL].found
            from launchpad.head.pair_check import PairCheck

            open_nodes = self._hub.nodes.open
            here = {node.index: node.address for node in self._hub.plan.nodes if node.index in open_nodes}
            self._pairs = PairCheck(here, self._hub.nodes.send, now)
            self._check(self._pairs, now)

    def _sampled(self, request: _StackRequest, now: float, running: Collection[int]) -> None:
        """The stacks of all ranks are here, in brief: if they show what is looked for, all of them are wanted.

        Only where the user has asked for it, ranks that don't answer are interrupted.
        """
        watch = self._watches.get(request.watch)
        if watch is None:
            return
        insists = request.watch == STALL
        if insists and not request.insists and any(one.why == SILENT for one in self._answers.values()):
            self._waiting.appendleft(_StackRequest(SAMPLE, STALL))
        elif watch.sampled(now, self._answers, running):
            self._waiting.appendleft(_StackRequest(request.watch, insists=insists))

    def _is_confirmed(self, why: str, running: Collection[int]) -> bool:
        """Whether all stacks say the same."""
        if why not in self._watches or set(running) != set(self._ranks):  # it went on at the last moment
            return False
        if why == VAIN:
            from launchpad.head.vain_waits import in_vain

            if not in_vain(self._answers.values()):  # nor is it while they wait there
                del self._watches[VAIN]
                return False
        return True

    def _check(self, pairs: "PairCheck", now: float) -> None:
        """Report the stall, once it is known which nodes can't reach each other."""
        pairs.tick(now)
        if pairs.over or now >= pairs.deadline:
            self._pairs = None
            at = time.monotonic_ns()
            if apart := pairs.apart:
                self._hub.post(NodesApart(at, apart))
            self._hub.post(Stalled(at, self._quiet, role=self._stalled))


def _watch_for_stalls(stall_timeout: float, worlds: Collection[str], hub: Hub) -> "StallWatch | WorldStalls":
    now = hub.clock.now()
    if hub.plan.roles:
        from launchpad.head.world_stalls import WorldStalls

        return WorldStalls(stall_timeout, worlds, hub.role_of, now)
    from launchpad.head.stall import StallWatch

    return StallWatch(stall_timeout, now)
