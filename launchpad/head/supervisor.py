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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from launchpad import __version__, wire
from launchpad.errors import NodeError
from launchpad.events import (
    STDERR,
    STDOUT,
    AgentFailed,
    AgentReady,
    Credit,
    Hello,
    LinkClosed,
    Output,
    PeerFailed,
    PhaseChanged,
    RankExited,
    RankRaised,
    RankStarted,
    Restarted,
    StartFailed,
    StopRequested,
    Suspended,
    Written,
)
from launchpad.events import Finish as FinishCommand
from launchpad.events import Signal as SendSignal
from launchpad.head.machine import Finish, Leave, Machine, Restart, Suspend
from launchpad.job.outcome import Cause
from launchpad.job.plan import Elsewhere, Plan
from launchpad.transport import Link

if TYPE_CHECKING:  # sockets and HMAC, for a world of several launchpads only
    from launchpad.head.rendezvous import Rendezvous

# All streams together may have this much output under way between agent and sinks, each at most LARGEST_WINDOW.
WINDOW_BYTES = 16 << 20
LARGEST_WINDOW = 1 << 20
LEAST_WINDOW = 16 << 10

# After so long a wait for other nodes, the user is told what we wait for.
TELL_SECONDS = 3.0

# A node that has not answered by then is not going to.
READY_SECONDS = 30.0

HANDLED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),  # end the job
    *(signal.SIGUSR1, signal.SIGUSR2),  # go on to the ranks
    *(signal.SIGTSTP, signal.SIGCONT),  # stop us and the ranks, and continue
    signal.SIGQUIT,  # kept for a dump of all stacks
)


class Sink(Protocol):
    """Consumes the event stream."""

    def on(self, event: Any) -> bool:
        """Take an event. True: an Output's bytes are still held, and a Written will follow."""

    @property
    def deadline(self) -> float | None:
        """When `tick` is to be called, in seconds of time.monotonic()."""

    def tick(self, now: float) -> None:
        """Do what was due."""

    def close(self) -> None:
        """Finish writing."""


