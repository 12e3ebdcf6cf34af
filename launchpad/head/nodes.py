"""The agents as the head sees them: their links, their clocks and their heartbeats."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.errors import NodeError
from launchpad.named import NamedTuple
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, JobEnded, Ping, Signal
from launchpad.protocol.events import AgentFailed, LinkClosed, Pong
from launchpad.transport import Delivering, Link

# How many pings a node gets within the heartbeat timeout.
PINGS = 4

# How fast two clocks may drift apart, with or without NTP (crystals: 50 ppm; NTP's slewing: up to 500 ppm).
DRIFT = 2e-4

# If the head itself wakes up this late (a paused machine), it declares nobody lost because of it.
LATE_SECONDS = 1.0

# Who looks later than this for a sign of the other side may have stood still with it: who is silent then gets a moment
# more. The agent has the same (agent/loop.py).
PUNCTUAL_SECONDS = 0.01


class ClockState(NamedTuple):
    """What is known of a node's clock. In ns."""

    offset: int = 0  # it minus ours
    uncertain: int = 1 << 62  # the round-trip time of that measurement
    learnt: int = 0  # when we made it

    def moved(self, by: int) -> "ClockState":
        """The same where our clock is ahead of the one before by so much."""
        return ClockState(self.offset - by, self.uncertain, self.learnt + by)


