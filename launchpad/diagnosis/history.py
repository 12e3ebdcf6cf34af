"""Folds a job's events into what is known about its current attempt, which the verdict is based on. Pure."""

from __future__ import annotations

import copy
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.diagnosis import escapes
from launchpad.diagnosis.output_tail import OutputTail
from launchpad.job.outcome import STOPPING, ranks_in_words, signal_name
from launchpad.protocol.events import (
    STDERR,
    STDOUT,
    ArrivalsCompared,
    ClocksSeen,
    ConsoleClosed,
    Crashed,
    ExceptionRaised,
    FaultInjected,
    HeadLost,
    HeadResumed,
    JobOver,
    JobPlanned,
    MilestoneReached,
    ModulesImported,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodesApart,
    NotRestarted,
    NotResumable,
    Output,
    PhaseChanged,
    PortsTold,
    RankExited,
    RankFailed,
    RankRaised,
    RanksHeld,
    RanksSpawned,
    RankStarted,
    Restarted,
    RoleReady,
    SignalPassedOn,
    Stalled,
    StartFailed,
    StopRequested,
    WorldRestarted,
    WorldStopping,
)

if TYPE_CHECKING:
    from launchpad.diagnosis.stragglers import Straggler, Tally
    from launchpad.job.roles import RoleNames

# Which comparisons of arrivals say what is the case now: so many latest ones, a minute's with the usual samples.
_RECENT = 6

# Signals to us that ask nothing of the programs: they suspend the job, or show its stacks.
_OURS = (signal.SIGTSTP, signal.SIGCONT, signal.SIGQUIT)

# In place of a node.
_EVERYWHERE = -1

# How much of the end of each rank's standard output the verdict looks at. Of its error output, it is all that is kept.
STDOUT_BYTES = 4096

# How many failures of worlds that were started again are known: the latest.
MOST_DOWNS = 50


# What identifies the head's process.
_OF_HEAD = ("pid", "host", "boot", "pids", "born")


class RankHistory:
    """One rank in this attempt."""

    def __init__(self, rank: int, node: int = 0, *, has_input: bool = False) -> None:
        """`has_input`: it is the one that has our standard input."""
        self.rank = rank
        self.has_input = has_input
        self.node = node
        self.pid = 0
        self.started = 0
        self.exited: RankExited | None = None
        self.failed: RankFailed | None = None
        self.not_started: StartFailed | None = None
        self.raised: list[ExceptionRaised] = []
        self.recorded = ""  # the contents of its error file
        self.crash = ""  # faulthandler's report
        self.tail = OutputTail()

    @property
    def errors(self) -> str:
        """The last of its stderr, without colours."""
        return escapes.removed(self.tail.of(STDERR)).decode(errors="replace")

    @property
    def output(self) -> str:
        """The last of its stdout, as far as the verdict looks, without colours."""
        return escapes.removed(self.tail.of(STDOUT)[-STDOUT_BYTES:]).decode(errors="replace")


