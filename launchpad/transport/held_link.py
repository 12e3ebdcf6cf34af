"""A Link that outlives its connection: the far end keeps the agent, and what it says, until we are back.

It may outlive its process too: its state at a checkpoint is a value (LinkState), from which another process goes on.
Then the far end keeps all events that are not in a checkpoint, and commands wait for one that has them: so none is
carried out twice, whatever happens in between.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from math import inf
from typing import Any

from launchpad.errors import ConnectError, UsageError
from launchpad.named import NamedTuple
from launchpad.protocol.commands import Command, Credit, EventsTaken, LetGo, Ping
from launchpad.protocol.events import CommandsTaken, ContactLost, ContactRegained, HoldEnded, LinkHeld, Output
from launchpad.transport import Link

# How long to wait before the host is tried again: at first, and at most.
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0

# How long what a login leaves may take to be ended with it.
SETTLE_SECONDS = 0.5
_ENDS = (
    "all that a login leaves there is ended with it, so ranks can't outlive a connection; have KillUserProcesses=no "
    "set in its logind.conf, or leave --keep-running out"
)

# What the far end is told to forget: after so many events, or bytes of output.
_EVENTS = 64
_BYTES = 1 << 20

# How many signs of life the agent gives within the heartbeat timeout; and the timeout if there is to be none.
_PINGS = 4
_SILENCE = 30.0

Dial = Callable[[dict[str, Any]], Link]  # with {"hold"} for agent/arrival.py, or {"resume"}. Raises ConnectError.

# These wait for no checkpoint: it does no harm if they are sent again.
_FREE = (Credit, Ping)


class Way(NamedTuple):
    """How to get to a host."""

    user: str
    port: int
    python: str
    ssh: str  # --ssh; "" for as it needs it
    ssh_config: str  # --ssh-config; "" for the user's
    here: bool  # it is this machine, and is reached without SSH


class LinkState(NamedTuple):
    """A link at a checkpoint."""

    name: str
    way: Way
    seconds: float  # as HeldLink's, like the next one
    silence: float
    place: str  # of the holder
    secret: str
    got: int  # how many events
    known: int  # how many commands the far end has, as far as we know
    commands: tuple[Command, ...]  # those after them
    sure: int  # how many of these it may have, too; if it has more, those were free
    queued: int  # how many commands there have been in this process
    ended: bool  # the agent has ended


class HolderGone(ConnectError):
    """Nothing of the job is left there; `text` says why."""


class HeldLink:
    """A Link through one connection after the other."""

    remote = True

    def __init__(
        self, name: str, way: Way, dial: Dial, seconds: float, silence: float, state: LinkState | None = None
    ) -> None:
        """Connect. Raises ConnectError. With `state`, of another process, `take_over` does that.

        `way`: how `dial` gets there, for others that have to. `seconds`: for how long the far end keeps the agent
        without us. `silence`: after so many seconds a silent connection is dead; 0: never.
        """
        self.name = name
        self.way = way
        self._dial = dial
        self._seconds = seconds
        self._silence = silence
        self._secret = secrets.token_hex(16)
        self._lock = threading.Lock()  # guards the next eight
        self._sent: deque[Command] = deque()  # that the far end may not have
        self._forgotten = 0  # how many before these it has
        self._passed = 0  # how many have been sent over the last connection, or need not be
        self._allowed = inf  # how many may be sent: those that a checkpoint has
        self._before = 0  # how many commands the far end has of other processes
        self._sure: int | None = None  # of those taken over, how many may have been sent; None: it has told
        self._wants: Callable[[], None] = _nothing  # asks for a checkpoint
        self._inner: Link | None = None
        self._dead: Link | None = None  # the last one that we have hung up on
        self._place = ""  # of the holder
        self.gate = threading.Lock()  # an event is counted and passed on, or neither, while one has it
        self._got = 0  # how many events
        self._told = 0  # how many of them the far end has forgotten
        self._unacknowledged = 0  # bytes of output
        self._heard = time.monotonic()
        self._ahead = 0  # how far its clock is ahead of ours, about, in ns
        self._over = threading.Event()
        self._ended = False  # the agent has
        self._unreachable = False  # the last try to come back has failed
        self._dialled: tuple[Link, Iterator[Any]] | None = None  # by `take_over`
        self._tried = threading.Event()  # `take_over` has come to an end, or is not needed
        self._leads = state is None  # it is for us to end the agent
        if state is None:
            self._inner = dial({"hold": {"seconds": seconds, "secret": self._secret}})
            self._tried.set()
        else:
            self._restore(state)
        self.python_sought: str = getattr(self._inner, "python_sought", "")
        self.own_address: str = getattr(self._inner, "own_address", "")
        threading.Thread(target=self._beat, name=f"beat-{name}", daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command. It is sent again if it was lost with the connection."""
        with self._lock:
            self._sent.append(command)
            self._pass_on()
            waits = self._allowed <= self._passed < self._forgotten + len(self._sent)
        if waits:
            self._wants()

    def _pass_on(self) -> None:
        """Send what may be sent. With the lock."""
        while self._inner is not None and self._passed < self._forgotten + len(self._sent):
            command = self._sent[self._passed - self._forgotten]
            if self._passed >= self._allowed and not isinstance(command, _FREE):
                break
            self._inner.send(command)
            self._passed += 1

    def try_out(self) -> None:
        """Find out whether the far end outlives its first connection. Raises ConnectError if it doesn't."""
        inner = self._inner
        assert inner is not None
        stream = inner.messages()
        first = next(stream, None)
        if not isinstance(first, LinkHeld):  # it has not come up: whoever reads finds out why
            self._dialled = inner, chain([first] if first is not None else [], stream)
            return
        self._place = first.place
        with self._lock:
            self._inner = None
        inner.close()
        time.sleep(SETTLE_SECONDS)
        try:
            ended = self._join().ended
        except HolderGone:
            ended = True
        if ended:
            raise ConnectError("session", self.name, _ENDS)

    # Checkpoints.

    def keep(self, wants: Callable[[], None]) -> None:
        """From now on, nothing is forgotten before `commit`. `wants` asks for a checkpoint, in any thread.

        A link that was taken over is ours from here on: until then, `close` leaves the agent to others.
        """
        with self._lock:
            self._leads = True
            self._allowed = min(self._allowed, self._forgotten + len(self._sent))
            self._wants = wants

    def state(self, got: int) -> LinkState:
        """The link at a checkpoint, where so many of its events have been taken."""
        with self._lock:
            commands = tuple(self._sent)
            return LinkState(
                *(self.name, self.way, self._seconds, self._silence, self._place, self._secret),
                got=got,
                known=self._before + self._forgotten,
                commands=commands,
                sure=len(commands) if self._sure is None else self._sure,
                queued=self._forgotten + len(commands),
                ended=self._ended and got == self._got,
            )

    @property
    def got(self) -> int:
        """How many events there have been."""
        return self._got

    def commit(self, state: LinkState) -> None:
        """A checkpoint has this state."""
        with self._lock:
            self._allowed = max(self._allowed, state.queued)
            self._pass_on()
        self._acknowledge(state.got)

    def let_pass(self) -> None:
        """There are no more checkpoints."""
        with self._lock:
            self._allowed, self._wants = inf, _nothing
            self._pass_on()
        self._acknowledge(self._got)

    @property
    def _keeps(self) -> bool:
        return self._allowed != inf

    # Taking over.

    def _restore(self, state: LinkState) -> None:
        self._secret, self._place = state.secret, state.place
        self._got = self._told = state.got
        self._before = state.known
        self._sent.extend(state.commands)
        self._sure = state.sure
        self._allowed = len(state.commands)
        self._ended = state.ended
        if state.ended:
            self._tried.set()

    def take_over(self) -> None:
        """Connect to the holder; the reader waits for that. Raises ConnectError; HolderGone if there is none."""
        try:
            self._join()
        except ConnectError:
            self._unreachable = True
            raise
        finally:
            self._tried.set()

    def _join(self) -> LinkHeld:
        """What the holder says first."""
        inner = self._resume()
        stream = inner.messages()
        try:
            first = next(stream, None)
        except OSError as error:
            raise ConnectError("protocol", self.name, str(error)) from None
        if isinstance(first, HoldEnded):
            inner.close()
            raise HolderGone("protocol", self.name, first.reason)
        if not isinstance(first, LinkHeld):
            raise ConnectError("protocol", self.name, "the connection was closed at once")
        self._dialled = inner, chain([first], stream)
        return first

    def _beat(self) -> None:
        """Have the agent give a sign of life, and hang up on a connection that has none."""
        every = min((self._silence or _SILENCE), self._seconds) / _PINGS
        while not self._over.wait(every):
            with self._lock:
                inner = self._inner
            if inner is None or not self._place:  # nobody reads yet what it says
                continue
            if self._silence and time.monotonic() - self._heard > self._silence:
                self._hang_up_on(inner)
                continue
            self.send(Ping(time.monotonic_ns()))
            if not self._keeps:
                self._acknowledge(self._got)

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it ends. Raises OSError if it was out of reach for too long, and WireError."""
        if not self._ended:
            self._tried.wait()
        inner, stream = self._dialled or (self._inner, None)
        lost_at = 0.0
        while not self._ended:
            if inner is None:
                if not lost_at:
                    lost_at = time.monotonic()
                    yield ContactLost(time.monotonic_ns() + self._ahead, self._seconds)
                inner = self._again(lost_at + self._seconds)
                if inner is None:
                    return
            for event in self._until_lost(stream or inner.messages()):
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
                        with self.gate:
                            self._got += 1
                            self._ended = True
                        if not self._keeps:
                            self._acknowledge(self._got)
                        return
                    case HoldEnded(reason=reason):
                        raise OSError(reason)
                    case _:
                        with self.gate:
                            self._got += 1
                            yield event
                        self._count(event)
            if self._over.is_set() or not self._place:
                return
            self._hang_up_on(inner)
            inner = stream = None

    def _until_lost(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Its messages. If it can be resumed, it ends without an error."""
        try:
            yield from stream
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
            if self._leads:
                inner.send(LetGo())
            inner.close()
        return None

    def _resume(self) -> Link:
        asked = {"place": self._place, "secret": self._secret, "taken": self._got, "done": self._told}
        try:
            return self._dial({"resume": asked})
        except UsageError as error:  # ssh's configuration is not what it was at the job's start
            raise ConnectError("unreachable", self.name, str(error)) from None

    def _begin(self, inner: Link, held: LinkHeld) -> None:
        """Go on there, with the commands that the far end doesn't have."""
        if not self._place:  # the first connection
            self._place = held.place
            return
        with self._lock:
            if self._sure is not None:  # what it has beyond that was sent after the checkpoint, and free
                self._before = max(self._before, held.taken - self._sure)
                self._sure = None
        self._forget(held.taken)
        with self._lock:
            self._passed, self._inner = self._forgotten, inner
            self._pass_on()

    def _forget(self, count: int) -> None:
        """The far end has so many commands."""
        with self._lock:
            while self._before + self._forgotten < count and self._sent:
                self._sent.popleft()
                self._forgotten += 1

    def _count(self, event: Any) -> None:
        self._unacknowledged += len(event.data) if type(event) is Output else 0
        if not self._keeps and (self._got - self._told >= _EVENTS or self._unacknowledged >= _BYTES):
            self._acknowledge(self._got)

    def _acknowledge(self, got: int) -> None:
        """Have the far end forget so many events."""
        with self._lock:
            if self._inner is not None and got > self._told:
                self._inner.send(EventsTaken(got))
                self._told, self._unacknowledged = got, 0

    def _let_go(self) -> Link | None:
        """Have the far end hang up on its agent, if we lead it. Returns the connection to it, if there is one."""
        self._over.set()
        with self._lock:
            inner = self._inner
        if not self._leads:
            return inner or (self._dialled[0] if self._dialled else None)
        if inner is None:  # if we can't come back, the agent ends by itself when its time is over
            self._tried.wait()
            if self._unreachable:
                return None
            try:
                inner = self._resume()
            except ConnectError:
                return None
        if self._got > self._told:
            inner.send(EventsTaken(self._got))
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


def _nothing() -> None:
    """Asks for nothing."""