class Supervisor:
    """One job, from the first frame to the exit code."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._links: list[Link] = []
        self._open: set[int] = set()  # nodes whose links have not ended
        self._sinks: Sequence[Sink] = ()
        self._window = LARGEST_WINDOW
        self._attempt = 0
        self._held: dict[int, tuple[int, Output, int]] = {}  # by id: holding sinks, output, its attempt
        self._owed: dict[tuple[int, int], int] = {}  # credit to be given, by rank and stream
        self._node_of: dict[int, int] = {}
        self._gone: set[int] = set()  # ranks whose end was told, in this attempt
        self._suspended = 0.0  # seconds that we have stood still: they count for no deadline
        self._suspending = 0  # nodes that have not yet stopped their ranks
        self.leaving = False  # output is left that nobody takes: don't wait for it

    def post(self, event: Any) -> None:
        """Put an event of the head's own into the inbox; for other threads."""
        self._inbox.put((-1, event))

    def handle_signals(self, more: Iterable[int] = ()) -> None:
        """Turn signals into events. One that was ignored when we were started (nohup) stays ignored.

        `more`: what is to be passed on to the ranks beside HANDLED.
        """
        handled = {signum for signum in (*HANDLED, *more) if signal.getsignal(signum) != signal.SIG_IGN}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Not in the handlers: one that came just before the loop goes to sleep would run only at its next event.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=(reader, handled), name="signals", daemon=True).start()
        for signum in handled:
            signal.signal(signum, lambda *_: None)

    def _read_signals(self, reader: int, handled: set[int]) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in handled:
                    self.post(StopRequested(time.monotonic_ns(), number))

    def connect(self, links: Sequence[Link], *, count_gpus: bool, port: int = 0) -> list[AgentReady]:
        """Greet the nodes; return their facts. Raises NodeError where one does not answer."""
        self._links = list(links)
        for node, link in enumerate(self._links):
            self._open.add(node)
            try:
                threading.Thread(target=self._read, args=(node, link), name=f"link-{node}", daemon=True).start()
            except RuntimeError as error:  # no memory for its stack, or too many of them
                raise NodeError(f"this machine has no room for the launcher: {error}") from None
            link.send(Hello(__version__, count_gpus, port))
        ready: dict[int, AgentReady] = {}
        early: list[StopRequested] = []
        deadline = time.monotonic() + READY_SECONDS
        while len(ready) < len(self._links):
            try:
                node, event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NodeError(f"no answer from the agent within {READY_SECONDS:g} s") from None
            match event:
                case AgentReady(_, wall):
                    if not 0 <= wall < 1e11:
                        raise NodeError(f"the agent's clock makes no sense: it says {wall:g} s since 1970")
                    ready[node] = event
                case AgentFailed(_, reason):
                    raise NodeError(f"the agent could not start: {reason}")
                case LinkClosed():
                    raise NodeError("the agent could not start; what it said stands above")
                case StopRequested(_, signum) if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    raise SystemExit(128 + signum)
                case StopRequested():
                    early.append(event)
        for event in early:  # for the ranks, which are yet to be started
            self.post(event)
        return [ready[node] for node in range(len(self._links))]

    def join(self, rendezvous: Rendezvous, nproc: int, say: Callable[[str], None]) -> Elsewhere:
        """Meet the launchpads of the other nodes. Raises NodeError where they don't all come in time."""
        threading.Thread(target=rendezvous.join, args=(nproc, self.post), name="rendezvous", daemon=True).start()
        deadline = time.monotonic() + rendezvous.seconds
        told = time.monotonic() + TELL_SECONDS
        while True:
            now = time.monotonic()
            try:
                _, event = self._inbox.get(timeout=max(0.0, min(deadline, told) - now))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise NodeError(f"{rendezvous.waiting()}; gave up after {rendezvous.seconds:g} s") from None
                say(rendezvous.waiting())
                told = deadline
                continue
            match event:
                case Elsewhere():
                    return event
                case PeerFailed(_, reason):
                    raise NodeError(reason)
                case LinkClosed():
                    raise NodeError("the agent ended while the other nodes were waited for")
                case StopRequested(_, signal.SIGTSTP):
                    os.kill(os.getpid(), signal.SIGSTOP)
                case StopRequested(_, signum) if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    raise SystemExit(128 + signum)

    def _read(self, node: int, link: Link) -> None:
        put = self._inbox.put
        try:
            for event in link.messages():
                put((node, event))
        except (OSError, wire.WireError) as error:
            put((node, AgentFailed(time.monotonic_ns(), str(error))))
        finally:  # the loop waits for this, whatever happens here
            put((node, LinkClosed(time.monotonic_ns())))

    def run(
        self,
        plan: Plan,
        sinks: Sequence[Sink],
        *,
        grace: float | None,
        timeout: float | None,
        max_restarts: int = 0,
        terminal: Sequence[int] = (),
    ) -> tuple[int, Cause | None]:
        """Start the ranks and see the job to its end. Returns the exit code and, unless it is 0, why."""
        self._sinks = sinks
        self._plan = plan
        self._terminal = terminal
        self._max_restarts = max_restarts
        ranks = [rank.rank for rank in plan.ranks]
        machine = Machine(ranks, grace, timeout, self._clock(), max_restarts, len(plan.nodes))
        self._window = max(LEAST_WINDOW, min(LARGEST_WINDOW, WINDOW_BYTES // (2 * len(plan.ranks))))
        for place, node in enumerate(plan.nodes):
            self._node_of.update((rank.rank, place) for rank in node.ranks)
        self._start(attempt=0)
        while self._open and not self.leaving:
            item = self._next(machine)
            now = self._clock()
            if item is not None:
                source, event = item
                if source >= 0 and not self._makes_sense(event):
                    event = AgentFailed(time.monotonic_ns(), f"the agent said what no agent says: {event!r:.80}")
                self._dispatch(event)
                self._act(machine.on(event, now))
                if type(event) is LinkClosed:
                    self._open.discard(source)
                    self._suspending = 0  # it will not say that its ranks have stopped
            for sink in sinks:
                if sink.deadline is not None and sink.deadline <= time.monotonic():
                    sink.tick(time.monotonic())
            self._act(machine.tick(now))
        return machine.exit_code, machine.cause

    def _makes_sense(self, event: Any) -> bool:
        """Whether an agent may say this now: of a rank that it has, and of its end once."""
        match event:
            case Output(_, rank, stream):
                return rank in self._node_of and stream in (STDOUT, STDERR)
            case RankStarted(_, rank) | StartFailed(_, rank) | RankRaised(_, rank):
                return rank in self._node_of
            case RankExited(_, rank, code):
                first = rank in self._node_of and rank not in self._gone
                self._gone.add(rank)
                return first and -256 < code < 256
        return type(event) is not AgentReady

    def _clock(self) -> float:
        """The job's time, in seconds: it stands still while we do."""
        return time.monotonic() - self._suspended

    def _start(self, attempt: int) -> None:
        self._attempt = attempt
        self._owed.clear()
        self._gone.clear()
        for link, node in zip(self._links, self._plan.nodes, strict=True):
            link.send(self._plan.start(node, attempt, self._window, self._terminal))

    def _next(self, machine: Machine) -> tuple[int, Any] | None:
        waits = [sink.deadline - time.monotonic() for sink in self._sinks if sink.deadline is not None]
        if machine.deadline is not None and not self._suspending:
            waits.append(machine.deadline - self._clock())
        try:
            return self._inbox.get(timeout=max(0.0, min(waits)) if waits else None)
        except queue.Empty:
            return None

    def _dispatch(self, event: Any) -> None:
        if type(event) is Written:
            self._written(event.output)
            return
        if type(event) is Suspended and self._suspending:
            self._suspending -= 1
            if not self._suspending:
                self._stand_still()
        holders = 0
        for sink in self._sinks:
            holders += sink.on(event)
        if type(event) is Output:
            if holders:
                self._held[id(event)] = (holders, event, self._attempt)
            else:
                self._give_credit(event)

    def _written(self, output: Output) -> None:
        holders, _, attempt = self._held.pop(id(output))
        if holders > 1:
            self._held[id(output)] = (holders - 1, output, attempt)
        elif attempt == self._attempt:
            self._give_credit(output)

    def _give_credit(self, output: Output) -> None:
        """In portions: a frame for every few bytes would cost more than the bytes."""
        key = (output.rank, output.stream)
        owed = self._owed.get(key, 0) + len(output.data)
        if owed * 4 >= self._window:
            self._links[self._node_of[output.rank]].send(Credit(*key, owed))
            owed = 0
        self._owed[key] = owed

    def _act(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case SendSignal():
                    self._send_all(action)
                case PhaseChanged():
                    self._dispatch(action)
                case Finish(leave):
                    self._send_all(FinishCommand(leave))
                case Restart(attempt, rank, code):
                    self._dispatch(Restarted(time.monotonic_ns(), attempt, self._max_restarts, rank, code))
                    self._start(attempt)
                case Suspend():
                    self._suspending = len(self._open)
                    self._send_all(SendSignal(signal.SIGSTOP))
                case Leave():
                    self.leaving = True

    def _stand_still(self) -> None:
        """Stop ourselves, as Ctrl-Z asks; the ranks have stopped. The shell's fg or bg continues us here."""
        start = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._suspended += time.monotonic() - start
        self._send_all(SendSignal(signal.SIGCONT))

    def _send_all(self, command: Any) -> None:
        for node in self._open:
            self._links[node].send(command)