class History:
    """Everything that is known. Times are in ns of the head's monotonic clock."""

    def __init__(self, events: Iterable[Any] = ()) -> None:
        self.planned = JobPlanned(0, 0.0, "", 0, "", [], "", [], {}, 0.0, "")
        self.ranks: dict[int, RankHistory] = {}
        self.names: dict[int, str] = {}
        self._programs: dict[int, str] = {}  # by rank, if they run several
        self._roles: RoleNames | None = None
        self.restarts: dict[str, int] = {}  # by world: how often it was started again alone
        self.addresses: dict[str, str] = {}  # HOST:PORT: the world that others find there
        # Worlds that have failed and were started again: each one's history until then, and when it was ready; 0: not.
        self.downs: list[tuple[str, History, int]] = []
        self.attempt = 0
        self.begun = 0  # when this attempt did
        self.heads: list[HeadLost] = []  # that have led the job before this one
        self.over: JobOver | None = None
        self.ended = False  # its ranks are gone
        self.lost: dict[int, NodeLost] = {}
        self.injected: list[FaultInjected] = []
        self._reset()
        for event in events:
            self.on(event)

    def _reset(self) -> None:
        """Reset what belongs to one attempt."""
        self.started = 0
        self.imported = 0.0  # seconds that a node needed to import what its ranks share; the longest
        self.grouped = 0  # when the last rank began its first process group, if that is recorded
        # A host may be lost in the attempt after that in which it fell silent.
        self.injected = [one for one in self.injected if one.rank < 0 and one.node not in self.lost]
        self.lost = {}
        self.doubts: dict[int, int] = {}  # by node: the uncertainty of its clock, in ns, when it was greatest
        self.stop: PhaseChanged | None = None
        self.kind = ""  # what ended it: the cause in a PhaseChanged
        self.sent: list[tuple[int, int]] = []  # (time, signal) sent to all ranks
        # The other signals that we got and sent to all ranks, and those of joined launchpads, with their nodes.
        self._passed_on: set[tuple[int, int]] = set()
        self.signum = 0  # the first signal that told us to stop
        self.time_to_stop = ""  # why it was not a signal, but time to stop
        self.console = ""
        self.held: RanksHeld | None = None
        self.stalled = 0.0  # seconds
        self.stalled_role = ""  # only the ranks of this one had stalled
        self.in_vain = False  # the ranks waited for what nobody was left to do
        self.never_started: list[int] = []  # ranks of roles that were waiting for others
        self.stops: dict[int, PhaseChanged] = {}  # by rank of a world that was stopped alone: how
        self.not_resumable = ""  # why nothing can take over if launchpad is killed (--keep-running)
        self.not_restarted = ""  # why the ranks are not started again, although restarts are allowed
        self.apart: list[tuple[int, int]] = []  # pairs of nodes of which the first could not reach the second
        self._tally: Tally | None = None
        self._recent: deque[ArrivalsCompared] = deque(maxlen=_RECENT)
        self.ranks = {
            rank: self._rank(rank, node) for node, (_, ranks) in enumerate(self.planned.nodes) for rank in ranks
        }

    @property
    def several(self) -> bool:
        """Whether the job has more than one node."""
        nodes = self.planned.nodes
        if self._roles is None:
            return len(nodes) > 1
        return len({name for name, _ in nodes} - {name for name, _ in self.planned.roles}) > 1  # not named after them

    def role(self, rank: int) -> str:
        """The rank's role, if the job has several."""
        return self._roles.of.get(rank, ("", 0))[0] if self._roles else ""

    def own_rank(self, rank: int) -> int:
        """The rank's number in its role."""
        return self._roles.of.get(rank, ("", rank))[1] if self._roles else rank

    def in_words(self, ranks: Sequence[int]) -> str:
        """Ranks in words, by their roles if there are any."""
        return self._roles.several(ranks) if self._roles else ranks_in_words(list(ranks))

    def node_name(self, node: int) -> str:
        """The node's name, as the user gave it."""
        return str(self.planned.nodes[node][0]) if 0 <= node < len(self.planned.nodes) else f"node {node}"

    def host(self, node: int) -> str:
        """The name of the node's host. Nodes of roles on this machine are named after these."""
        name = self.node_name(node)
        return self.planned.host if name in dict(self.planned.roles) else name

    def takes_part(self, node: int) -> bool:
        """Whether the node has ranks; others are spares."""
        return 0 <= node < len(self.planned.nodes) and bool(self.planned.nodes[node][1])

    def name(self, rank: int) -> str:
        """The rank in words, with its host if there are several nodes."""
        if rank in self.names:
            return self.names[rank]
        if self._roles:
            return f"{self._roles.one(rank)}{self._where(rank)}"
        program = f" ({self._programs[rank]})" if rank in self._programs else ""
        return f"rank {rank}{program}{self._where(rank)}"

    def subject(self, rank: int) -> str:
        """The same, to be followed by a verb."""
        return f"{self.name(rank)}," if rank in self.names else self.name(rank)

    def _where(self, rank: int) -> str:
        return f" on {self.node_name(self.of(rank).node)}" if self.several else ""

    def straggler(self, *, recent: bool = False) -> Straggler | None:
        """The ranks for which the others wait; `recent`: lately."""
        if self._tally is None:
            return None
        from launchpad.diagnosis.stragglers import Tally

        return (Tally(self._recent) if recent else self._tally).straggler()

    @property
    def waited(self) -> float:
        """For how many seconds each rank waited in collectives for the last one, on average."""
        return self._tally.waited if self._tally is not None else 0.0

    def slow(self, *, recent: bool = False) -> str:
        """The same as a sentence; "" if there are none."""
        slow = self.straggler(recent=recent)
        if slow is None:
            return ""
        hosts = {self.node_name(self.of(rank).node) for rank in slow.ranks}
        where = f" (host {hosts.pop()})" if self.several and len(hosts) == 1 else ""
        return f"{self.in_words(slow.ranks)}{where} {slow.sentence}"

    def fault(self, one: FaultInjected) -> str:
        """An injected fault in words."""
        if not one.signum:
            return f"the link to {self.node_name(one.node)} cut"
        to = self.name(one.rank) if one.rank >= 0 else f"the agent on {self.node_name(one.node)}"
        return f"{signal_name(one.signum)} to {to}"

    def since_start(self, at: int) -> float:
        """Seconds between the start of the ranks and this. A forked rank may fail before its start is noted."""
        return max(0, at - self.started) / 1e9

    def of(self, rank: int) -> RankHistory:
        """What is known about the rank."""
        one = self.ranks.get(rank)
        if one is None:
            one = self.ranks[rank] = self._rank(rank)
        return one

    def _rank(self, rank: int, node: int = 0) -> RankHistory:
        return RankHistory(rank, node, has_input=rank == self.planned.input_rank)

    def passed_on(self, code: int, node: int) -> int:
        """The signal that was passed on to a rank of this node, if it ended the rank with this exit code; else 0.

        A shell exits with 128 + n if the command that it waits for dies of signal n.
        """
        signum = -code if code < 0 else code - 128
        return signum if {(signum, _EVERYWHERE), (signum, node)} & self._passed_on else 0

    def on(self, event: Any) -> None:
        """Add an event."""
        match event:
            case Output(rank=rank, stream=stream, data=data):
                if stream in (STDOUT, STDERR):
                    self.of(rank).tail.add(stream, data)
            case JobPlanned():
                self._plan(event)
            case HeadLost():
                self.heads.append(event)
            case RankStarted(time=at, rank=rank, pid=pid):
                self.started = self.started or at
                self.of(rank).started, self.of(rank).pid = at, pid
            case RankExited() | ExceptionRaised() | Crashed() | RankRaised() | RankFailed() | StartFailed():
                self._ended(self.of(event.rank), event)
            case ModulesImported(seconds=seconds):
                self.imported = max(self.imported, seconds)
            case MilestoneReached(time=at, what="group"):
                self.grouped = max(self.grouped, at)
            case RanksSpawned():
                if self._roles:
                    self._roles.join(event.by, event.ranks)
                for rank in event.ranks:
                    self.names[rank] = f"{self.in_words([rank])}, spawned by {self.in_words([event.by])}"
                    self.of(rank).node = event.node
            case NodeLost() if self.takes_part(event.node):
                self.lost.setdefault(event.node, event)
            case NodeJoined(node=node, name=name):
                if node >= len(self.planned.nodes):
                    self.planned = self.planned._replace(nodes=[*self.planned.nodes, (name, [])])
            case ClocksSeen(doubts=doubts):
                self.doubts |= {node: max(doubt, self.doubts.get(node, 0)) for node, doubt in doubts}
            case StopRequested() | NodeLeaving(node=0):  # the head's own, whose part ends
                self._signalled(event)
            case SignalPassedOn(signum=signum, node=node):
                self._passed_on.add((signum, node))
            case ConsoleClosed(reason=reason):
                self.console = reason
            case RanksHeld(why=why) if why != "idle":
                self.held = event
            case FaultInjected():
                self.injected.append(event)
            case NodesApart(pairs=pairs):
                self.apart = pairs
            case Stalled(seconds=seconds, vain=vain, role=role):
                self.stalled, self.in_vain, self.stalled_role = seconds, vain, role
            case ArrivalsCompared():
                self._compared(event)
            case PhaseChanged():
                self._phase(event)
            case Restarted():
                self.attempt, self.begun = event.attempt, event.time
                if event.nodes:
                    self.planned = self.planned._replace(nodes=list(event.nodes))
                self._reset()
            case WorldStopping() | WorldRestarted() | PortsTold() | RoleReady():
                self._of_world(event)
            case NotRestarted(reason=reason):
                self.not_restarted = reason
            case NotResumable() | HeadResumed() | JobOver():
                self._of_head(event)

    def _of_head(self, event: NotResumable | HeadResumed | JobOver) -> None:
        match event:
            case NotResumable(reason=reason):
                self.not_resumable = reason
            case HeadResumed():
                self.planned = self.planned._replace(**{name: getattr(event, name) for name in _OF_HEAD})
            case JobOver():
                self.over = event

    def _plan(self, event: JobPlanned) -> None:
        self.planned, self.begun = event, event.time
        if event.programs:
            from launchpad.job.programs import labels

            self._programs = labels(event.programs)
        if event.roles:
            from launchpad.job.roles import RoleNames

            self._roles = RoleNames(event.roles)
        self._reset()

    def stop_of(self, rank: int) -> PhaseChanged | None:
        """How the rank was stopped: with its world, or with all others."""
        stop = self.stops.get(rank, self.stop)
        return None if stop is None or self._came_late(stop, rank) else stop

    @property
    def stopped(self) -> set[int]:
        """The ranks that were running when they were told to stop."""
        stops = [*self.stops.values(), *([self.stop] if self.stop else [])]
        return {rank for stop in stops for rank in stop.ranks if not self._came_late(stop, rank)}

    def _came_late(self, stop: PhaseChanged, rank: int) -> bool:
        """Whether the rank was exiting before it could be stopped for a failure, which it may have caused."""
        one = self.ranks.get(rank)
        return stop.cause == "failure" and one is not None and one.exited is not None and one.exited.exiting

    def world(self, name: str) -> History:
        """What is known of this world, as if it were alone."""
        own = copy.copy(self)
        ranks = {rank for rank in self.ranks if self.role(rank) == name}
        own.ranks = {rank: one for rank, one in self.ranks.items() if rank in ranks}
        own.started = min((one.started for one in own.ranks.values() if one.started), default=0)
        own.attempt = self.restarts.get(name, 0)
        own.lost = {node: loss for node, loss in self.lost.items() if ranks.intersection(loss.ranks)}
        own.stop = next((self.stops[rank] for rank in ranks if rank in self.stops), None)
        own.kind = "failure"
        return own

    def _of_world(self, event: Any) -> None:
        match event:
            case WorldStopping():
                self._stop_world(event)
            case WorldRestarted():
                self._restart_world(event)
            case PortsTold():
                self.addresses |= dict.fromkeys(event.addresses, event.world)
            case RoleReady(time=at, role=name):
                self.downs = [(world, own, until or at * (world == name)) for world, own, until in self.downs]

    def _stop_world(self, event: WorldStopping) -> None:
        stop = PhaseChanged(event.time, "stopping", "failure", event.signum, event.seconds, event.ranks)
        for rank in self.ranks:
            if self.role(rank) == event.world:
                self.stops.setdefault(rank, stop)
        self.sent.append((event.time, event.signum))

    def _restart_world(self, event: WorldRestarted) -> None:
        self.restarts[event.world] = event.restarts
        if event.counted:
            self.downs = [*self.downs[1 - MOST_DOWNS :], (event.world, self.world(event.world), 0)]
        spawned = {rank for rank in self.ranks if self.role(rank) == event.world} - set(event.ranks)
        self.injected = [one for one in self.injected if one.rank not in {*spawned, *event.ranks}]
        for rank in spawned:  # nobody starts these again
            self.stops.pop(rank, None)
            del self.ranks[rank]
        for rank in event.ranks:
            self.stops.pop(rank, None)
            self.ranks[rank] = self._rank(rank, self.of(rank).node)

    def _ended(self, one: RankHistory, event: Any) -> None:
        """How a rank ended, or why: several events tell a part of it."""
        match event:
            case RankExited():
                one.exited = event
                stop = self.stops.get(event.rank, self.stop)
                if stop is not None and self._came_late(stop, event.rank):  # it may have been reaped long after
                    one.exited = event._replace(time=min(event.time, stop.time))
            case ExceptionRaised():
                one.raised.append(event)
            case Crashed():
                one.crash = event.stack
            case RankRaised():
                one.recorded = event.error
            case RankFailed():
                one.failed = one.failed or event
            case StartFailed():
                one.not_started = event

    def _signalled(self, event: StopRequested | NodeLeaving) -> None:
        if event.signum in STOPPING and not self.signum:
            self.signum = event.signum
            self.time_to_stop = event.reason if isinstance(event, StopRequested) else ""
        elif event.signum not in (*STOPPING, *_OURS):
            self._passed_on.add((event.signum, _EVERYWHERE))

    def _compared(self, event: ArrivalsCompared) -> None:
        from launchpad.diagnosis.stragglers import Tally

        self._tally = self._tally or Tally()
        self._tally.add(event)
        self._recent.append(event)

    def _phase(self, event: PhaseChanged) -> None:
        if event.phase == "over":
            self.ended = True
        if event.cause and self.stop is None:
            if self._roles:
                held = [rank for rank in event.ranks if not self.of(rank).started]
                self.never_started = [rank for rank in held if self.role(rank) not in self.restarts]
                event = event._replace(ranks=[rank for rank in event.ranks if self.of(rank).started])
            self.stop = event
        self.kind = event.cause or self.kind
        if event.signum:
            self.sent.append((event.time, event.signum))
