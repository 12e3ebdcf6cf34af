"""The head's event loop: one thread owns the job's state; all others only read, and put messages into its inbox.

The loop sleeps until the next message or deadline. Each message goes, by its type, to the part of the head that takes
it (head/part.py); what no part takes has happened to the job: the state machine, which returns actions, and the sinks,
which show and record it, are told.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.head.arrivals import Door
from launchpad.head.arrivals import Reopen as ReopenLink
from launchpad.head.bringup import BringUp
from launchpad.head.clock import Clock
from launchpad.head.flow import Flow
from launchpad.head.hub import GoesOn, Hub, StandsStill
from launchpad.head.machine import (
    HEADS_OWN,
    FinishAttempt,
    GiveUp,
    Judgement,
    Leave,
    Machine,
    Release,
    Restart,
    Suspend,
)
from launchpad.head.part import InvalidMessage, Part, Take, seers, takers
from launchpad.head.parts import parts_of
from launchpad.head.planner import Planner
from launchpad.head.sink import Sink
from launchpad.head.standing import NEEDS_PART, OF_LOST, may_send
from launchpad.job.membership import Membership
from launchpad.job.outcome import FOR_THE_HEAD, NODE_LOST, STOPPING, Cause, exit_in_words
from launchpad.job.plan import Stdin
from launchpad.protocol.commands import Credit, JobEnded, StdinData
from launchpad.protocol.commands import Finish as FinishCommand
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.events import (
    RESULT,
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    ArrivalTimes,
    ClocksSeen,
    ContactLost,
    ContactRegained,
    ExceptionRaised,
    ImageUnused,
    LeftoversAwaited,
    LinkClosed,
    ModulesImported,
    NodeDoubted,
    NodeFacts,
    NodeLeaving,
    NodeLost,
    NodesAwaited,
    NotForked,
    NotRestarted,
    OrphansKilled,
    Output,
    PhaseChanged,
    Pong,
    PortHeld,
    PortsHeld,
    RankExited,
    RankFailed,
    RanksBound,
    Restarted,
    SignalPassedOn,
    SpareReady,
    StopRequested,
    Suspended,
    TopologyRead,
    Written,
)

if TYPE_CHECKING:
    from launchpad.head.checkpoints import CheckpointStore, HeadState

# For so many seconds messages are taken before the deadlines are looked at again. To look takes as long as most
# messages; it must not wait for the end of a flood of output.
_BETWEEN_DEADLINES = 0.01

# Answers to questions from before the job, which may come late, and to pings.
_LATE_ANSWERS = (AgentReady, NodeFacts, Pong, PortHeld, PortsHeld, SpareReady, TopologyRead)


# What is told of the node that says it.
_OF_A_NODE = (
    *(ImageUnused, LeftoversAwaited, ModulesImported, NotForked, OrphansKilled, SignalPassedOn),
    *(ContactLost, ContactRegained),
)


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(
        self,
        bringup: BringUp,
        planner: Planner,
        sinks: Sequence[Sink],
        *,
        stdin: Stdin | None = None,
        reopen: ReopenLink | None = None,
        door: Door | None = None,
        advises: bool = False,
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
        judge: Callable[..., Judgement] = Judgement,
        keeper: CheckpointStore | None = None,
        before: HeadState | None = None,
    ) -> None:
        """Take over the nodes of a finished `bringup`; the job's limits are those of the planner's spec.

        `reopen` makes a new link to a lost node; it is called in threads of its own. `door`: where machines join while
        the job runs. `advises`: tell the user where the ranks are if nothing moves for long. `waited`: whether an
        exception says that its rank waited in vain. `judge` is asked before each restart, when all sinks know
        everything about the last attempt. `keeper` has another head go on if we are gone.
        `before`: a head that is gone, whose ranks we take over.
        """
        self.nodes = bringup.nodes
        self.clock = before.clock if before is not None else Clock()
        self.leaving = False  # don't wait for output that nobody takes
        self._planner = planner
        self._sinks = sinks
        self._stdin = stdin or Stdin()
        self._before = before
        self._inbox = bringup.inbox
        self._early = bringup.early
        self._door = door
        self._asked: set[int] = set()  # nodes whose launchpad has got a signal that stops the job; -1: ours
        plan, size = planner.plan, len(planner.plan.seats)
        machine = Machine(
            plan.seats,
            planner.spec.limits,
            self.clock.limits(),
            spares={node.index: node.slots for node in plan.nodes if not node.ranks},
            membership=planner.membership or Membership(size, size, returns=reopen is not None),
            waited=waited,
            judge=judge,
            silence=self.nodes.silence if self.nodes.remote else 0.0,
            restarts=planner.before.restarts if planner.before else 0,
        )
        self.machine = planner.ruled(machine, judge, self.clock.limits())
        self._flow = Flow(len(plan.ranks), self._give_credit, kept=bool(planner.spec.limits.keep_running))
        self._hub = Hub(
            self.nodes,
            self.machine,
            self.clock,
            plan,
            post=bringup.post,
            tell=self._tell,
            happened=self._happened,
            lose=self._lose,
            again=self._start_again,
        )
        self._parts = parts_of(
            self._hub, planner, self._stdin, reopen=reopen, door=door, advises=advises, keeper=keeper
        )
        self._ticking = [part for part in self._parts if type(part).tick is not Part.tick]
        self._takers = self._routes()
        self._seers = seers(self._parts)

    def _routes(self) -> dict[type, tuple[Take, ...]]:
        """Who takes each type of message; others have happened to the job."""
        return {
            **dict.fromkeys(NEEDS_PART, (self._refuse,)),
            **dict.fromkeys(_LATE_ANSWERS, ()),
            **takers(self._parts),
            **{kind: (take,) for kind, take in self._own().items()},
        }

    def _own(self) -> dict[type, Take]:
        """What every job needs, by the message that it is for."""
        return {
            # Messages of agents.
            LinkClosed: self._hung_up,
            AgentFailed: self._failed,
            RankExited: self._exited,
            RankFailed: self._rank_failed,
            ArrivalTimes: self._with_doubt,
            **dict.fromkeys(_OF_A_NODE, self._with_node),
            Suspended: self._suspended,
            # Ours too.
            StopRequested: self._stop_requested,
            Written: self._written,
            # Actions of the state machine.
            SendSignal: self._signal,
            PhaseChanged: self._phase_changed,
            NotRestarted: self._dated,
            NodeDoubted: self._dated,
            NodesAwaited: self._dated,
            FinishAttempt: self._finish,
            Restart: self._restart,
            Release: self._release,
            Suspend: self._suspend,
            Leave: self._leave,
            GiveUp: self._give_up,
        }

    def run(self) -> tuple[int, Cause | None]:
        """Start the ranks and run the job to its end. Returns the exit code and, unless it is 0, the cause."""
        for event in self._early:
            self._hub.post(event)
        self.nodes.forgive(self.clock.monotonic())
        try:
            if self._before is None:
                self._start()
            else:
                self._go_on(self._before)
            while self._goes_on():
                self._round()
        finally:
            for part in self._parts:
                part.close()
        return self.machine.exit_code, self.machine.cause

    # The loop.

    def _goes_on(self) -> bool:
        return bool(self.nodes.open or self.machine.phase == "clearing") and not self.leaving

    def _round(self) -> None:
        """Take what has come, or wait for it, and do what is due."""
        for source, message in self._news():
            self._take(source, message)
            if not self._goes_on():
                break
        now = self.clock.monotonic()
        if self.nodes.deadline is not None and self.nodes.deadline <= now:
            for silent, since in self.nodes.tick(now):
                self._lose(silent, f"no heartbeat for {self.nodes.silence:g} s", since)
        for sink in self._sinks:
            if sink.deadline is not None and sink.deadline <= self.clock.monotonic():
                sink.tick(self.clock.monotonic())
        if self.machine.cause is not None:  # from here on nobody's patience counts
            self.clock.end_waits()
        for part in self._ticking:
            part.tick(self.clock.now())
        self._act(self.machine.tick(self.clock.limits()))

    def _news(self) -> Iterator[tuple[int, Any]]:
        """What is in the inbox, once there is something; nothing at the next deadline."""
        try:
            yield self._inbox.get(timeout=None if self._inbox.qsize() else self._patience())
        except queue.Empty:
            return
        until = self.clock.monotonic() + _BETWEEN_DEADLINES
        while self._inbox.qsize() and self.clock.monotonic() < until:
            yield self._inbox.get()

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        monotonic, now = self.clock.monotonic(), self.clock.now()
        waits = [due - monotonic for sink in self._sinks if (due := sink.deadline) is not None]
        waits += [due - now for part in self._ticking if (due := part.deadline) is not None]
        if self.nodes.deadline is not None:
            waits.append(self.nodes.deadline - monotonic)
        if self.machine.deadline is not None and not self.clock.waits_for_person:
            waits.append(self.machine.deadline - self.clock.limits())
        return max(0.0, min(waits)) if waits else None

    def _take(self, source: int, message: Any) -> None:
        """Handle a message from a node, or one of our own (source -1)."""
        kind, said = type(message), message
        if source >= 0 and kind not in OF_LOST:
            if source in self._hub.lost:  # its ranks were lost with it, whatever it says now
                return
            message = self.nodes.in_our_time(source, message)
            if not may_send(source, message, self._hub.node_of):
                self._lose(source, _invalid(said))
                return
        try:
            self._route(source, message)
        except InvalidMessage:
            self._lose(source, _invalid(said))

    def _route(self, source: int, message: Any) -> None:
        takes = self._takers.get(type(message))
        if takes is None:
            self._happened(source, message)
            return
        for take in takes:
            take(source, message)

    def _happened(self, source: int, event: Any) -> None:
        """Tell the sinks and the state machine, and then the parts that want to hear of it."""
        self._tell(event)
        self._act(self.machine.on(event, self.clock.limits(), source))
        self._show_parts(source, event)

    def _show_parts(self, source: int, message: Any) -> None:
        for see in self._seers.get(type(message), ()):
            see(source, message)

    def _tell(self, event: Any) -> None:
        """Tell the sinks."""
        holders = 0
        for sink in self._sinks:
            holders += sink.on(event)
        if type(event) is Output:
            self._flow.shown(event, holders)

    def _act(self, actions: Sequence[Any]) -> None:
        for action in actions:
            self._route(-1, action)
            self._show_parts(-1, action)

    # Messages.

    def _refuse(self, _: int, __: Any) -> None:
        raise InvalidMessage

    def _hung_up(self, source: int, event: LinkClosed) -> None:
        if source in self.nodes.open:
            self.nodes.ended(source)
            if self.machine.phase != "over":
                self._lose(source, "its agent hung up", event.time)

    def _failed(self, source: int, event: AgentFailed) -> None:
        self._lose(source, event.reason, event.time, event.trace)

    def _exited(self, source: int, event: RankExited) -> None:
        if event.rank in self._hub.gone:
            raise InvalidMessage
        self._hub.gone.add(event.rank)
        if event.rank in self._hub.dismissed:
            event = event._replace(code=0, why=f"it was stopped, as all others had ended: {exit_in_words(event.code)}")
        self._happened(source, event)

    def _rank_failed(self, source: int, event: RankFailed) -> None:
        if event.rank not in self._hub.dismissed:
            self._happened(source, event)

    def _with_doubt(self, source: int, event: ArrivalTimes) -> None:
        self._happened(source, event._replace(doubt=self.nodes.doubt(source)))

    def _with_node(self, source: int, event: Any) -> None:
        self._happened(source, event._replace(node=source))

    def _suspended(self, source: int, _: Suspended) -> None:
        if self.nodes.suspended(source):
            self._show_parts(-1, StandsStill())
            self.clock.stood_still(self.nodes.stand_still())
            self._show_parts(-1, GoesOn())

    def _stop_requested(self, source: int, event: StopRequested) -> None:
        """A signal to us, or to the launchpad of a node that has joined."""
        if source >= 0 and (event.signum not in FOR_THE_HEAD or event.reason or event.asked):
            raise InvalidMessage
        if self._is_the_same_request(source, event):
            return
        happened: StopRequested | NodeLeaving = event
        leaver = source
        if source < 0 and not event.asked and event.signum != signal.SIGINT:
            leaver = HEADS_OWN  # Ctrl-C where the job is led is for all of it
        if event.signum in STOPPING and self._can_spare(leaver):
            happened = NodeLeaving(event.time, leaver, event.signum)
        self._happened(source, happened)

    def _can_spare(self, node: int) -> bool:
        """Whether the job goes on if this node leaves. The head's own can if another launcher can lead."""
        if node == HEADS_OWN and not (self._door is not None and self._door.can_hand_over):
            return False
        return node >= 0 and self.machine.can_spare(node, self.clock.limits())

    def _is_the_same_request(self, source: int, event: StopRequested) -> bool:
        """Whether this signal has stopped the job already: a scheduler sends it to us and to the nodes that joined."""
        new = source not in self._asked
        if event.signum in STOPPING:
            self._asked.add(source)
        is_stopping = self.machine.cause is not None and self.machine.cause.kind == "signal"
        return new and is_stopping and event.signum in (signal.SIGTERM, signal.SIGHUP)

    def _written(self, _: int, event: Written) -> None:
        self._flow.written(event.output)

    # Actions of the state machine, whose clock stands still at times: they are dated here.

    def _signal(self, _: int, action: SendSignal) -> None:
        self.nodes.send_all(action)

    def _phase_changed(self, _: int, action: PhaseChanged) -> None:
        now = time.monotonic_ns()
        if action.phase == "stopping" and self.nodes.remote:
            self._tell(ClocksSeen(now, [(node, self.nodes.doubt(node)) for node in self.nodes.remote]))
        self._tell(action._replace(time=now))

    def _dated(self, _: int, action: NotRestarted | NodeDoubted | NodesAwaited) -> None:
        self._tell(action._replace(time=time.monotonic_ns()))

    def _finish(self, _: int, action: FinishAttempt) -> None:
        if action.leave:
            self.nodes.send_all(FinishCommand(leave=True, grace=action.grace))
            return
        for seat in self._hub.plan.seats:
            if seat.node in self.nodes.open:
                self.nodes.send(seat.node, FinishCommand(leave=False))

    def _release(self, _: int, action: Release) -> None:
        """A node leaves; what it says from now on doesn't count."""
        self._hub.lost.add(action.node)
        self._asked.discard(action.node)
        ended = JobEnded(128 + action.signum, ["this node has left the job, which goes on without it"])
        self.nodes.send(action.node, ended)
        self.nodes.forget(action.node)

    def _suspend(self, _: int, __: Suspend) -> None:
        self.nodes.suspend()

    def _leave(self, _: int, __: Leave) -> None:
        self.leaving = True

    def _give_up(self, _: int, action: GiveUp) -> None:
        for node in {self._hub.node_of[rank] for rank in action.ranks} & self.nodes.open:
            self._lose(node, "its agent doesn't answer; a process there may have stopped it")

    def _restart(self, _: int, action: Restart) -> None:
        before = self._hub.plan.seats
        plan = self._planner.seat(action.seats)
        changed = plan.seats != before
        cause, limit = action.cause, self._planner.spec.limits.max_restarts
        self._tell(
            Restarted(
                time.monotonic_ns(),
                action.attempt,
                limit.most,
                cause.rank,
                cause.code,
                cause.node,
                action.restarts,
                action.counted,
                plan.by_node if changed else [],
                [node.index for node in plan.nodes if node.shown_there] if changed else [],
                limit.period or 0.0,
            )
        )
        for part in self._parts:
            part.lose(self._hub.node_of, "it has ended, and the ranks are started again")
        self._hub.place(plan)
        self._flow.resize(len(plan.ranks))
        self._start()

    # What happens to nodes and ranks.

    def _start(self) -> None:
        plan, attempt, restarts = self._hub.plan, self.machine.attempt, self.machine.restarts
        self._flow.start(attempt)
        self._hub.gone.clear()
        for part in self._parts:
            part.start()
        if self._planner.spec.report_bindings or any(rank.binding for rank in plan.ranks):
            self._tell(RanksBound(time.monotonic_ns(), plan.bindings))
        for node in plan.nodes:
            if node.index in self.nodes.open and (node.ranks or attempt == 0):
                self._hub.begin(node.index, plan.start(node, attempt, restarts, self._flow.window, self._stdin))

    def _go_on(self, before: HeadState) -> None:
        """Take over the ranks. What their streams had of another window may be lost: they get one more."""
        self._hub.go_on(before.hub)
        self._flow.start(self.machine.attempt)
        for part in self._parts:
            part.go_on(before.started, before.parts.get(type(part).__name__))
        for rank in sorted(before.started & set(self._hub.running)):
            for stream in (STDOUT, STDERR, RESULT):
                self._give_credit(rank, stream, self._flow.window)
        if before.input_sent:
            self._hub.send(self._hub.plan.input_rank, StdinData(b""))
        assert isinstance(self.machine, Machine)  # jobs with roles have no checkpoints
        self._act(self.machine.underway())
        self.nodes.go_on()

    def _start_again(self, nodes: Collection[int], attempt: int, restarts: int) -> None:
        """Start the ranks of these nodes again; all others run on."""
        ranks = [rank for node in nodes for rank in self._hub.ranks_of(node)]
        for part in self._parts:
            part.lose(ranks, "it has ended, and is started again")
        self._flow.start_again(ranks)
        self._hub.gone.difference_update(ranks)
        plan = self._hub.plan
        for node in plan.nodes:
            if node.index in nodes and node.index in self.nodes.open:
                self._hub.begin(node.index, plan.start(node, attempt, restarts, self._flow.window, self._stdin))

    def _lose(self, node: int, reason: str, at: int | None = None, trace: str = "") -> None:
        """Count a node as lost, with its ranks. `at`: since when, if not now."""
        self._hub.lost.add(node)
        self._asked.discard(node)
        self.nodes.abandon(node, JobEnded(NODE_LOST, [f"the job counts this node as lost: {reason}"]))
        ranks = list(self._hub.ranks_of(node))
        for part in self._parts:
            part.lose(ranks, "its node is lost")
        self._happened(node, NodeLost(time.monotonic_ns() if at is None else at, node, reason, ranks, trace))

    def _give_credit(self, rank: int, stream: int, size: int) -> None:
        self._hub.send(rank, Credit(rank, stream, size))


def _invalid(message: Any) -> str:
    return f"its agent sent an invalid message: {message!r:.80}"
