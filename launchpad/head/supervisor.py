"""The head's event loop: one thread owns the job's state; all others only read, and put events into its inbox.

The loop sleeps until the next event or deadline. Events go to the state machine, which returns actions, and to the
sinks, which show and record them.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.head.bringup import BringUp
from launchpad.head.flow import Flow
from launchpad.head.machine import FinishAttempt, Leave, Machine, Reopen, Restart, Suspend, TakeStacks
from launchpad.head.reconnect import Reconnect, Reopened
from launchpad.head.sink import Sink
from launchpad.head.stack_requests import StackRequests
from launchpad.head.stdin_forwarder import StdinForwarder
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan
from launchpad.protocol.commands import Credit, MpiReply, StartMore
from launchpad.protocol.commands import Finish as FinishCommand
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.commands import StdinData as InputFrame
from launchpad.protocol.events import (
    RESULT,
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    BarrierIn,
    ClockSeen,
    Crashed,
    ExceptionRaised,
    LinkClosed,
    Listening,
    MpiRequest,
    NodeFacts,
    NodeLost,
    Output,
    PhaseChanged,
    Pong,
    PortHeld,
    RankExited,
    RankFailed,
    RankRaised,
    RanksSpawned,
    RankStarted,
    Reached,
    Restarted,
    StackDump,
    StartFailed,
    StdinRead,
    StdinTaken,
    StopRequested,
    Suspended,
    Written,
)
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.mpi_worlds import MpiWorlds


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(self, bringup: BringUp) -> None:
        """Take over the nodes of a finished `bringup`."""
        self.nodes = bringup.nodes
        self._bringup = bringup
        self._inbox = bringup.inbox
        self._sinks: Sequence[Sink] = ()
        self._node_of: dict[int, int] = {}
        self._lost: set[int] = set()  # nodes
        self._asked: set[int] = set()  # nodes whose launchpad has got a signal that stops the job; -1: ours
        self._worlds: MpiWorlds | None = None
        self._gone: set[int] = set()  # ranks that have exited in this attempt
        self._suspended = 0.0  # how many seconds we were suspended; they don't count towards deadlines
        self._input_lost = False  # the node of rank 0 was lost, and stdin in flight with it
        self.leaving = False  # don't wait for output that nobody takes

    def run(
        self,
        plan: Plan,
        sinks: Sequence[Sink],
        *,
        grace: float | None,
        timeout: float | None,
        stop_at: float | None = None,
        stall_timeout: float | None = None,
        max_restarts: int = 0,
        terminal: Sequence[int] = (),
        reopen: Callable[[int], Link] | None = None,
        sends_input: bool = False,
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
    ) -> tuple[int, Cause | None]:
        """Start the ranks and run the job to its end. Returns the exit code and, unless it is 0, the cause.

        `stop_at`: when to stop the job as TERM does, in seconds since 1970. `reopen` makes a new link to a node, or
        raises NodeError; it is called in threads of its own. `sends_input`: rank 0 is on another machine and gets our
        stdin. `waited`: whether an exception says that a rank waited for other ranks in vain.
        """
        self._reconnect = Reconnect(self.nodes, plan, reopen, self._inbox.put)
        self._sinks = sinks
        self._plan = plan
        self._terminal = terminal
        self._stop_at = stop_at
        self._max_restarts = max_restarts
        ranks = [rank.rank for rank in plan.ranks]
        machine = Machine(ranks, grace, timeout, self._clock(), max_restarts, range(len(plan.nodes)), waited)
        self._stack_requests = StackRequests(
            *(self.nodes, self._bringup.post, stall_timeout, self._clock()),
            {node: place.address for node, place in enumerate(plan.nodes)},
        )
        self._flow = Flow(len(plan.ranks), self._give_credit)
        for event in self._bringup.early:
            self._bringup.post(event)
        self.nodes.forgive(time.monotonic())
        self._input = StdinForwarder(self._bringup.post) if sends_input else None
        self._start(attempt=0)
        while (self.nodes.open or machine.phase == "clearing") and not self.leaving:
            item = self._next(machine)
            if item is not None:
                self._take(*item, machine)
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:
                for silent, since in self.nodes.tick(now):
                    self._lose(silent, f"no heartbeat for {self.nodes.silence:g} s", since, machine)
            if self._stop_at is not None and self._stop_at <= time.time():
                self._stop_at = None
                reason = "the allocation is about to end (--stop-before)"
                self._pass_on(StopRequested(time.monotonic_ns(), signal.SIGTERM, reason), -1, machine)
            for sink in sinks:
                if sink.deadline is not None and sink.deadline <= time.monotonic():
                    sink.tick(time.monotonic())
            self._stack_requests.tick(self._clock(), machine.running, watching=machine.phase == "running")
            self._act(machine.tick(self._clock()))
        return machine.exit_code, machine.cause

    def _take(self, source: int, event: Any, machine: Machine) -> None:
        """Handle an event from a node, or one of our own (source -1)."""
        if type(event) is StdinRead:
            self.nodes.send(0, InputFrame(event.data))
            return
        if type(event) is Reopened:
            if machine.phase == "over":  # too late: its agent would never be told to leave
                event.link.abandon()
                return
            self._lost.discard(event.node)
            self._reconnect.greet(event)
            self._input_lost = self._input_lost or event.node == 0
            return
        if source < 0:
            if type(event) is StopRequested:
                if event.signum == signal.SIGQUIT:
                    self._stack_requests.ask("asked")
                if self._is_the_same_request(source, event, machine):
                    return
            self._pass_on(event, source, machine)
            return
        match event:
            case Pong():
                pass
            case StdinTaken(_, size) if self._input:
                self._input.taken(size)
            case AgentReady() | PortHeld() if self._reconnect.expects(source):
                self._reconnect.hear(source, event)
            case LinkClosed(at):
                if source in self.nodes.open:
                    self.nodes.ended(source)
                    if machine.phase != "over":
                        self._lose(source, "its agent hung up", at, machine)
            case AgentFailed(_, reason, trace) if source not in self._lost:
                self._lose(source, reason, self.nodes.in_our_time(source, event).time, machine, trace)
            case StopRequested():  # a signal to the launchpad of a node that has joined
                if event.signum == signal.SIGQUIT:
                    self._stack_requests.ask("asked")
                if self._is_the_same_request(source, event, machine):
                    return
                self._pass_on(self.nodes.in_our_time(source, event), -1, machine)
            case Suspended():
                if self.nodes.suspended(source):
                    self._suspended += self.nodes.stand_still()
            case _ if source in self._lost:  # its ranks were lost with it, whatever it says now
                pass
            case Listening() | Reached() if self._stack_requests.answers(source, event, self._clock()):
                pass
            case _ if not self._makes_sense(source, event):
                self._lose(source, f"its agent sent an invalid message: {event!r:.80}", time.monotonic_ns(), machine)
            case MpiRequest(_, rank, ["mcmd=spawn", *_]):
                self._spawn(rank, event, machine)
            case StackDump():
                self._stack_requests.on(event, self._clock())
            case BarrierIn() | MpiRequest() if self._worlds:
                for node, command in self._worlds.on(source, event):
                    self.nodes.send(node, command)
                self._look_for_absent(machine)
            case _:
                self._pass_on(self.nodes.in_our_time(source, event), source, machine)
                if type(event) is RankExited and self._worlds:
                    self._worlds.left(source, event)
                    self._look_for_absent(machine)

    def _is_the_same_request(self, source: int, event: StopRequested, machine: Machine) -> bool:
        """Whether this signal has stopped the job already: a scheduler sends it to us and to the nodes that joined."""
        new = source not in self._asked
        if event.signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._asked.add(source)
        is_stopping = machine.cause is not None and machine.cause.kind == "signal"
        return new and is_stopping and event.signum in (signal.SIGTERM, signal.SIGHUP)

    def _pass_on(self, event: Any, source: int, machine: Machine) -> None:
        self._stack_requests.on(event, self._clock())
        self._dispatch(event)
        self._act(machine.on(event, self._clock(), source))

    def _look_for_absent(self, machine: Machine) -> None:
        failed = self._worlds.absent() if self._worlds and machine.phase == "running" else None
        if failed:
            self._pass_on(failed, self._node_of[failed.rank], machine)

    def _spawn(self, by: int, request: MpiRequest, machine: Machine) -> None:
        """A rank spawns others (MPI_Comm_spawn), which run on the first node."""
        assert self._worlds is not None
        if machine.phase != "running":
            return
        try:
            world, entries = self._worlds.spawn(request, machine.attempt)
        except (ValueError, LookupError) as error:
            reason = str(error).replace(" ", "_")
            self.nodes.send(self._node_of[by], MpiReply(by, f"cmd=spawn_result rc=1 msg={reason}"))
            return
        self._node_of.update(dict.fromkeys(world.ranks, 0))
        machine.join(world.ranks)
        self._dispatch(RanksSpawned(time.monotonic_ns(), by, 0, world.ranks, entries[0]["argv"]))
        self.nodes.send(0, world)
        self.nodes.send(0, StartMore(entries))
        codes = ",".join("0" * world.size)
        self.nodes.send(self._node_of[by], MpiReply(by, f"cmd=spawn_result rc=0 errcodes={codes}"))

    def _lose(self, node: int, reason: str, at: int, machine: Machine, trace: str = "") -> None:
        self._lost.add(node)
        self.nodes.abandon(node)
        ranks = [rank for rank, place in self._node_of.items() if place == node]
        self._pass_on(NodeLost(at, node, reason, ranks, trace), node, machine)

    def _makes_sense(self, source: int, event: Any) -> bool:
        """Whether this agent may send this event now: about its own ranks only, and one exit per rank."""
        match event:
            case Output(_, rank, stream):
                return self._node_of.get(rank) == source and stream in (STDOUT, STDERR, RESULT)
            case RankStarted(_, rank) | StartFailed(_, rank) | RankRaised(_, rank) | StackDump(_, rank):
                return self._node_of.get(rank) == source
            case ExceptionRaised() | Crashed():
                return self._node_of.get(event.rank) == source
            case RankFailed(_, rank, code):
                return self._node_of.get(rank) == source and 0 < code < 256
            case MpiRequest(_, rank, lines):
                return self._worlds is not None and self._node_of.get(rank) == source and bool(lines)
            case BarrierIn():
                return self._worlds is not None and self._worlds.makes_sense(source, event)
            case RankExited(_, rank, code):
                first = self._node_of.get(rank) == source and rank not in self._gone
                self._gone.add(rank)
                return first and -256 < code < 256
        return not isinstance(event, (AgentReady, NodeFacts, Listening, PortHeld))

    def _clock(self) -> float:
        """The job's time in seconds, which stops while we are suspended."""
        return time.monotonic() - self._suspended

    def _start(self, attempt: int) -> None:
        self._flow.start(attempt)
        self._gone.clear()
        nodes = enumerate(self._plan.nodes)
        self._node_of = {rank.rank: place for place, node in nodes for rank in node.ranks}
        if self._plan.mpi:
            from launchpad.head.mpi_worlds import MpiWorlds

            self._worlds = MpiWorlds(self._plan, f"launchpad-{os.urandom(8).hex()}-{attempt}")
        for place, node in enumerate(self._plan.nodes):
            if self._worlds:
                self.nodes.send(place, self._worlds.begin(place))
            sends = self._input is not None
            start = self._plan.start(node, attempt, self._flow.window, self._terminal, sends_input=sends)
            self.nodes.send(place, start)
        if self._input and self._input_lost:
            self._input.reset()
        self._input_lost = False

    def _next(self, machine: Machine) -> tuple[int, Any] | None:
        waits = [sink.deadline - time.monotonic() for sink in self._sinks if sink.deadline is not None]
        if self._stack_requests.deadline is not None:
            waits.append(self._stack_requests.deadline - self._clock())
        if self._stop_at is not None:
            waits.append(self._stop_at - time.time())
        if machine.deadline is not None:
            waits.append(machine.deadline - self._clock())
        if self.nodes.deadline is not None:
            waits.append(self.nodes.deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=max(0.0, min(waits)) if waits else None)
        except queue.Empty:
            return None

    def _dispatch(self, event: Any) -> None:
        if type(event) is Written:
            self._flow.written(event.output)
            return
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
                    for node in self.nodes.remote if action.phase == "stopping" else ():
                        self._dispatch(ClockSeen(now, node, self.nodes.doubt(node)))
                    self._dispatch(action._replace(time=now))
                case FinishAttempt(leave):
                    self.nodes.send_all(FinishCommand(leave))
                case Restart(attempt, cause):
                    now = time.monotonic_ns()
                    self._dispatch(Restarted(now, attempt, self._max_restarts, cause.rank, cause.code, cause.node))
                    self._start(attempt)
                case Reopen(nodes):
                    for node in nodes:
                        self._reconnect.begin(node)
                case TakeStacks(why):
                    self._stack_requests.ask(why)
                case Suspend():
                    self.nodes.suspend()
                case Leave():
                    self.leaving = True
