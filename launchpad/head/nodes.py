"""The agents as the head sees them: their links, their clocks, and whether they are still there."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad import wire
from launchpad.commands import Command, Ping, Signal
from launchpad.errors import NodeError
from launchpad.events import AgentFailed, LinkClosed, Pong
from launchpad.transport import Delivering, Link

# A node is asked for a sign of life so many times within the time that it may be silent.
PINGS = 4

# Two clocks, each kept right by NTP or by nobody, go apart by so much (crystals: 50 ppm, NTP's slewing: up to 500).
DRIFT = 2e-4

# A head that has itself stood still so much longer than it meant to (a paused machine) judges nobody by that time.
LATE_SECONDS = 1.0


class Nodes:
    """The job's nodes by their place in the plan."""

    def __init__(self, links: Sequence[Link], put: Callable[[tuple[int, Any]], None], silence: float) -> None:
        """`put` takes (node, event) from the threads that read; `silence`: seconds that a remote node may be silent."""
        self._links = list(links)
        self._put = put
        self.silence = silence
        self.open = set(range(len(self._links)))  # whose links have not ended
        self.remote = [node for node, link in enumerate(self._links) if link.remote]
        self._watched = set(self.remote)  # those of them that are open
        self._heard = dict.fromkeys(self.remote, 0.0)  # when; written by the reading threads
        self._due = 0.0
        self._stopping: set[int] = set()  # who has yet to stop its ranks
        # By node: what is to be taken from its times to have ours, and how long the question was under way, both in ns.
        self._offset = [0] * len(self._links)
        self._uncertain = [1 << 62] * len(self._links)
        self._learnt = [0] * len(self._links)  # when, in ns

    def __len__(self) -> int:
        return len(self._links)

    def name(self, node: int) -> str:
        """As the user named it; "" for the only one, here."""
        return self._links[node].name

    def read(self) -> None:
        """Begin to read what the agents say. Raises NodeError where this machine has no room for that."""
        for node, link in enumerate(self._links):
            self._begin(node, link)

    def _begin(self, node: int, link: Link) -> None:
        if isinstance(link, Delivering):
            link.deliver(functools.partial(self._take, node, link))
            return
        try:
            threading.Thread(target=self._read, args=(node, link), name=f"link-{node}", daemon=True).start()
        except RuntimeError as error:  # no memory for its stack, or too many of them
            raise NodeError(f"this machine has no room for the launcher: {error}") from None

    def _read(self, node: int, link: Link) -> None:
        try:
            for event in link.messages():
                self._take(node, link, event)
        except (OSError, wire.WireError) as error:
            by_its_clock = time.monotonic_ns() + self._offset[node]
            self._take(node, link, AgentFailed(by_its_clock, str(error)))
        finally:  # the loop waits for this, whatever happens here
            self._take(node, link, None)

    def _take(self, node: int, link: Link, event: Any) -> None:
        """An event, or None at the end, in whichever thread reads."""
        if self._links[node] is not link:  # nobody waits for one that was replaced
            return
        self._heard[node] = time.monotonic()
        if type(event) is Pong:  # here, as its time in the inbox is none on the way
            self._learn(node, event)
        self._put((node, LinkClosed(time.monotonic_ns()) if event is None else event))

    def replace(self, node: int, link: Link) -> None:
        """A node that was lost has a new link. Raises NodeError as `read` does."""
        self._links[node] = link
        self._uncertain[node] = 1 << 62
        self._heard[node] = time.monotonic()
        self.open.add(node)
        if link.remote:
            self._watched.add(node)
        self._begin(node, link)

    def send(self, node: int, command: Command) -> None:
        """Send a command to one."""
        self._links[node].send(command)

    def send_all(self, command: Command) -> None:
        """Send a command to all that are there."""
        for node in self.open:
            self._links[node].send(command)

    # Clocks.

    def in_our_time(self, node: int, event: Any) -> Any:
        """The event with its time by our clock."""
        offset = self._offset[node]
        return event._replace(time=event.time - offset) if offset else event

    def ping(self) -> None:
        """Ask all remote nodes for a sign of life, and for their time."""
        for node in self._watched:
            self._links[node].send(Ping(time.monotonic_ns()))

    def _learn(self, node: int, event: Pong) -> None:
        """The node's clock: it said its time half-way between question and answer, the better the sooner."""
        now = time.monotonic_ns()
        under_way = now - event.ping
        if 0 <= under_way < 2 * self.doubt(node):
            self._uncertain[node] = under_way
            self._learnt[node] = now
            self._offset[node] = event.time - (event.ping + now) // 2

    def doubt(self, node: int) -> int:
        """By how much its times in ours may be wrong, in ns: half the way there and back, and what clocks drift."""
        if node not in self.remote:
            return 0
        return self._uncertain[node] // 2 + int((time.monotonic_ns() - self._learnt[node]) * DRIFT)

    # Signs of life.

    @property
    def deadline(self) -> float | None:
        """When `tick` is to be called, in seconds of time.monotonic()."""
        return self._due if self.silence and self._watched else None

    def tick(self, now: float) -> list[tuple[int, int]]:
        """Ask for signs of life; the nodes that have given none for too long, and the time of their last one, in ns."""
        if now > self._due + LATE_SECONDS:
            self.forgive(now)
        self._due = now + self.silence / PINGS
        self.ping()
        heard = [(node, self._heard[node]) for node in sorted(self._watched)]
        return [(node, int(at * 1e9)) for node, at in heard if now - at > self.silence]

    def forgive(self, now: float) -> None:
        """Begin to count anew: we have not listened."""
        for node in self.remote:
            self._heard[node] = max(self._heard[node], now)

    def ended(self, node: int) -> None:
        """Its link has ended."""
        self.open.discard(node)
        self._watched.discard(node)

    def abandon(self, node: int) -> None:
        """Expect nothing more of a node that is lost."""
        self.ended(node)
        # Closing a connection whose far end is silent takes a while.
        threading.Thread(target=self._links[node].abandon, name=f"abandon-{node}", daemon=True).start()
        if self._stopping:  # it may never say that its ranks have stopped
            self.resume()

    # Standing still (Ctrl-Z).

    def suspend(self) -> None:
        """Have all nodes stop their ranks, and not miss us until they hear that we go on."""
        self._stopping = set(self.open)
        self.send_all(Signal(signal.SIGSTOP))

    def suspended(self, node: int) -> bool:
        """A node has stopped its ranks: whether all have now, and we may stop, too."""
        last = self._stopping == {node}
        self._stopping.discard(node)
        return last

    def stand_still(self) -> float:
        """Stop ourselves, as Ctrl-Z asks; the shell's fg or bg continues us here. Returns for how many seconds."""
        start = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        self.forgive(now)
        self.resume()
        return now - start

    def resume(self) -> None:
        """Have all ranks go on."""
        self._stopping.clear()
        self.send_all(Signal(signal.SIGCONT))
