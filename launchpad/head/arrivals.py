"""Nodes that come while the job runs: lost hosts that are reached again, and machines that join late."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from launchpad.errors import LaunchpadError, NodeError, UsageError
from launchpad.head.hub import Hub
from launchpad.head.machine import FinishAttempt
from launchpad.head.machine import Reopen as SeekNodes
from launchpad.head.part import Part
from launchpad.head.planner import Newcomer, Planner, Unhealthy
from launchpad.job.outcome import signal_name
from launchpad.job.plan import Member
from launchpad.named import NamedTuple
from launchpad.protocol.commands import JobEnded
from launchpad.protocol.events import NodeJoined, NodeRefused
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.job.succession import Peer, Rosters  # only where nodes join

# How long to pause between two tries to reach a host.
PAUSE_SECONDS = 2.0

# The same for one that was not healthy: its check may be at work for long.
UNWELL_SECONDS = 30.0

Reopen = Callable[[int], Link | None]  # None: the node will come by itself. Raises LaunchpadError.


class Dialled(NamedTuple):
    """A machine has joined the running job, and waits to be brought up."""

    link: Link
    member: Member


class Superseded(NamedTuple):
    """Another launcher leads the job by now."""

    by: str  # where it is


class Door(Protocol):
    """Where machines join."""

    own: "Peer"  # the head
    rosters: "Rosters"  # those that count when the job begins: none, unless it goes on after the loss of its head

    def goes_on(self, code: int) -> bool:
        """Whether the job, which has ended here with this exit code, may go on under another head."""

    @property
    def can_hand_over(self) -> bool:
        """Whether another launcher can lead the job after us."""

    def peer(self, link: Link) -> "Peer":
        """The launcher on the other end."""

    def open(self, take: Callable[[Dialled | Superseded], None]) -> None:
        """From now on, `take` gets each machine that joins, and is told of a later head, in any thread."""

    def give_way(self, rosters: "Rosters") -> None:
        """The job ends here, as others may go on with it: to be told before it does. These rosters count."""

    def close(self) -> None:
        """Let nobody else in."""


class Arrived(NamedTuple):
    """A node can take part."""

    newcomer: Newcomer
    node: int | None  # its number, if it was lost before and we have reached it again


class JoinFailed(NamedTuple):
    """A machine that joined late can't take part."""

    name: str
    reason: str


class Arrivals(Part):
    """Brings nodes up in threads, which post what comes of it."""

    takes = (Dialled, Arrived, JoinFailed, SeekNodes)
    sees = (FinishAttempt,)

    def __init__(
        self,
        hub: Hub,
        planner: Planner,
        reopen: Reopen | None,
        door: Door | None,
        apart: Collection[int],
        unwell: Mapping[int, str],
    ) -> None:
        """`apart`: nodes that the others can't reach, so that it is no use to reconnect to them.

        `unwell`: nodes that were lost because they are not healthy, and why.
        """
        self._hub = hub
        self._planner = planner
        self._reopen = reopen
        self._door = door
        self._apart = apart
        self._unwell = unwell
        self._is_open = False  # the door
        self._over = threading.Event()
        self._names: list[str] = []  # of the machines that are being brought up

    def start(self) -> None:
        """Let machines in from now on."""
        if self._door is not None and not self._is_open:
            self._is_open = True
            self._door.open(self._hub.post)

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """Take a machine that has come, what became of it, and what the state machine wants."""
        match message:
            case Dialled(member=member):
                threading.Thread(target=self._take, args=message, name=f"join-{member.name}", daemon=True).start()
            case Arrived():
                self._arrived(message)
            case JoinFailed(name=name, reason=reason):
                self._hub.happened(-1, NodeRefused(time.monotonic_ns(), name, reason))
            case SeekNodes(nodes=nodes):
                for node in set(nodes).difference(self._apart):
                    self._begin_to_seek(node, self._hub.nodes.name(node))
            case FinishAttempt(leave=True):
                self.close()

    def _arrived(self, arrived: Arrived) -> None:
        """A node that was brought up can take part."""
        hub, newcomer, number = self._hub, arrived.newcomer, arrived.node
        if number is None:
            number = self._planner.number_of(newcomer.place.name, hub.lost)
        if hub.phase == "over" or number in hub.nodes.open:  # too late: its agent would never be told to leave
            if arrived.node is not None:  # others have joined, and will be told how the job ended
                newcomer.node.link.abandon()
            return
        self._planner.add(number, newcomer)
        hub.adopt(number, newcomer.node)
        for event in newcomer.requester.rest():  # it may have ended just now
            newcomer.node.put(event)
        nodes = hub.plan.nodes
        name = nodes[number].name if number < len(nodes) else hub.nodes.name(number)
        hub.happened(-1, NodeJoined(time.monotonic_ns(), number, name, newcomer.slots))

    def _begin_to_seek(self, node: int, name: str) -> None:
        """Try to reach a lost node until it is back, or the job ends."""
        if self._reopen is not None:
            threading.Thread(target=self._seek, args=(node, name), name=f"reopen-{node}", daemon=True).start()

    def _seek(self, node: int, name: str) -> None:
        assert self._reopen is not None
        told = self._unwell.get(node, "")
        if told:
            self._over.wait(UNWELL_SECONDS)
        while not self._over.is_set():
            link = None
            try:
                link = self._reopen(node)
                if link is not None:
                    self._bring_up(link, None, node)
                return
            except UsageError as error:  # it will be the same the next time
                self._hub.post(JoinFailed(name, str(error)))
                return
            except Exception as error:
                reason = str(error).removeprefix(f"{name}: ")
                if link is not None and isinstance(error, LaunchpadError) and reason != told:
                    told = reason
                    self._hub.post(JoinFailed(name, f"{reason}; launchpad goes on trying"))
                self._over.wait(UNWELL_SECONDS if isinstance(error, Unhealthy) else PAUSE_SECONDS)

    def names(self) -> list[str]:
        """The machines that have joined, and are being brought up."""
        return sorted(self._names)

    def _take(self, link: Link, member: Member) -> None:
        self._names.append(member.name)
        try:
            self._bring_up(link, member, None)
        except Exception as error:
            reason = str(error) if isinstance(error, LaunchpadError) else f"{type(error).__name__}: {error}"
            self._hub.post(JoinFailed(member.name, reason))
        finally:
            self._names.remove(member.name)

    def _bring_up(self, link: Link, member: Member | None, node: int | None) -> None:
        """A machine that has joined is told why it is not needed; whoever let it in hangs up at the end."""
        if self._over.is_set():
            if member is None:
                link.abandon()
            return
        try:
            newcomer = self._planner.prepare(link, member, node)
        except SystemExit as stopped:  # by a signal to its own launchpad
            code = int(stopped.code or 0)
            link.send(JobEnded(code, ["this node has left the job"]))
            raise NodeError(f"its launchpad got {signal_name(code - 128)}") from None
        except Exception as error:
            if member is None:
                link.abandon()
            else:
                link.send(JobEnded(NodeError.exit_code, [f"error: this node can't join the job: {error}"]))
            raise
        self._hub.post(Arrived(newcomer, node))  # if it is too late, the loop abandons it

    def close(self) -> None:
        """The job is over: nobody else can take part."""
        self._over.set()
        if self._door is not None:
            self._door.close()
