"""The loop: one thread owns the job's state; all others only read and put into its inbox.

It sleeps until the next event or deadline. Events go to the state machine, which answers with actions, and to the
sinks, which show and keep them.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad import __version__
from launchpad.errors import NodeError
from launchpad.events import (
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    Command,
    Credit,
    Held,
    Hello,
    InputRead,
    InputTaken,
    LinkClosed,
    Listening,
    NodeLost,
    Output,
    PeerFailed,
    PhaseChanged,
    Ping,
    Pong,
    RankExited,
    RankRaised,
    RankStarted,
    Restarted,
    StartFailed,
    StopRequested,
    Surveyed,
    Suspended,
    Written,
)
from launchpad.events import Finish as FinishCommand
from launchpad.events import Input as InputFrame
from launchpad.events import Signal as SendSignal
from launchpad.head.flow import Flow
from launchpad.head.input import Input
from launchpad.head.machine import Finish, Leave, Machine, Reopen, Restart, Suspend
from launchpad.head.nodes import Nodes
from launchpad.head.revival import Reopened, Revival
from launchpad.head.sink import Sink
from launchpad.job.outcome import Cause
from launchpad.job.plan import Elsewhere, Plan
from launchpad.transport import Link

if TYPE_CHECKING:  # sockets and HMAC, for a world of several launchpads only
    from launchpad.head.rendezvous import Rendezvous

# After so long a wait for other nodes, the user is told what we wait for.
TELL_SECONDS = 3.0

# A node that has not answered by then is not going to.
READY_SECONDS = 30.0


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._unheard: list[tuple[int, Any]] = []  # what nodes said while another answer was waited for
        self._early: list[StopRequested] = []  # signals for the ranks, which are yet to be started
        self._sinks: Sequence[Sink] = ()
        self._node_of: dict[int, int] = {}
        self._lost: set[int] = set()  # nodes
        self._gone: set[int] = set()  # ranks whose end was told, in this attempt
        self._suspended = 0.0  # seconds that we have stood still: they count for no deadline
        self.leaving = False  # output is left that nobody takes: don't wait for it

    def post(self, event: Any) -> None:
        """Put an event of the head's own into the inbox; for other threads."""
        self._inbox.put((-1, event))

    def connect(
        self, links: Sequence[Link], *, count_gpus: bool, port: int = 0, silence: float = 0.0
    ) -> list[AgentReady]:
        """Greet the nodes; return their facts. Raises NodeError where one does not answer.

        `port` is held on the first; `silence`: seconds after which a remote node, or for it the head, counts as gone.
        """
        self.nodes = Nodes(links, self._inbox.put, silence)
        self.nodes.read()
        hellos = {
            node: Hello(__version__, count_gpus, 0 if node else port, silence if link.remote else 0.0)
            for node, link in enumerate(links)
        }
        ready = self.ask(hellos, AgentReady, READY_SECONDS)
        for node, facts in enumerate(ready):
            if not 0 <= facts.wall < 1e11:
                reason = f"the agent's clock makes no sense: it says {facts.wall:g} s since 1970"
                raise NodeError(self._of(node, reason))
        return ready

    def ask(self, commands: Mapping[int, Command], answer: type, seconds: float) -> list[Any]:
        """Send each node its command; return their answers, in the order of the nodes. Raises NodeError."""
        for node, command in commands.items():
            self.nodes.send(node, command)
        answers: dict[int, Any] = {}
        later = []
        deadline = time.monotonic() + seconds
        while len(answers) < len(commands):
            heard = self.hear(deadline)
            if heard is None:
                silent = min(commands.keys() - answers.keys())
                raise NodeError(self._of(silent, f"no answer from the agent within {seconds:g} s"))
            if type(heard[1]) is answer:
                answers[heard[0]] = heard[1]
            else:
                later.append(heard)
        self._unheard += later
        return [answers[node] for node in sorted(answers)]

    def measure_clocks(self) -> None:
        """Ask the remote nodes for their time. Raises NodeError."""
        self.ask({node: Ping(time.monotonic_ns()) for node in self.nodes.remote}, Pong, READY_SECONDS)

    def hear(self, deadline: float) -> tuple[int, Any] | None:
        """What a node says before the job runs; None when the time is over. Raises NodeError where one has ended."""
        if self._unheard:
            return self._unheard.pop(0)
        while True:
            due = self.nodes.deadline
            until = deadline if due is None else min(deadline, due)
            try:
                node, event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                self.nodes.tick(time.monotonic())  # that we are there; who is silent now may be looking for its torch
                continue
            match event:
                case AgentFailed(_, reason):
                    raise NodeError(self._of(node, f"the agent ended before any rank was started: {reason}"))
                case LinkClosed():
                    raise NodeError(self._of(node, "the agent ended before any rank was started"))
                case StopRequested(_, signum) if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    raise SystemExit(128 + signum)
                case StopRequested(_, signal.SIGTSTP):
                    self.nodes.suspend()
                case Suspended():
                    self._on_suspended(node)
                case StopRequested():
                    self._early.append(event)
                case _:
                    return node, event

    def _of(self, node: int, text: str) -> str:
        name = self.nodes.name(node)
        return f"{name}: {text}" if name else text

    def join(self, rendezvous: Rendezvous, nproc: int, say: Callable[[str], None]) -> Elsewhere:
        """Meet the launchpads of the other nodes. Raises NodeError where they don't all come in time."""
        threading.Thread(target=rendezvous.join, args=(nproc, self.post), name="rendezvous", daemon=True).start()
        deadline = time.monotonic() + rendezvous.seconds
        told = time.monotonic() + TELL_SECONDS
        while True:
            heard = self.hear(min(deadline, told))
            if heard is None:
                if time.monotonic() >= deadline:
                    raise NodeError(f"{rendezvous.waiting()}; gave up after {rendezvous.seconds:g} s")
                say(rendezvous.waiting())
                told = deadline
            elif isinstance(heard[1], Elsewhere):
                return heard[1]
            elif isinstance(heard[1], PeerFailed):
                raise NodeError(heard[1].reason)

    def run(
        self,
        plan: Plan,
        sinks: Sequence[Sink],
        *,
        grace: float | None,
        timeout: float | None,
        max_restarts: int = 0,
        terminal: Sequence[int] = (),
        reopen: Callable[[int], Link] | None = None,
        sends_input: bool = False,
    ) -> tuple[int, Cause | None]:
        """Start the ranks and see the job to its end. Returns the exit code and, unless it is 0, why.

        `reopen` makes a new link to a node, or raises NodeError; it is called by threads of their own. `sends_input`:
        rank 0 is elsewhere, and is to have our standard input.
        """
        self._revival = Revival(self.nodes, plan, reopen, self._inbox.put)
        self._sinks = sinks
        self._plan = plan
        self._terminal = terminal
        self._max_restarts = max_restarts
        ranks = [rank.rank for rank in plan.ranks]
        machine = Machine(ranks, grace, timeout, self._clock(), max_restarts, range(len(plan.nodes)))
        self._flow = Flow(len(plan.ranks), self._give_credit)
        for place, node in enumerate(plan.nodes):
            self._node_of.update((rank.rank, place) for rank in node.ranks)
        for event in self._early:
            self.post(event)
        self.nodes.forgive(time.monotonic())
        self._input = Input(self.post) if sends_input else None
        self._start(attempt=0)
        while self.nodes.open and not self.leaving:
            item = self._next(machine)
            if item is not None:
                self._take(*item, machine)
            now = time.monotonic()
            if self.nodes.deadline is not None and self.nodes.deadline <= now:
                for silent in self.nodes.tick(now):
                    self._lose(silent, f"nothing was heard of it for {self.nodes.silence:g} s", machine)
            for sink in sinks:
                if sink.deadline is not None and sink.deadline <= time.monotonic():
                    sink.tick(time.monotonic())
            self._act(machine.tick(self._clock()))
        return machine.exit_code, machine.cause

    def _take(self, source: int, event: Any, machine: Machine) -> None:
        """An event of a node, or of our own (source -1)."""
        if type(event) is InputRead:
            self.nodes.send(0, InputFrame(event.data))
            return
        if type(event) is Reopened:
            self._lost.discard(event.node)
            self._revival.greet(event)
            if event.node == 0 and self._input:
                self._input.reset()
            return
        if source < 0:
            self._dispatch(event)
            self._act(machine.on(event, self._clock()))
            return
        match event:
            case Pong():
                pass
            case InputTaken(_, size) if self._input:
                self._input.taken(size)
            case AgentReady() | Held() if self._revival.expects(source):
                self._revival.hear(source, event)
            case LinkClosed():
                if source in self.nodes.open:
                    self.nodes.ended(source)
                    if machine.phase != "over":
                        self._lose(source, "its agent hung up", machine)
            case AgentFailed(_, reason):
                self._lose(source, reason, machine)
            case Suspended():
                self._on_suspended(source)
            case _ if source in self._lost:  # what it says of its ranks was decided by its loss
                pass
            case _ if not self._makes_sense(source, event):
                self._lose(source, f"the agent said what no agent says: {event!r:.80}", machine)
            case _:
                event = self.nodes.in_our_time(source, event)
                self._dispatch(event)
                self._act(machine.on(event, self._clock(), source))

    def _lose(self, node: int, reason: str, machine: Machine) -> None:
        self._lost.add(node)
        self.nodes.abandon(node)
        ranks = [rank.rank for rank in self._plan.nodes[node].ranks]
        event = NodeLost(time.monotonic_ns(), node, reason, ranks)
        self._dispatch(event)
        self._act(machine.on(event, self._clock()))

    def _makes_sense(self, source: int, event: Any) -> bool:
        """Whether this agent may say this now: of a rank that it has, and of its end once."""
        match event:
            case Output(_, rank, stream):
                return self._node_of.get(rank) == source and stream in (STDOUT, STDERR)
            case RankStarted(_, rank) | StartFailed(_, rank) | RankRaised(_, rank):
                return self._node_of.get(rank) == source
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
        for place, node in enumerate(self._plan.nodes):
            sends = self._input is not None
            start = self._plan.start(node, attempt, self._flow.window, self._terminal, sends_input=sends)
            self.nodes.send(place, start)

    def _next(self, machine: Machine) -> tuple[int, Any] | None:
        waits = [sink.deadline - time.monotonic() for sink in self._sinks if sink.deadline is not None]
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
                    self._dispatch(action)
                case Finish(leave):
                    self.nodes.send_all(FinishCommand(leave))
                case Restart(attempt, cause):
                    now = time.monotonic_ns()
                    self._dispatch(Restarted(now, attempt, self._max_restarts, cause.rank, cause.code, cause.node))
                    self._start(attempt)
                case Reopen(nodes):
                    for node in nodes:
                        self._revival.begin(node)
                case Suspend():
                    self.nodes.suspend()
                case Leave():
                    self.leaving = True

    def _on_suspended(self, node: int) -> None:
        """Stop ourselves, as Ctrl-Z asks, when all ranks have stopped. The shell's fg or bg continues us here."""
        if self.nodes.suspended(node):
            start = time.monotonic()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._suspended += time.monotonic() - start
            self.nodes.forgive(time.monotonic())
            self.nodes.resume()
