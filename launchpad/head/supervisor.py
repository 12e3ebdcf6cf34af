"""The head's event loop: one thread owns the job's state; all others only read, and put events into its inbox.

The loop sleeps until the next event or deadline. Events go to the state machine, which returns actions, and to the
sinks, which show and record them.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.head.arrivals import Arrivals, Arrived, Dialled, Door, JoinFailed
from launchpad.head.arrivals import Reopen as ReopenLink
from launchpad.head.attended import Attended
from launchpad.head.bringup import BringUp
from launchpad.head.cluster import Cluster
from launchpad.head.flow import Flow
from launchpad.head.machine import FinishAttempt, Leave, Machine, Meet, Release, Reopen, Restart, Suspend, TakeStacks
from launchpad.head.master_search import MasterSearch, Met
from launchpad.head.profiles import Profiles
from launchpad.head.samples import Samples, is_valid
from launchpad.head.session_calls import CallSender, Orders, SendCall
from launchpad.head.sink import Sink
from launchpad.head.stack_requests import StackRequests
from launchpad.head.stdin_forwarder import StdinForwarder
from launchpad.job.masking import masked_words
from launchpad.job.membership import Membership, Seat
from launchpad.job.outcome import NODE_LOST, STOPPING, Cause
from launchpad.protocol.commands import Command, Credit, JobEnded, MpiReply, MpiWorld, PmixReply, StartMore
from launchpad.protocol.commands import Finish as FinishCommand
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.commands import StdinData as InputFrame
from launchpad.protocol.events import (
    RESULT,
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    ArrivalTimes,
    AtPrompt,
    BarrierIn,
    ChunksTaken,
    ClocksSeen,
    Crashed,
    DebuggerReady,
    DebugRequested,
    ExceptionRaised,
    Hindrances,
    ImageUnused,
    LinkClosed,
    Listening,
    ModulesImported,
    MpiFound,
    MpiRequest,
    NodeFacts,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    NodesAwaited,
    NoMpi,
    NotRestarted,
    Output,
    PhaseChanged,
    PmixFetched,
    PmixRequest,
    Pong,
    PortHeld,
    PortsHeld,
    ProfileRequested,
    ProfileTaken,
    RankExited,
    RankFailed,
    RankRaised,
    RanksBound,
    RanksSpawned,
    RankStarted,
    Reached,
    Restarted,
    Sampled,
    SampleRequested,
    SeatsReady,
    SpareReady,
    StackDump,
    StartFailed,
    StdinRead,
    StdinTaken,
    StopRequested,
    Suspended,
    TopologyRead,
    TunnelRead,
    TunnelWritten,
    Written,
)

if TYPE_CHECKING:
    from launchpad.head.debuggers import RankDebuggers
    from launchpad.head.injection import Injector
    from launchpad.head.mpi_worlds import MpiWorlds

# The figures of a rank in Hindrances.
_HINDRANCES = 8

# For so many seconds events are taken before the deadlines are looked at again. To look takes as long as most events;
# it must not wait for the end of a flood of output.
_BETWEEN_DEADLINES = 0.01


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(self, bringup: BringUp) -> None:
        """Take over the nodes of a finished `bringup`."""
        self.nodes = bringup.nodes
        self._bringup = bringup
        self._inbox = bringup.inbox
        self._sinks: Sequence[Sink] = ()
        self._node_of: dict[int, int] = {}
        self._ranks_of: dict[int, list[int]] = {}
        self._lost: set[int] = set()  # nodes
        self._asked: set[int] = set()  # nodes whose launchpad has got a signal that stops the job; -1: ours
        self._worlds: MpiWorlds | None = None
        self._gone: set[int] = set()  # ranks that have exited in this attempt
        self._suspended = 0.0  # how many seconds we were suspended; they don't count towards deadlines
        self._attended = Attended()
        self._debuggers: RankDebuggers | None = None
        self._profiles = Profiles(self._send, self._dispatch)
        self._stdin_node: Any = None  # the node that has what was read of our stdin
        self.leaving = False  # don't wait for output that nobody takes

    def run(
        self,
        cluster: Cluster,
        sinks: Sequence[Sink],
        *,
        terminal: Sequence[int] = (),
        reopen: ReopenLink | None = None,
        door: Door | None = None,
        sends_input: bool = False,
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
        may_restart: Callable[[], str] = lambda: "",
    ) -> tuple[int, Cause | None]:
        """Start the ranks and run the job to its end. Returns the exit code and, unless it is 0, the cause.

        The job's limits are those of the cluster's spec. `reopen` makes a new link to a lost node; it is called in
        threads of its own. `door`: where machines join while the job runs. `sends_input`: the rank that gets our stdin
        is on another machine. `waited`: whether an exception says that its rank waited in vain. `may_restart` is asked
        before each restart, when all sinks know everything about the last attempt: it returns why the ranks must not
        start again, or "".
        """
        self._spec = spec = cluster.spec
        self._cluster = cluster
        self._arrivals = Arrivals(cluster, reopen, door, self._inbox.put)
        self._search: MasterSearch | None = None  # one at a time: the agents answer whoever asks
        self._wanted: Sequence[Seat] = ()  # the nodes that are to meet
        self._apart: set[int] = set()  # nodes that the others can't reach, so that it is no use to reconnect to them
        self._sinks = sinks
        self._plan = plan = cluster.plan
        self._terminal = terminal
        self._stop_at = spec.limits.stop_at
        seats = plan.seats
        taking_part = {seat.node for seat in seats}
        machine = Machine(
            seats,
            spec.limits,
            self._clock(),
            spares={node.index: node.slots for node in plan.nodes if node.index not in taking_part},
            membership=cluster.membership or Membership(len(seats), len(seats), returns=reopen is not None),
            waited=waited,
            may_restart=may_restart,
            silence=self.nodes.silence if self.nodes.remote else 0.0,
        )
        self._addresses = {node.index: node.address for node in plan.nodes}
        self._stack_requests = StackRequests(
            self.nodes, self._bringup.post, spec.limits.stall_timeout, self._clock(), self._addresses
        )
        self._samples = Samples(
            self.nodes, lambda node: self._ranks_of.get(node, []), spec.sample, time.monotonic(), self._dispatch
        )
        self._injector: Injector | None = None
        if spec.faults is not None:
            from launchpad.head.injection import Injector

            self._injector = Injector(spec.faults, plan, self.nodes, self._dispatch, self._clock())
        self._calls = CallSender(self.nodes)
        self._flow = Flow(len(plan.ranks), self._give_credit)
        for event in self._bringup.early:
            self._bringup.post(event)
        self.nodes.forgive(time.monotonic())
        if plan.debug_rank >= 0:
            self._rank_debuggers().listen(plan.debug_rank, spec.debug[1] if spec.debug else 0)
        self._input = StdinForwarder(self._bringup.post, keys=bool(terminal)) if sends_input else None
        try:
            self._supervise(machine)
        finally:
            if self._input:
                self._input.close()
            if self._debuggers:
                self._debuggers.close()
        self._arrivals.end()
        return machine.exit_code, machine.cause

    def _supervise(self, machine: Machine) -> None:
        """The loop."""
        self._start(attempt=0, restarts=0)
        while self._goes_on(machine):
            for source, event in self._news(machine):
                self._take(source, event, machine)
                if not self._goes_on(machine):
                    break
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:
                for silent, since in self.nodes.tick(now):
                    self._lose(silent, f"no heartbeat for {self.nodes.silence:g} s", since, machine)
            if self._stop_at is not None and self._stop_at <= time.time():
                self._stop_at = None
                reason = "the allocation is about to end (--stop-before)"
                self._pass_on(StopRequested(time.monotonic_ns(), signal.SIGTERM, reason), -1, machine)
            for sink in self._sinks:
                if sink.deadline is not None and sink.deadline <= time.monotonic():
                    sink.tick(time.monotonic())
            if machine.cause is not None:  # from here on nobody's patience counts
                self._attended.clear(self._clock())
            watching = machine.phase == "running" and not self._attended
            self._stack_requests.tick(self._clock(), machine.running, watching=watching)
            self._samples.tick(time.monotonic(), machine.running, self._arrivals.names)
            if self._injector:
                self._injector.tick(self._clock(), machine.phase)
            self._act(machine.tick(self._limits_clock()))

    def _take(self, source: int, event: Any, machine: Machine) -> None:
        """Handle an event from a node, or one of our own (source -1)."""
        match event:
            case StdinRead():
                node = self._node_of.get(self._plan.input_rank)
                if node is not None:
                    self.nodes.send(node, InputFrame(event.data))
                return
            case Dialled():
                self._arrivals.take(event)
                return
            case Arrived():
                self._arrived(event, machine)
                return
            case JoinFailed(name, reason):
                event = NodeRefused(time.monotonic_ns(), name, reason)
            case Met():
                self._met(event, machine)
                return
            case ProfileRequested():
                self._profiles.ask(event, machine.running)
                return
            case SampleRequested():
                self._samples.ask(event)
                return
            case DebugRequested():
                self._rank_debuggers().ask(event, machine.running)
                return
            case SendCall():
                self._calls.send(event)
                return
            case Orders(commands):
                for node, command in commands:
                    if node in self.nodes.open:
                        self.nodes.send(node, command)
                return
        if source < 0 and self._debuggers and self._debuggers.take(event):
            return
        if source < 0:
            if type(event) is StopRequested:
                if event.signum == signal.SIGQUIT:
                    self._stack_requests.ask("asked")
                if event.signum == signal.SIGCONT and self._input:  # the shell's fg
                    self._input.go_on()
                if self._is_the_same_request(source, event, machine):
                    return
            self._pass_on(event, source, machine)
            return
        match event:
            case Pong():
                pass
            case ChunksTaken(_, size):
                self._calls.taken(source, size)
            case StdinTaken(_, size) if self._input:
                self._input.taken(size)
            case Listening() | Reached() | PortHeld() if self._search:
                self._search.inbox.put((source, event))
            case Listening() | Reached() if self._stack_requests.answers(source, event, self._clock()):
                pass
            case (
                Listening()
                | Reached()
                | PortHeld()
                | PortsHeld()
                | AgentReady()
                | NodeFacts()
                | TopologyRead()
                | SpareReady()
            ):
                pass  # a late answer
            case LinkClosed(at):
                if source in self.nodes.open:
                    self.nodes.ended(source)
                    if machine.phase != "over":
                        self._lose(source, "its agent hung up", at, machine)
            case AgentFailed(_, reason, trace) if source not in self._lost:
                self._lose(source, reason, self.nodes.in_our_time(source, event).time, machine, trace)
            case StopRequested() if source in self._lost:  # it has left, or is no longer part of the job
                pass
            case StopRequested():  # a signal to the launchpad of a node that has joined
                if event.signum == signal.SIGQUIT:
                    self._stack_requests.ask("asked")
                if self._is_the_same_request(source, event, machine):
                    return
                event = self.nodes.in_our_time(source, event)
                if event.signum in STOPPING and machine.can_spare(source, self._limits_clock()):
                    event = NodeLeaving(event.time, source, event.signum)
                self._pass_on(event, -1, machine)
            case Suspended():
                if self.nodes.suspended(source):
                    if self._input:
                        self._input.rest()
                    self._suspended += self.nodes.stand_still()
                    if self._input:
                        self._input.go_on()
            case _ if source in self._lost:  # its ranks were lost with it, whatever it says now
                pass
            case _ if not self._makes_sense(source, event):
                self._lose(source, f"its agent sent an invalid message: {event!r:.80}", time.monotonic_ns(), machine)
            case MpiRequest(_, rank, ["mcmd=spawn", *_]):
                self._spawn(rank, event, machine)
            case PmixRequest(verb="spawn") if self._worlds:
                self._spawn(self._worlds.asker(event), event, machine)
            case NoMpi() if machine.cause is not None:
                pass
            case MpiFound() if self._worlds:
                failed = self._worlds.differs(source, self.nodes.in_our_time(source, event))
                if failed:
                    self._pass_on(failed, source, machine)
            case ProfileTaken():
                self._profiles.take(event)
            case Sampled():
                self._samples.take(source, self.nodes.in_our_time(source, event))
            case ArrivalTimes():
                timed = self.nodes.in_our_time(source, event)
                self._dispatch(timed._replace(doubt=self.nodes.doubt(source)))
            case Hindrances():
                self._dispatch(self.nodes.in_our_time(source, event))
            case DebuggerReady():
                self._rank_debuggers().ready(event)
            case TunnelRead() | TunnelWritten():
                self._rank_debuggers().hear(event)
            case StackDump():
                self._stack_requests.on(event, self._clock())
            case ImageUnused() | ModulesImported():
                self._pass_on(self.nodes.in_our_time(source, event)._replace(node=source), source, machine)
            case BarrierIn() | MpiRequest() | PmixRequest() | PmixFetched() if self._worlds:
                try:
                    replies = self._worlds.on(source, event)
                except ValueError:
                    at = self.nodes.in_our_time(source, event).time
                    self._lose(source, f"its agent sent an invalid message: {event!r:.80}", at, machine)
                    return
                for node, command in replies:
                    self.nodes.send(node, command)
                self._look_for_absent(machine)
            case _:
                if type(event) is AtPrompt:
                    self._attend(("prompt", event.rank), event.waits)
                self._pass_on(self.nodes.in_our_time(source, event), source, machine)
                if type(event) is RankExited and self._worlds:
                    self._worlds.left(source, event)
                    self._look_for_absent(machine)

    def _is_the_same_request(self, source: int, event: StopRequested, machine: Machine) -> bool:
        """Whether this signal has stopped the job already: a scheduler sends it to us and to the nodes that joined."""
        new = source not in self._asked
        if event.signum in STOPPING:
            self._asked.add(source)
        is_stopping = machine.cause is not None and machine.cause.kind == "signal"
        return new and is_stopping and event.signum in (signal.SIGTERM, signal.SIGHUP)

    def _pass_on(self, event: Any, source: int, machine: Machine) -> None:
        self._stack_requests.on(event, self._clock())
        self._dispatch(event)
        self._act(machine.on(event, self._limits_clock(), source))

    def _attend(self, wait: Hashable, begins: bool) -> None:
        """Something begins to wait for a person, or waits no more."""
        now = self._clock()
        if begins:
            self._attended.begin(wait, now)
        elif self._attended.end(wait, now):
            self._stack_requests.look_afresh(now)

    def _send(self, rank: int, command: Command) -> None:
        """Send a command to a rank's node."""
        if rank in self._node_of:
            self.nodes.send(self._node_of[rank], command)

    def _rank_debuggers(self) -> RankDebuggers:
        if self._debuggers is None:
            from launchpad.head.debuggers import RankDebuggers

            def folder_of(rank: int) -> str:
                node = self._node_of[rank]
                return self._plan.nodes[node].cwd if self.nodes[node].link.remote else ""

            self._debuggers = RankDebuggers(self._bringup.post, self._send, self._attend, folder_of, self._dispatch)
        return self._debuggers

    def _look_for_absent(self, machine: Machine) -> None:
        failed = self._worlds.absent() if self._worlds and machine.phase == "running" else None
        if failed:
            self._pass_on(failed, self._node_of[failed.rank], machine)

    def _spawn(self, by: int, request: MpiRequest | PmixRequest, machine: Machine) -> None:
        """A rank spawns others (MPI_Comm_spawn), which run on the first node."""
        assert self._worlds is not None
        if machine.phase != "running":
            return
        try:
            world, entries = self._worlds.spawn(request, machine.attempt)
        except (ValueError, LookupError, TypeError) as error:
            self._answer_spawn(by, request, str(error), None)
            return
        node = self._plan.taking_part[0].index
        self._node_of.update(dict.fromkeys(world.ranks, node))
        self._ranks_of[node] += world.ranks
        machine.join(world.ranks)
        self._dispatch(RanksSpawned(time.monotonic_ns(), by, node, world.ranks, masked_words(entries[0]["argv"])))
        if isinstance(request, PmixRequest):  # the PMIx servers of the other nodes must know the world too
            for other in self._plan.taking_part[1:]:
                self.nodes.send(other.index, world._replace(ranks=[], first=0))
        self.nodes.send(node, world)
        self.nodes.send(node, StartMore(entries))
        self._answer_spawn(by, request, "", world)

    def _answer_spawn(self, by: int, request: MpiRequest | PmixRequest, problem: str, world: MpiWorld | None) -> None:
        answer: Command
        if isinstance(request, PmixRequest):
            answer = PmixReply(request.number, 0 if world else -27, world.number if world else None)
        elif world:
            answer = MpiReply(by, f"cmd=spawn_result rc=0 errcodes={','.join('0' * world.size)}")
        else:
            answer = MpiReply(by, f"cmd=spawn_result rc=1 msg={problem.replace(' ', '_')}")
        self.nodes.send(self._node_of[by], answer)

    def _arrived(self, arrived: Arrived, machine: Machine) -> None:
        """A node that was brought up can take part."""
        newcomer = arrived.newcomer
        number = arrived.node
        if number is None:
            number = self._cluster.number_of(newcomer.place.name, self._lost)
        if machine.phase == "over" or number in self.nodes.open:  # too late: its agent would never be told to leave
            if arrived.node is not None:  # others have joined, and will be told how the job ended
                newcomer.node.link.abandon()
            return
        self._lost.discard(number)
        self._asked.discard(number)
        self._cluster.add(number, newcomer)
        self.nodes.adopt(number, newcomer.node)
        for event in newcomer.talk.rest():  # it may have ended just now
            self._inbox.put((number, event))
        nodes = self._plan.nodes
        name = nodes[number].name if number < len(nodes) else self.nodes.name(number)
        joined = NodeJoined(time.monotonic_ns(), number, name, newcomer.slots)
        self._pass_on(joined, -1, machine)

    def _meet(self, seats: Sequence[Seat]) -> None:
        self._wanted = seats
        if self._search is not None:
            return
        if self._cluster.must_meet(seats):
            self._search = MasterSearch(self._cluster, self.nodes, seats, self._inbox.put)
        else:
            self._bringup.post(SeatsReady(time.monotonic_ns(), seats))

    def _met(self, met: Met, machine: Machine) -> None:
        self._search = None
        seats = met.search.seats
        if seats != self._wanted:  # the nodes have changed meanwhile
            if self._wanted:
                self._meet(self._wanted)
            return
        self._wanted = ()
        if met.rendezvous:
            self._cluster.settle(seats, met.rendezvous)
            self._pass_on(SeatsReady(time.monotonic_ns(), seats), -1, machine)
        for node, reason in met.reasons.items():
            if node in self.nodes.open:
                self._apart.add(node)
                self._lose(node, reason, time.monotonic_ns(), machine)

    def _lose(self, node: int, reason: str, at: int, machine: Machine, trace: str = "") -> None:
        self._lost.add(node)
        if self._search is not None:
            self._search.lose(node)
        self.nodes.abandon(node, JobEnded(NODE_LOST, [f"the job counts this node as lost: {reason}"]))
        ranks = self._ranks_of.get(node, [])
        if self._debuggers:
            self._debuggers.gone(ranks)
        self._profiles.lose(ranks, "its node is lost")
        self._pass_on(NodeLost(at, node, reason, ranks, trace), node, machine)

    def _release(self, node: int, signum: int) -> None:
        """A node leaves; what it says from now on doesn't count."""
        self._lost.add(node)
        if self._search is not None:
            self._search.lose(node)
        self.nodes.send(node, JobEnded(128 + signum, ["this node has left the job, which goes on without it"]))
        self.nodes.forget(node)

    def _makes_sense(self, source: int, event: Any) -> bool:
        """Whether this agent may send this event now: about its own ranks only, and one exit per rank."""
        match event:
            case Output(_, rank, stream):
                return self._node_of.get(rank) == source and stream in (STDOUT, STDERR, RESULT)
            case RankStarted(_, rank) | StartFailed(_, rank) | RankRaised(_, rank) | StackDump(_, rank):
                return self._node_of.get(rank) == source
            case DebuggerReady(_, rank) | ProfileTaken(_, rank):
                return self._node_of.get(rank) == source
            case Sampled():
                return is_valid(event)
            case ArrivalTimes(_, rank):
                return self._node_of.get(rank) == source
            case Hindrances():
                return all(len(row) == _HINDRANCES and self._node_of.get(int(row[0])) == source for row in event.ranks)
            case TunnelRead(_, number) | TunnelWritten(_, number):
                rank = self._debuggers.rank_of(number) if self._debuggers else -1
                return rank < 0 or self._node_of.get(rank) == source
            case ExceptionRaised() | Crashed():
                return self._node_of.get(event.rank) == source
            case RankFailed(_, rank, code):
                return self._node_of.get(rank) == source and 0 < code < 256
            case AtPrompt(_, rank):
                return self._node_of.get(rank) == source and rank == self._plan.input_rank
            case MpiRequest(_, rank, lines):
                return self._worlds is not None and self._node_of.get(rank) == source and bool(lines)
            case PmixRequest() | PmixFetched() if self._worlds is None:
                return False
            case PmixRequest():
                return self._worlds is not None and self._worlds.makes_sense(source, event)
            case BarrierIn():
                return self._worlds is not None and self._worlds.makes_sense(source, event)
            case RankExited(_, rank, code):
                first = self._node_of.get(rank) == source and rank not in self._gone
                self._gone.add(rank)
                return first and -256 < code < 256
        return True

    def _clock(self) -> float:
        """The job's time in seconds, which stops while we are suspended."""
        return time.monotonic() - self._suspended

    def _limits_clock(self) -> float:
        """The job's time without what a person took at a prompt or in a debugger, for its time limits."""
        return self._attended.clock(self._clock())

    def _start(self, attempt: int, restarts: int) -> None:
        plan = self._plan
        if attempt:
            self._profiles.lose(self._node_of, "it has ended, and the ranks are started again")
            if self._debuggers:
                self._debuggers.gone(list(self._node_of))
        self._flow.start(attempt)
        self._gone.clear()
        self._ranks_of = {node.index: [rank.rank for rank in node.ranks] for node in plan.nodes}
        self._node_of = {rank: node for node, ranks in self._ranks_of.items() for rank in ranks}
        if plan.debug_rank in self._node_of:  # else the job goes on with fewer ranks
            self._rank_debuggers().begin(plan.debug_rank)
        if self._spec.report_bindings or any(rank.binding for rank in plan.ranks):
            self._dispatch(RanksBound(time.monotonic_ns(), plan.bindings))
        if plan.mpi:
            from launchpad.head.mpi_worlds import MpiWorlds

            self._worlds = MpiWorlds(plan, f"launchpad-{os.urandom(8).hex()}-{attempt}")
        for node in plan.nodes:
            if node.index not in self.nodes.open:
                continue
            if self._worlds and node.ranks:
                self.nodes.send(node.index, self._worlds.begin(node.index))
            if node.ranks or attempt == 0:
                sends = self._input is not None
                start = plan.start(node, attempt, restarts, self._flow.window, self._terminal, sends_input=sends)
                self.nodes.send(node.index, start)
        if plan.input_rank in self._node_of:  # else the job goes on with fewer ranks
            reader = self.nodes[self._node_of[plan.input_rank]]
            if self._input and self._stdin_node not in (None, reader):
                self._input.reset()
            self._stdin_node = reader

    def _goes_on(self, machine: Machine) -> bool:
        return bool(self.nodes.open or machine.phase == "clearing") and not self.leaving

    def _news(self, machine: Machine) -> Iterator[tuple[int, Any]]:
        """What is in the inbox, once there is something; nothing at the next deadline."""
        try:
            yield self._inbox.get(timeout=None if self._inbox.qsize() else self._patience(machine))
        except queue.Empty:
            return
        until = time.monotonic() + _BETWEEN_DEADLINES
        while self._inbox.qsize() and time.monotonic() < until:
            yield self._inbox.get()

    def _patience(self, machine: Machine) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        waits = [sink.deadline - time.monotonic() for sink in self._sinks if sink.deadline is not None]
        if self._samples.deadline is not None:
            waits.append(self._samples.deadline - time.monotonic())
        if self._stack_requests.deadline is not None:
            waits.append(self._stack_requests.deadline - self._clock())
        if self._injector and self._injector.deadline is not None:
            waits.append(self._injector.deadline - self._clock())
        if self._stop_at is not None:
            waits.append(self._stop_at - time.time())
        if machine.deadline is not None and not self._attended:
            waits.append(machine.deadline - self._limits_clock())
        if self.nodes.deadline is not None:
            waits.append(self.nodes.deadline - time.monotonic())
        return max(0.0, min(waits)) if waits else None

    def _dispatch(self, event: Any) -> None:
        if type(event) is Written:
            self._flow.written(event.output)
            return
        if self._injector:
            self._injector.on(event)
        holders = 0
        for sink in self._sinks:
            holders += sink.on(event)
        if type(event) is Output:
            self._flow.shown(event, holders)

    def _give_credit(self, rank: int, stream: int, size: int) -> None:
        self.nodes.send(self._node_of[rank], Credit(rank, stream, size))

    def _act(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case SendSignal():
                    self.nodes.send_all(action)
                case PhaseChanged():
                    now = time.monotonic_ns()  # the state machine's clock stops while we are suspended
                    if action.phase == "stopping" and self.nodes.remote:
                        self._dispatch(ClocksSeen(now, [[node, self.nodes.doubt(node)] for node in self.nodes.remote]))
                    self._dispatch(action._replace(time=now))
                case NotRestarted() | NodesAwaited():
                    self._dispatch(action._replace(time=time.monotonic_ns()))
                case FinishAttempt(True):
                    self._arrivals.end()
                    self.nodes.send_all(FinishCommand(leave=True))
                case FinishAttempt():
                    for seat in self._plan.seats:
                        if seat.node in self.nodes.open:
                            self.nodes.send(seat.node, FinishCommand(leave=False))
                case Meet(seats):
                    self._meet(seats)
                case Restart():
                    self._restart(action)
                case Reopen(nodes):
                    for node in set(nodes) - self._apart:
                        self._arrivals.seek(node, self.nodes.name(node))
                case Release(node, signum):
                    self._release(node, signum)
                case TakeStacks(why):
                    self._stack_requests.ask(why)
                case Suspend():
                    self.nodes.suspend()
                case Leave():
                    self.leaving = True

    def _restart(self, restart: Restart) -> None:
        before = self._plan.seats
        self._plan = self._cluster.seat(restart.seats)
        self._addresses.update((node.index, node.address) for node in self._plan.nodes)
        changed = self._plan.seats != before
        cause = restart.cause
        self._dispatch(
            Restarted(
                time.monotonic_ns(),
                restart.attempt,
                self._spec.limits.max_restarts.most,
                cause.rank,
                cause.code,
                cause.node,
                restart.restarts,
                restart.counted,
                self._plan.by_node if changed else [],
                [node.index for node in self._plan.nodes if node.shown_there] if changed else [],
                self._spec.limits.max_restarts.period or 0.0,
            )
        )
        self._flow.resize(len(self._plan.ranks))
        self._start(restart.attempt, restart.restarts)
