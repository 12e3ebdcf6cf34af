"""The loop: one thread owns the job's state; all others only read and put into its inbox.

It sleeps until the next event or deadline. Events go to the state machine, which answers with actions, and to the
sinks, which show and keep them.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.commands import Credit, MpiReply, StartMore
from launchpad.commands import Finish as FinishCommand
from launchpad.commands import Input as InputFrame
from launchpad.commands import Signal as SendSignal
from launchpad.events import (
    RESULT,
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    BarrierIn,
    Held,
    InputRead,
    InputTaken,
    LinkClosed,
    Listening,
    MpiRequest,
    NodeLost,
    Output,
    PhaseChanged,
    Pong,
    RankExited,
    RankFailed,
    RankRaised,
    RanksSpawned,
    RankStarted,
    Restarted,
    StartFailed,
    StopRequested,
    Surveyed,
    Suspended,
    Written,
)
from launchpad.failures import ClockSeen, Crashed, ExceptionRaised
from launchpad.head.examination import Examination
from launchpad.head.flow import Flow
from launchpad.head.gathering import Gathering
from launchpad.head.input import Input
from launchpad.head.machine import Finish, Leave, Look, Machine, Reopen, Restart, Suspend
from launchpad.head.revival import Reopened, Revival
from launchpad.head.sink import Sink
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan
from launchpad.stacks import Examined
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.worlds import Worlds


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(self, gathering: Gathering) -> None:
        """The job's nodes are those of the gathering, which has come to its end."""
        self.nodes = gathering.nodes
        self._gathering = gathering
        self._inbox = gathering.inbox
        self._sinks: Sequence[Sink] = ()
        self._node_of: dict[int, int] = {}
        self._lost: set[int] = set()  # nodes
        self._worlds: Worlds | None = None
        self._gone: set[int] = set()  # ranks whose end was told, in this attempt
        self._suspended = 0.0  # seconds that we have stood still: they count for no deadline
        self._input_lost = False  # with the node that rank 0 was on
        self.leaving = False  # output is left that nobody takes: don't wait for it

    def run(
        self,
        plan: Plan,
        sinks: Sequence[Sink],
        *,
        grace: float | None,
        timeout: float | None,
        stall_timeout: float | None = None,
        max_restarts: int = 0,
        terminal: Sequence[int] = (),
        reopen: Callable[[int], Link] | None = None,
        sends_input: bool = False,
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
    ) -> tuple[int, Cause | None]:
        """Start the ranks and see the job to its end. Returns the exit code and, unless it is 0, why.

        `reopen` makes a new link to a node, or raises NodeError; it is called by threads of their own. `sends_input`:
        rank 0 is elsewhere, and is to have our standard input. `waited`: whether an exception says that other ranks
        were waited for in vain.
        """
        self._revival = Revival(self.nodes, plan, reopen, self._inbox.put)
        self._sinks = sinks
        self._plan = plan
        self._terminal = terminal
        self._max_restarts = max_restarts
        ranks = [rank.rank for rank in plan.ranks]
        machine = Machine(ranks, grace, timeout, self._clock(), max_restarts, range(len(plan.nodes)), waited)
        self._examination = Examination(self.nodes, self._gathering.post, stall_timeout, self._clock())
        self._flow = Flow(len(plan.ranks), self._give_credit)
        for event in self._gathering.early:
            self._gathering.post(event)
        self.nodes.forgive(time.monotonic())
        self._input = Input(self._gathering.post) if sends_input else None
        self._start(attempt=0)
        while (self.nodes.open or machine.phase == "clearing") and not self.leaving:
            item = self._next(machine)
            if item is not None:
                self._take(*item, machine)
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:
                for silent, since in self.nodes.tick(now):
                    self._lose(silent, f"nothing was heard of it for {self.nodes.silence:g} s", since, machine)
            for sink in sinks:
                if sink.deadline is not None and sink.deadline <= time.monotonic():
                    sink.tick(time.monotonic())
            self._examination.tick(self._clock(), machine.running, watching=machine.phase == "running")
            self._act(machine.tick(self._clock()))
        return machine.exit_code, machine.cause

    def _take(self, source: int, event: Any, machine: Machine) -> None:
        """An event of a node, or of our own (source -1)."""
        if type(event) is InputRead:
            self.nodes.send(0, InputFrame(event.data))
            return
        if type(event) is Reopened:
            if machine.phase == "over":  # too late: nobody would tell its agent to leave
                event.link.abandon()
                return
            self._lost.discard(event.node)
            self._revival.greet(event)
            self._input_lost = self._input_lost or event.node == 0
            return
        if source < 0:
            if type(event) is StopRequested and event.signum == signal.SIGQUIT:
                self._examination.ask("asked")
            self._pass_on(event, source, machine)
            return
        match event:
            case Pong():
                pass
            case InputTaken(_, size) if self._input:
                self._input.taken(size)
            case AgentReady() | Held() if self._revival.expects(source):
                self._revival.hear(source, event)
            case LinkClosed(at):
                if source in self.nodes.open:
                    self.nodes.ended(source)
                    if machine.phase != "over":
                        self._lose(source, "its agent hung up", at, machine)
            case AgentFailed(_, reason) if source not in self._lost:
                self._lose(source, reason, self.nodes.in_our_time(source, event).time, machine)
            case Suspended():
                if self.nodes.suspended(source):
                    self._suspended += self.nodes.stand_still()
            case _ if source in self._lost:  # what it says of its ranks was decided by its loss
                pass
            case _ if not self._makes_sense(source, event):
                self._lose(source, f"the agent said what no agent says: {event!r:.80}", time.monotonic_ns(), machine)
            case MpiRequest(_, rank, ["mcmd=spawn", *_]):
                self._spawn(rank, event, machine)
            case Examined():
                self._examination.on(event, self._clock())
            case BarrierIn() | MpiRequest() if self._worlds:
                for node, command in self._worlds.on(source, event):
                    self.nodes.send(node, command)
                self._look_for_absent(machine)
            case _:
                self._pass_on(self.nodes.in_our_time(source, event), source, machine)
                if type(event) is RankExited and self._worlds:
                    self._worlds.left(source, event)
                    self._look_for_absent(machine)

    def _pass_on(self, event: Any, source: int, machine: Machine) -> None:
        self._examination.on(event, self._clock())
        self._dispatch(event)
        self._act(machine.on(event, self._clock(), source))

    def _look_for_absent(self, machine: Machine) -> None:
        failed = self._worlds.absent() if self._worlds and machine.phase == "running" else None
        if failed:
            self._pass_on(failed, self._node_of[failed.rank], machine)

    def _spawn(self, by: int, request: MpiRequest, machine: Machine) -> None:
        """A rank asks for others: they run on the first node."""
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

    def _lose(self, node: int, reason: str, at: int, machine: Machine) -> None:
        self._lost.add(node)
        self.nodes.abandon(node)
        ranks = [rank for rank, place in self._node_of.items() if place == node]
        self._pass_on(NodeLost(at, node, reason, ranks), node, machine)

    def _makes_sense(self, source: int, event: Any) -> bool:
        """Whether this agent may say this now: of a rank that it has, and of its end once."""
        match event:
            case Output(_, rank, stream):
                return self._node_of.get(rank) == source and stream in (STDOUT, STDERR, RESULT)
            case RankStarted(_, rank) | StartFailed(_, rank) | RankRaised(_, rank) | Examined(_, rank):
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
        return not isinstance(event, (AgentReady, Surveyed, Listening, Held))

    def _clock(self) -> float:
        """The job's time, in seconds: it stands still while we do."""
        return time.monotonic() - self._suspended

    def _start(self, attempt: int) -> None:
        self._flow.start(attempt)
        self._gone.clear()
        nodes = enumerate(self._plan.nodes)
        self._node_of = {rank.rank: place for place, node in nodes for rank in node.ranks}
        if self._plan.mpi:
            from launchpad.head.worlds import Worlds

            self._worlds = Worlds(self._plan, f"launchpad-{os.urandom(8).hex()}-{attempt}")
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
        if self._examination.deadline is not None:
            waits.append(self._examination.deadline - self._clock())
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
                    now = time.monotonic_ns()  # the machine's clock stands still while we do
                    for node in self.nodes.remote if action.phase == "stopping" else ():
                        self._dispatch(ClockSeen(now, node, self.nodes.doubt(node)))
                    self._dispatch(action._replace(time=now))
                case Finish(leave):
                    self.nodes.send_all(FinishCommand(leave))
                case Restart(attempt, cause):
                    now = time.monotonic_ns()
                    self._dispatch(Restarted(now, attempt, self._max_restarts, cause.rank, cause.code, cause.node))
                    self._start(attempt)
                case Reopen(nodes):
                    for node in nodes:
                        self._revival.begin(node)
                case Look(why):
                    self._examination.ask(why)
                case Suspend():
                    self.nodes.suspend()
                case Leave():
                    self.leaving = True
