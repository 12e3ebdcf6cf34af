"""The agents as the head sees them: their links, their clocks and their heartbeats."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.errors import NodeError
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, Ping, Signal
from launchpad.protocol.events import AgentFailed, LinkClosed, Pong
from launchpad.transport import Delivering, Link

# How many pings a node gets within the heartbeat timeout.
PINGS = 4

# How fast two clocks may drift apart, with or without NTP (crystals: 50 ppm; NTP's slewing: up to 500 ppm).
DRIFT = 2e-4

# If the head itself wakes up this late (a paused machine), it declares nobody lost because of it.
LATE_SECONDS = 1.0


class Nodes:
    """The job's nodes, by their index in the plan."""

    def __init__(self, links: Sequence[Link], put: Callable[[tuple[int, Any]], None], silence: float) -> None:
        """`put` gets (node, event) from the reader threads. `silence`: remote nodes' heartbeat timeout in seconds."""
        self._links = list(links)
        self._put = put
        self.silence = silence
        self.open = set(range(len(self._links)))  # nodes whose links are open
        self.remote = [node for node, link in enumerate(self._links) if link.remote]
        self._watched = set(self.remote)  # remote nodes whose links are open
        self._heard = dict.fromkeys(self.remote, 0.0)  # when we last heard from it; written by the reader threads
        self._due = 0.0
        self._stopping: set[int] = set()  # nodes that have not suspended their ranks yet
        # By node, in ns: its clock minus ours, the round-trip time of that measurement, and when we made it.
        self._offset = [0] * len(self._links)
        self._uncertain = [1 << 62] * len(self._links)
        self._learnt = [0] * len(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def name(self, node: int) -> str:
        """The name that the user gave it; "" for a single node on this machine."""
        return self._links[node].name

    def read(self) -> None:
        """Start reading from the agents. Raises NodeError if this machine can't start the threads."""
        for node, link in enumerate(self._links):
            self._begin(node, link)

    def _begin(self, node: int, link: Link) -> None:
        if isinstance(link, Delivering):
            link.deliver(functools.partial(self._take, node, link))
            return
        try:
            threading.Thread(target=self._read, args=(node, link), name=f"link-{node}", daemon=True).start()
        except RuntimeError as error:  # no memory for its stack, or too many threads
            raise NodeError(f"this machine has no room for the launcher's threads: {error}") from None

    def _read(self, node: int, link: Link) -> None:
        try:
            for event in link.messages():
                self._take(node, link, event)
        except (OSError, wire.WireError) as error:
            self._take(node, link, error)
        finally:  # whatever happens here, the loop waits for this
            self._take(node, link, None)

    def _take(self, node: int, link: Link, event: Any) -> None:
        """Take an event, what went wrong, or None at the end of the link; runs in the reader's thread."""
        if self._links[node] is not link:  # this link has been replaced
            return
        self._heard[node] = time.monotonic()
        if isinstance(event, Exception):
            event = AgentFailed(time.monotonic_ns() + self._offset[node], str(event))
        if type(event) is Pong:  # handled here, so that time spent in the inbox does not count
            self._learn(node, event)
        self._put((node, LinkClosed(time.monotonic_ns()) if event is None else event))

    def replace(self, node: int, link: Link) -> None:
        """Give a lost node a new link. Raises NodeError as `read` does."""
        self._links[node] = link
        self._uncertain[node] = 1 << 62
        self._heard[node] = time.monotonic()
        self.open.add(node)
        if link.remote:
            self._watched.add(node)
        self._begin(node, link)

    def send(self, node: int, command: Command) -> None:
        """Send a command to one node."""
        self._links[node].send(command)

    def send_all(self, command: Command) -> None:
        """Send a command to all nodes that are connected."""
        for node in self.open:
            self._links[node].send(command)

    # Clocks.

    def in_our_time(self, node: int, event: Any) -> Any:
        """The event, with its time converted to our clock."""
        offset = self._offset[node]
        return event._replace(time=event.time - offset) if offset else event

    def ping(self) -> None:
        """Ask all remote nodes for a heartbeat, and for their time."""
        for node in self._watched:
            self._links[node].send(Ping(time.monotonic_ns()))

    def _learn(self, node: int, event: Pong) -> None:
        """Estimate the node's clock: it read it half-way between ping and answer. Short round trips are more exact."""
        now = time.monotonic_ns()
        round_trip = now - event.ping
        if 0 <= round_trip < 2 * self.doubt(node):
            self._uncertain[node] = round_trip
            self._learnt[node] = now
            self._offset[node] = event.time - (event.ping + now) // 2

    def doubt(self, node: int) -> int:
        """How wrong a converted time may be, in ns: half the round trip, plus the drift of the clocks since."""
        if not self._links[node].remote:
            return 0
        return self._uncertain[node] // 2 + int((time.monotonic_ns() - self._learnt[node]) * DRIFT)

    # Heartbeats.

    @property
    def deadline(self) -> float | None:
        """When to call `tick`, in seconds of time.monotonic()."""
        return self._due if self.silence and self._watched else None

    def tick(self, now: float) -> list[tuple[int, int]]:
        """Ping the nodes. Returns those that have been silent for too long, with the time of their last event in ns."""
        if now > self._due + LATE_SECONDS:
            self.forgive(now)
        self._due = now + self.silence / PINGS
        self.ping()
        heard = [(node, self._heard[node]) for node in sorted(self._watched)]
        return [(node, int(at * 1e9)) for node, at in heard if now - at > self.silence]

    def forgive(self, now: float) -> None:
        """Restart the heartbeat timeouts: we were not listening."""
        for node in self.remote:
            self._heard[node] = max(self._heard[node], now)

    def ended(self, node: int) -> None:
        """The node's link has ended."""
        self.open.discard(node)
        self._watched.discard(node)

    def abandon(self, node: int) -> None:
        """Expect nothing more from a lost node."""
        self.ended(node)
        # Closing a connection whose far end is silent takes time.
        threading.Thread(target=self._links[node].abandon, name=f"abandon-{node}", daemon=True).start()
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
