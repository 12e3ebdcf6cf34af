"""The loop: one thread owns the job's state; all others only read and put into its inbox.

It sleeps until the next event or deadline. Events go to the state machine, which answers with actions, and to the
sinks, which show and keep them.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from launchpad import __version__, wire
from launchpad.errors import NodeError
from launchpad.events import (
    AgentFailed,
    AgentReady,
    Credit,
    Hello,
    LinkClosed,
    Output,
    PhaseChanged,
    StopRequested,
    Written,
)
from launchpad.events import Finish as FinishCommand
from launchpad.events import Signal as SendSignal
from launchpad.head.machine import Finish, Leave, Machine
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan
from launchpad.transport import Link

# All streams together may have this much output under way between agent and sinks, each at most LARGEST_WINDOW.
WINDOW_BYTES = 16 << 20
LARGEST_WINDOW = 1 << 20
LEAST_WINDOW = 16 << 10

# A node that has not answered by then is not going to.
READY_SECONDS = 30.0

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
        self._held: dict[int, tuple[int, Output]] = {}  # by id: how many sinks still hold the output
        self._owed: dict[tuple[int, int], int] = {}  # credit to be given, by rank and stream
        self._node_of: dict[int, int] = {}
        self.leaving = False  # output is left that nobody takes: don't wait for it

    def post(self, event: Any) -> None:
        """Put an event of the head's own into the inbox; for other threads and signal handlers."""
        self._inbox.put((-1, event))

    def handle_signals(self) -> None:
        """Turn signals into events. One that was ignored when we were started (nohup) stays ignored."""
        for signum in FORWARDED:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda number, _: self.post(StopRequested(time.monotonic_ns(), number)))

    def connect(self, links: Sequence[Link], *, count_gpus: bool) -> list[AgentReady]:
        """Greet the nodes; return their facts. Raises NodeError where one does not answer."""
        self._links = list(links)
        for node, link in enumerate(self._links):
            self._open.add(node)
            threading.Thread(target=self._read, args=(node, link), name=f"link-{node}", daemon=True).start()
            link.send(Hello(__version__, count_gpus))
        ready: dict[int, AgentReady] = {}
        deadline = time.monotonic() + READY_SECONDS
        while len(ready) < len(self._links):
            try:
                node, event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NodeError(f"no answer from the agent within {READY_SECONDS:g} s") from None
            match event:
                case AgentReady():
                    ready[node] = event
                case AgentFailed(_, reason):
                    raise NodeError(f"the agent could not start: {reason}")
                case LinkClosed():
                    raise NodeError("the agent could not start; what it said stands above")
                case StopRequested(_, signum):
                    raise SystemExit(128 + signum)
        return [ready[node] for node in range(len(self._links))]

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
        terminal: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[int, Cause | None]:
        """Start the ranks and see the job to its end. Returns the exit code and, unless it is 0, why."""
        self._sinks = sinks
        machine = Machine([rank.rank for rank in plan.ranks], grace, timeout, clock())
        self._window = max(LEAST_WINDOW, min(LARGEST_WINDOW, WINDOW_BYTES // (2 * len(plan.ranks))))
        for node in plan.nodes:
            self._node_of.update((rank.rank, node.index) for rank in node.ranks)
            self._links[node.index].send(plan.start(node, self._window, 0 if node.index == 0 else -1, terminal))
        while self._open and not self.leaving:
            item = self._next(machine, clock)
            now = clock()
            if item is not None:
                source, event = item
                self._dispatch(event)
                self._act(machine.on(event, now))
                if type(event) is LinkClosed:
                    self._open.discard(source)
            for sink in sinks:
                if sink.deadline is not None and sink.deadline <= now:
                    sink.tick(now)
            self._act(machine.tick(now))
        return machine.exit_code, machine.cause

    def _next(self, machine: Machine, clock: Callable[[], float]) -> tuple[int, Any] | None:
        due = [machine.deadline, *(sink.deadline for sink in self._sinks)]
        deadline = min((moment for moment in due if moment is not None), default=None)
        try:
            return self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - clock()))
        except queue.Empty:
            return None

    def _dispatch(self, event: Any) -> None:
        if type(event) is Written:
            self._written(event.output)
            return
        holders = 0
        for sink in self._sinks:
            holders += sink.on(event)
        if type(event) is Output:
            if holders:
                self._held[id(event)] = (holders, event)
            else:
                self._give_credit(event)

    def _written(self, output: Output) -> None:
        holders, _ = self._held[id(output)]
        if holders > 1:
            self._held[id(output)] = (holders - 1, output)
        else:
            del self._held[id(output)]
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
                case Finish():
                    self._send_all(FinishCommand())
                case Leave():
                    self.leaving = True

    def _send_all(self, command: Any) -> None:
        for node in self._open:
            self._links[node].send(command)
