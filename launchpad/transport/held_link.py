"""A Link that outlives its connection: the far end keeps the agent, and what it says, until we are back."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from launchpad.errors import ConnectError
from launchpad.protocol.commands import Command, EventsTaken, LetGo, Ping
from launchpad.protocol.events import CommandsTaken, ContactLost, ContactRegained, HoldEnded, LinkHeld, Output
from launchpad.transport import Link

# How long to wait before the host is tried again: at first, and at most.
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0

# What the far end is told to forget: after so many events, or bytes of output.
_EVENTS = 64
_BYTES = 1 << 20

# How many signs of life the agent gives within the heartbeat timeout; and the timeout if there is to be none.
_PINGS = 4
_SILENCE = 30.0

Way = tuple[str, int, str, str, str]  # user, port, Python, --ssh, --ssh-config
Dial = Callable[[dict[str, Any]], Link]  # what to ask of agent/arrival.py. Raises ConnectError.


class HeldLink:
    """A Link through one connection after the other."""

    remote = True

    def __init__(self, name: str, way: Way, dial: Dial, seconds: float, silence: float) -> None:
        """Connect. Raises ConnectError.

        `way`: how `dial` gets there, for others that have to. `seconds`: for how long the far end keeps the agent
        without us. `silence`: after so many seconds a silent connection is dead; 0: never.
        """
        self.name = name
        self.way = way
        self._dial = dial
        self._seconds = seconds
        self._silence = silence
        self._secret = secrets.token_hex(16)
        self._lock = threading.Lock()  # guards the next three
        self._sent: deque[Command] = deque()  # that the far end may not have
        self._forgotten = 0  # how many it has
        self._inner: Link | None = dial({"hold": {"seconds": seconds, "secret": self._secret}})
        self._dead: Link | None = None  # the last one that we have hung up on
        self._place = ""  # of the holder
        self._got = 0  # how many events, of which it knows `_told`
        self._told = 0
        self._unacknowledged = 0  # bytes of output
        self._heard = time.monotonic()
        self._ahead = 0  # how far its clock is ahead of ours, about, in ns
        self._over = threading.Event()
        self._unreachable = False  # the last try to come back has failed
        self.python_sought: str = getattr(self._inner, "python_sought", "")
        self.own_address: str = getattr(self._inner, "own_address", "")
        threading.Thread(target=self._beat, name=f"beat-{name}", daemon=True).start()

    @property
    def held(self) -> tuple[str, str]:
        """Where the holder is, and the secret that it asks for."""
        return self._place, self._secret

    def send(self, command: Command) -> None:
        """Queue a command. It is sent again if it was lost with the connection."""
        with self._lock:
            self._sent.append(command)
            if self._inner is not None:
                self._inner.send(command)

    def _beat(self) -> None:
        """Have the agent give a sign of life, and hang up on a connection that has none."""
        every = min((self._silence or _SILENCE), self._seconds) / _PINGS
        while not self._over.wait(every):
            with self._lock:
                inner = self._inner
            if inner is None:
                continue
            if self._silence and time.monotonic() - self._heard > self._silence:
                self._hang_up_on(inner)
                continue
            self.send(Ping(time.monotonic_ns()))
            self._acknowledge()

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it ends. Raises OSError if it was out of reach for too long, and WireError."""
        inner, lost_at = self._inner, 0.0
        while inner is not None:
            for event in self._until_lost(inner):
                self._note(event)
                match event:
                    case LinkHeld():
                        self._begin(inner, event)
                        if lost_at:
                            away, lost_at = time.monotonic() - lost_at, 0.0
                            yield ContactRegained(event.time, away)
                    case CommandsTaken(commands=count):
                        self._forget(count)
                    case HoldEnded(reason=""):
                        self._got += 1
                        self._acknowledge()
                        return
                    case HoldEnded(reason=reason):
                        raise OSError(reason)
                    case _:
                        self._count(event)
                        yield event
            if self._over.is_set() or not self._place:
                return
            self._hang_up_on(inner)
            if not lost_at:
                lost_at = time.monotonic()
                yield ContactLost(time.monotonic_ns() + self._ahead, self._seconds)
            inner = self._again(lost_at + self._seconds)

    def _until_lost(self, inner: Link) -> Iterator[Any]:
        """Its messages. If it can be resumed, it ends without an error."""
        try:
            yield from inner.messages()
        except OSError:
            if not self._place:
                raise

    def _note(self, event: Any) -> None:
        """The far end is there, and its clock says so."""
        self._heard = time.monotonic()
        self._ahead = event.time - time.monotonic_ns()

    def _hang_up_on(self, inner: Link) -> None:
        """Close a connection that is dead, without waiting for that."""
        with self._lock:
            if self._inner is inner:
                self._inner = None
            first, self._dead = self._dead is not inner, inner
        if first:
            threading.Thread(target=inner.abandon, name=f"abandon-{self.name}", daemon=True).start()

    def _again(self, until: float) -> Link | None:
        """A new connection to the holder; None if we hang up. Raises OSError if there is none by then."""
        pause = FIRST_PAUSE
        while not self._over.wait(pause):
            try:
                inner = self._resume()
            except ConnectError as error:
                self._unreachable = True
                if time.monotonic() > until:
                    why = str(error).removeprefix(f"{self.name}: ")
                    raise OSError(f"no contact for {self._seconds:g} s: {why}") from None
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            self._unreachable = False
            if not self._over.is_set():
                return inner
            inner.send(LetGo())
            inner.close()
        return None

    def _resume(self) -> Link:
        return self._dial({"resume": {"place": self._place, "secret": self._secret, "taken": self._got}})

    def _begin(self, inner: Link, held: LinkHeld) -> None:
        """Go on there, with the commands that the far end doesn't have."""
        if not self._place:  # the first connection
            self._place = held.place
            return
        self._forget(held.taken)
        with self._lock:
            for command in self._sent:
                inner.send(command)
            self._inner = inner

    def _forget(self, count: int) -> None:
        """The far end has so many commands."""
        with self._lock:
            while self._forgotten < count and self._sent:
                self._sent.popleft()
                self._forgotten += 1

    def _count(self, event: Any) -> None:
        self._got += 1
        self._unacknowledged += len(event.data) if type(event) is Output else 0
        if self._got - self._told >= _EVENTS or self._unacknowledged >= _BYTES:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell the far end what it may forget."""
        got = self._got
        with self._lock:
            if self._inner is not None and got > self._told:
                self._inner.send(EventsTaken(got))
                self._told, self._unacknowledged = got, 0

    def _let_go(self) -> Link | None:
        """Have the far end hang up on its agent. Returns the connection to it, if there is one."""
        self._over.set()
        with self._lock:
            inner = self._inner
        if inner is None:  # if we can't come back, the agent ends by itself when its time is over
            if self._unreachable:
                return None
            try:
                inner = self._resume()
            except ConnectError:
                return None
        inner.send(LetGo())
        return inner

    def close(self) -> None:
        """Hang up for good, and wait for the agent."""
        inner = self._let_go()
        if inner is not None:
            inner.close()

    def abandon(self) -> None:
        """Hang up for good. Only to the end of the agent, if it can be reached, is there a way to be sure of it."""
        self.close()
