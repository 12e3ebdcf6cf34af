"""Checkpoints of a job whose ranks go on without the head (--keep-running): another head goes on from the last one.

A checkpoint is a cut through the stream of messages. What stands before it, the record has; what comes after it, the
hosts still have, as they forget only what is in a checkpoint; and a command that it doesn't have has not been sent. So
nothing is lost, and nothing happens twice, wherever the head is killed.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from launchpad import linux
from launchpad.head.clock import Clock
from launchpad.head.hub import Hub
from launchpad.head.nodes import ClockState
from launchpad.head.part import Part
from launchpad.head.planner import Planner
from launchpad.job.plan import Stdin
from launchpad.named import NamedTuple
from launchpad.output.mark import SinkMark
from launchpad.protocol.events import NodeJoined, NotResumable, RankStarted
from launchpad.protocol.message import Message
from launchpad.transport.held_link import HeldLink, LinkState

# How often at most, in seconds, unless a command waits for one; and how long one may take.
EVERY_SECONDS = 0.2
MOST_SECONDS = 5.0

# How long hosts have at most to hear that we hang up, if we are in a hurry.
LEAVE_SECONDS = 2.0


class CheckpointStore(Protocol):
    """Where checkpoints are kept."""

    refusal: str  # why nobody could go on from one; "" if somebody could

    def hold(self, links: Collection[LinkState]) -> None:
        """Note where ranks would go on without us."""

    def save(self, head: bytes, mark: SinkMark) -> None:
        """Keep this instead of the last one. `head`: a pickled HeadState. Called in any thread. Raises OSError."""

    def drop(self) -> None:
        """The last one doesn't count any more."""


class HeadState(NamedTuple):
    """The head at a checkpoint."""

    planner: Planner
    hub: dict[str, Any]  # with the state machine
    clock: Clock
    parts: dict[str, Any]  # their states, by the names of their classes
    started: set[int]  # ranks that have a process
    input_sent: bool  # the input of a rank comes from the head
    names: list[str]  # of all nodes
    open: set[int]  # those whose links are
    clocks: dict[int, ClockState]  # theirs
    links: dict[int, LinkState]  # the last of lost nodes too
    boot: str  # of the head's machine
    now: float  # by its clock
    wall: float  # seconds since 1970

    def move_clock(self, ahead: float) -> None:
        """Our machine's clock is ahead of that head's by so many seconds."""
        self.clock.stood_still(ahead)
        self.hub["_machine"].move_clock(int(ahead * 1e9))


class Cut(Message):
    """Here in the inbox: of each node, what its first so many events mean has been done."""

    got: dict[int, int]
    links: dict[int, HeldLink]  # theirs: nodes may have come and gone since


class Saved(Message):
    """What has become of a checkpoint."""

    problem: str