class Node:
    """One agent: its link, its clock, and when it was last heard from."""

    def __init__(self, link: Link, put: Callable[[Any], None]) -> None:
        """`put` gets each event, in the reader's thread."""
        self.link = link
        self.put = put
        self.heard = 0.0  # seconds of time.monotonic(); written by the reader's thread
        self.clock = ClockState()
        self._cut: threading.Event | None = None  # we treat the link as dead; set when the far end has hung up

    def send(self, command: Command) -> None:
        """Send it a command."""
        if self._cut is None:
            self.link.send(command)

    def cut(self) -> None:
        """From now on, drop all that comes from it or is meant for it, and let neither side hear of it."""
        self._cut = threading.Event()

    def abandon(self, seconds: float) -> None:
        """Hang up without waiting for it. If it was cut off, it has to notice by itself first, within these seconds."""
        if self._cut is not None:
            self._cut.wait(seconds)
        self.link.abandon()

    def read(self, gate: threading.Event | None = None) -> None:
        """Start reading from the agent, once the gate is set. Raises NodeError if this machine can't start a thread.

        A `Delivering` link needs no gate: it is not one of those that a resume reads.
        """
        if isinstance(self.link, Delivering):
            self.link.deliver(self._take)
            return
        try:
            threading.Thread(target=self._read, args=(gate,), name=f"link-{self.link.name}", daemon=True).start()
        except RuntimeError as error:  # no memory for its stack, or too many threads
            raise NodeError(f"this machine has no room for the launcher's threads: {error}") from None

    def _read(self, gate: threading.Event | None) -> None:
        if gate is not None:
            gate.wait()
        try:
            for event in self.link.messages():
                self._take(event)
        except (OSError, wire.WireError) as error:
            self._take(error)
        finally:  # whatever happens here, the loop waits for this
            self._take(None)

    def _take(self, event: Any) -> None:
        """Take an event, what went wrong, or None at the end of the link."""
        if self._cut is not None:
            if event is None:
                self._cut.set()
            return
        self.heard = time.monotonic()
        if isinstance(event, Exception):
            event = AgentFailed(time.monotonic_ns() + self.clock.offset, str(event))
        if type(event) is Pong:  # handled here, so that time spent in the inbox does not count
            self.learn(event)
        self.put(LinkClosed(time.monotonic_ns()) if event is None else event)

    def learn(self, event: Pong) -> None:
        """Estimate its clock: it read it half-way between ping and answer. Short round trips are more exact."""
        if not event.ping:
            return
        now = time.monotonic_ns()
        round_trip = now - event.ping
        if 0 <= round_trip < 2 * self.doubt():
            self.clock = ClockState(event.time - (event.ping + now) // 2, round_trip, now)

    def doubt(self) -> int:
        """How wrong a converted time may be, in ns: half the round trip, plus the drift of the clocks since."""
        if not self.link.remote:
            return 0
        return self.clock.uncertain // 2 + int((time.monotonic_ns() - self.clock.learnt) * DRIFT)

    def in_our_time(self, event: Any) -> Any:
        """The event, with its time converted to our clock."""
        offset = self.clock.offset
        return event._make((event.time - offset, *event[1:])) if offset else event


class Nodes:
    """The job's nodes, by their numbers: those of the plan, and then those that joined later."""

    def __init__(self, links: Sequence[Link], put: Callable[[tuple[int, Any]], None], silence: float) -> None:
        """`put` gets (node, event) from the reader threads. `silence`: remote nodes' heartbeat timeout in seconds."""
        self._put = put
        self.silence = silence
        self._nodes: list[Node] = []
        self.open: set[int] = set()  # nodes whose links are open
        self._watched: set[int] = set()  # remote nodes whose links are open
        self._due = 0.0
        self._doubted: set[int] = set()  # those that were silent at the last tick, which came late
        self._stopping: set[int] = set()  # nodes that have not suspended their ranks yet
        self._gate = threading.Event()  # readers that were begun beforehand wait for it
        for number, link in enumerate(links):
            self.adopt(number, Node(link, functools.partial(self._take, number)))

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: int) -> Node:
        return self._nodes[node]

    @property
    def remote(self) -> list[int]:
        """Those whose links can go silent without ending."""
        return [number for number, node in enumerate(self._nodes) if node.link.remote]

    def name(self, node: int) -> str:
        """The name that the user gave it; "" for a single node on this machine."""
        return self._nodes[node].link.name

    def read(self) -> None:
        """Start reading from the agents. Raises NodeError if this machine can't start the threads."""
        for node in self._nodes:
            node.read()

    def prepare(self, node: int) -> None:
        """Do what may fail of reading from this one, which begins with `go_on`. Raises NodeError as `read`."""
        self._nodes[node].read(self._gate)

    def go_on(self) -> None:
        """Read from those that have been prepared for it."""
        self._gate.set()

    def _take(self, number: int, event: Any) -> None:
        self._put((number, event))

    def adopt(self, number: int, node: Node) -> None:
        """Take a node, which may be read from already, as this one of ours; the one before is forgotten."""
        if number < len(self._nodes):
            self._nodes[number] = node
        else:
            self._nodes.append(node)
        node.put = functools.partial(self._take, number)
        node.heard = max(node.heard, time.monotonic())
        self.open.add(number)
        if node.link.remote:
            self._watched.add(number)

    def send(self, node: int, command: Command) -> None:
        """Send a command to one node."""
        self._nodes[node].send(command)

    def send_all(self, command: Command) -> None:
        """Send a command to all nodes that are connected."""
        for node in self.open:
            self._nodes[node].send(command)

    # Clocks.

    def in_our_time(self, node: int, event: Any) -> Any:
        """The event, with its time converted to our clock."""
        return self._nodes[node].in_our_time(event)

    def ping(self) -> None:
        """Ask all remote nodes for a heartbeat, and for their time."""
        for node in self._watched:
            self._nodes[node].send(Ping(time.monotonic_ns()))

    def doubt(self, node: int) -> int:
        """How wrong a converted time of this node's may be, in ns."""
        return self._nodes[node].doubt()

    # Heartbeats.

    @property
    def deadline(self) -> float | None:
        """When to call `tick`, in seconds of time.monotonic()."""
        return self._due if self.silence and self._watched else None

    def keep_alive(self) -> None:
        """Ping the nodes if it is time to: for the loop, when it does something that may take long."""
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            self._beat(now)

    def _beat(self, now: float) -> None:
        self._due = now + self.silence / PINGS
        self.ping()

    def tick(self, now: float) -> list[tuple[int, int]]:
        """Ping the nodes. Returns those that have been silent for too long, with the time of their last event in ns."""
        if now > self._due + LATE_SECONDS:
            self.forgive(now)
        punctual = now <= self._due + PUNCTUAL_SECONDS
        self._beat(now)
        silent = {node for node in self._watched if now - self._nodes[node].heard > self.silence}
        lost = silent if punctual else silent & self._doubted
        self._doubted = silent - lost
        return [(node, int(self._nodes[node].heard * 1e9)) for node in sorted(lost)]

    def forgive(self, now: float) -> None:
        """Restart the heartbeat timeouts: we were not listening."""
        for node in self._nodes:
            node.heard = max(node.heard, now)

    def ended(self, node: int) -> None:
        """The node's link has ended."""
        self.open.discard(node)
        self._watched.discard(node)

    def forget(self, node: int) -> None:
        """What the node says from now on is not heard: its number may soon be another link's."""
        self.ended(node)
        self._nodes[node].put = _forget

    def hang_up(self, node: int) -> None:
        """Close the connection to a node, and forget it."""
        self.forget(node)
        # Closing a connection whose far end is silent takes time.
        lost = self._nodes[node]
        threading.Thread(target=lost.abandon, args=(2 * self.silence,), name=f"abandon-{node}", daemon=True).start()

    def abandon(self, node: int, ended: JobEnded) -> None:
        """Hang up on a lost node. One that has joined is told, if it can be."""
        if isinstance(self._nodes[node].link, Delivering):
            self.send(node, ended)
        self.hang_up(node)
        if self._stopping:  # it may never report that its ranks are suspended
            self.resume()

    # Suspending (Ctrl-Z).

    def suspend(self) -> None:
        """Have all nodes suspend their ranks, and not time us out until they are resumed."""
        self._stopping = set(self.open)
        self.send_all(Signal(signal.SIGSTOP))

    def suspended(self, node: int) -> bool:
        """Note that a node has suspended its ranks. Returns whether it was the last, so that we may stop too."""
        last = self._stopping == {node}
        self._stopping.discard(node)
        return last

    def stand_still(self) -> float:
        """Stop ourselves until the shell's fg or bg continues us. Returns how many seconds that took."""
        start = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        self.forgive(now)
        self.resume()
        return now - start

    def resume(self) -> None:
        """Have all nodes resume their ranks."""
        self._stopping.clear()
        self.send_all(Signal(signal.SIGCONT))


def _forget(_: Any) -> None:
    """What a forgotten node says."""
