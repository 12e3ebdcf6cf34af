"""What the events of a job say of its present attempt: a fold, which a verdict is found from. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

from launchpad.events import (
    STDERR,
    ConsoleClosed,
    NodeLost,
    Output,
    PeerFailed,
    PhaseChanged,
    RankExited,
    RankFailed,
    RankRaised,
    RanksSpawned,
    RankStarted,
    Restarted,
    StartFailed,
    StopRequested,
)
from launchpad.failures import ClockSeen, Crashed, ExceptionRaised, JobOver, JobPlanned, RanksHeld
from launchpad.stacks import Stalled

# Of each rank's last error output this much is kept.
TAIL_BYTES = 8192

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankStory:
    """One rank in this attempt."""

    def __init__(self, rank: int, node: int = 0) -> None:
        self.rank = rank
        self.node = node
        self.pid = 0
        self.started = 0
        self.exited: RankExited | None = None
        self.failed: RankFailed | None = None
        self.not_started: StartFailed | None = None
        self.raised: list[ExceptionRaised] = []
        self.recorded = ""  # its error file
        self.crash = ""
        self.tail = b""  # of what it wrote to stderr


class Story:
    """All that is known. Times are in ns of the head's monotonic clock."""

    def __init__(self, events: Iterable[Any] = ()) -> None:
        self.planned = JobPlanned(0, 0.0, "", 0, "", [], "", [], {}, 0.0, "")
        self.ranks: dict[int, RankStory] = {}
        self.names: dict[int, str] = {}
        self.doubts: dict[int, int] = {}  # by node, in ns
        self.attempt = 0
        self.over: JobOver | None = None
        self.ended = False  # its ranks are gone
        self._forget()
        for event in events:
            self.on(event)

    def _forget(self) -> None:
        """What belongs to one attempt."""
        self.started = 0
        self.lost: dict[int, NodeLost] = {}
        self.stop: PhaseChanged | None = None
        self.kind = ""  # of what ended it: the cause in a PhaseChanged
        self.sent: list[tuple[int, int]] = []  # (time, signal) to all ranks
        self.signum = 0  # the first that asked us to stop
        self.peer: PeerFailed | None = None
        self.console = ""
        self.held: RanksHeld | None = None
        self.stalled = 0.0  # seconds
        self.ranks = {
            rank: RankStory(rank, node) for node, (_, ranks) in enumerate(self.planned.nodes) for rank in ranks
        }

    @property
    def several(self) -> bool:
        """Whether the job has more than one node."""
        return len(self.planned.nodes) > 1

    def node_name(self, node: int) -> str:
        """As the user named it."""
        return str(self.planned.nodes[node][0]) if 0 <= node < len(self.planned.nodes) else f"node {node}"

    def name(self, rank: int) -> str:
        """The rank in words, with its host where there are several."""
        if rank in self.names:
            return self.names[rank]
        return f"rank {rank} on {self.node_name(self.of(rank).node)}" if self.several else f"rank {rank}"

    def of(self, rank: int) -> RankStory:
        """What is known of the rank."""
        return self.ranks.setdefault(rank, RankStory(rank))

    def on(self, event: Any) -> None:
        """Take an event."""
        match event:
            case Output(_, rank, stream, data):
                if stream == STDERR:
                    one = self.of(rank)
                    one.tail = (one.tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
            case JobPlanned():
                self.planned = event
                self._forget()
            case RankStarted(at, rank, pid):
                self.started = self.started or at
                self.of(rank).started, self.of(rank).pid = at, pid
            case RankExited():
                self.of(event.rank).exited = event
            case ExceptionRaised():
                self.of(event.rank).raised.append(event)
            case Crashed():
                self.of(event.rank).crash = event.stack
            case RankRaised(_, rank, error):
                self.of(rank).recorded = error
            case RankFailed():
                one = self.of(event.rank)
                one.failed = one.failed or event
            case StartFailed():
                self.of(event.rank).not_started = event
            case RanksSpawned():
                for rank in event.ranks:
                    self.names[rank] = f"rank {rank}, spawned by rank {event.by},"
                    self.of(rank).node = event.node
            case NodeLost():
                self.lost.setdefault(event.node, event)
            case ClockSeen(_, node, doubt):
                self.doubts[node] = doubt
            case StopRequested(_, signum) if signum in _STOPS:
                self.signum = self.signum or signum
            case PeerFailed():
                self.peer = self.peer or event
            case ConsoleClosed(_, reason):
                self.console = reason
            case RanksHeld():
                self.held = event
            case Stalled(_, seconds):
                self.stalled = seconds
            case PhaseChanged():
                self._phase(event)
            case Restarted():
                self.attempt = event.attempt
                self._forget()
            case JobOver():
                self.over = event

    def _phase(self, event: PhaseChanged) -> None:
        if event.phase == "over":
            self.ended = True
        if event.cause and self.stop is None:
            self.stop = event
        self.kind = event.cause or self.kind
        if event.signum:
            self.sent.append((event.time, event.signum))