class Checkpoints(Part):
    """One at a time."""

    takes = (Cut, Saved)
    sees = (NodeJoined, RankStarted)

    def __init__(
        self, hub: Hub, planner: Planner, stdin: Stdin, keeper: CheckpointStore, parts: Sequence[Part]
    ) -> None:
        """`parts`: the others."""
        self._hub = hub
        self._planner = planner
        self._stdin = stdin
        self._keeper = keeper
        self._parts = parts
        self._links: dict[int, HeldLink] = {}
        self._states: dict[int, LinkState] = {}  # of these, and of those before them, at the last checkpoint
        self._started: set[int] = set()
        self._lock = threading.Lock()  # guards the next two
        self._busy = False  # one is being made
        self._wanted = False  # a command waits for the one after that
        self._off = False  # there are no more
        self._began = 0.0  # when the last one did
        self._written_by: float | None = None  # when to wait no more for the current one
        self._seen = 0  # how many events were before it

    def start(self) -> None:
        """The ranks wait for the first one."""
        self._started.clear()
        if not self._off and (refusal := self._keeper.refusal or _refusal(self._planner)):
            self._saved(refusal)
        self._keep()
        if not self._off:
            self._want()

    def go_on(self, started: Collection[int], state: Any) -> None:  # noqa: ARG002
        """The same after another head."""
        self._started = set(started)
        self._keep()
        self._want()

    def _keep(self) -> None:
        """Have the hosts keep what is in no checkpoint."""
        links = {number: self._hub.nodes[number].link for number in self._hub.nodes.open}
        held = {number: link for number, link in links.items() if isinstance(link, HeldLink)}
        self._keeper.hold([link.state(link.got) for link in held.values()])
        for number, link in held.items() if not self._off else ():
            if self._links.get(number) is not link:
                link.keep(self._want)
        self._links = held

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """Take what belongs to checkpoints, and note what is to be in them."""
        match message:
            case Cut():
                self._take(message.got, message.links)
            case Saved(problem=problem):
                self._saved(problem)
            case NodeJoined():
                self._keep()
            case RankStarted(rank=rank):
                self._started.add(rank)

    @property
    def deadline(self) -> float | None:
        """When the next one is due, or the current one takes too long."""
        if self._off:
            return None
        if self._busy:
            return self._written_by
        return self._began + EVERY_SECONDS if self._events() != self._seen else None

    def tick(self, now: float) -> None:
        """Begin the next one, or give up."""
        due = self.deadline
        if due is None or now < due:
            return
        if self._busy:
            self._saved(f"the disk has not taken its record for {MOST_SECONDS:g} s")
        else:
            self._want()

    def _events(self) -> int:
        return sum(link.got for link in self._links.values())

    def _want(self) -> None:
        """From any thread."""
        with self._lock:
            self._wanted = self._busy
            if self._busy:
                return
            self._busy = True
        links = self._links
        self._began = self._hub.clock.now()
        with ExitStack() as gates:
            for link in links.values():
                gates.enter_context(link.gate)
            self._hub.post(Cut({number: link.got for number, link in links.items()}, links))

    def _take(self, got: Mapping[int, int], links: Mapping[int, HeldLink], over: threading.Event | None = None) -> None:
        if self._off:
            return
        if links is not self._links:
            with self._lock:
                self._busy = False
            self._want()
            return
        with self._lock:
            self._wanted = False  # it has all commands until now
        self._written_by = self._hub.clock.now() + MOST_SECONDS
        states = {number: link.state(got[number]) for number, link in links.items()}
        self._seen = sum(got.values())
        self._states.update(states)
        try:
            head = pickle.dumps(self._state(), pickle.HIGHEST_PROTOCOL)  # now: it changes as soon as the job goes on
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # a bug; the job goes on
            self._saved(f"its state can't be kept: {error}")
            return

        def written(mark: SinkMark) -> None:
            problem = "its record can't be written" if mark.failed or "journal" not in mark.states else ""
            if not problem and not self._off:
                try:
                    self._keeper.save(head, mark)
                    if self._off:  # given up in the meantime: commands have passed that it doesn't have
                        self._keeper.drop()
                except OSError as error:
                    problem = f"a checkpoint can't be written: {error.strerror}"
            if not problem:
                for number, link in links.items():
                    link.commit(states[number])
            self._hub.post(Saved(problem))
            if over is not None:
                over.set()

        mark = SinkMark(written)
        self._hub.tell(mark)
        mark.written({})

    def _state(self) -> HeadState:
        hub = self._hub
        return HeadState(
            *(self._planner, hub.state(), hub.clock),
            parts={type(part).__name__: state for part in self._parts if (state := part.state()) is not None},
            started=self._started,
            input_sent=self._stdin.sent,
            names=[hub.nodes.name(number) for number in range(len(hub.nodes))],
            open=set(hub.nodes.open),
            clocks={number: hub.nodes[number].clock for number in hub.nodes.open},
            links=self._states,
            boot=boot(),
            now=time.monotonic(),
            wall=time.time(),
        )

    def _saved(self, problem: str) -> None:
        self._written_by = None
        if self._off:
            return
        if problem:
            self._off = True
            self._let_pass()
            self._keeper.drop()
            self._hub.tell(NotResumable(time.monotonic_ns(), problem))
            return
        with self._lock:
            self._busy, again = False, self._wanted
        if again:
            self._want()

    def close(self) -> None:
        """The end is in the last one, if all of it has come; until that is written, the hosts keep it."""
        if self._hub.nodes.open:  # nobody waits for what they still have to say
            self._hang_up()
        elif not self._off:
            over = threading.Event()
            self._take({number: link.got for number, link in self._links.items()}, self._links, over)
            over.wait(MOST_SECONDS)
        self._let_pass()

    def _hang_up(self) -> None:
        """What is left on the hosts must not wait for us."""
        threads = [threading.Thread(target=link.close, daemon=True) for link in self._links.values()]
        for thread in threads:
            thread.start()
        until = time.monotonic() + LEAVE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _let_pass(self) -> None:
        for link in self._links.values():
            link.let_pass()


def _refusal(planner: Planner) -> str:
    """What is known by this head alone."""
    return "the job has roles" if planner.spec.roles else ""


def boot() -> str:
    """The id of this machine's boot; "" if it isn't known."""
    try:
        return linux.boot_id()
    except OSError:
        return ""
