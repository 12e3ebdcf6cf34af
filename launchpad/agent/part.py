"""What the agent's features have in common: they are parts, and reach the rest of the agent through a small hub."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..protocol.events import RecordDropped
from .stacks.debug_channel import DebugChannel

if TYPE_CHECKING:
    from ..protocol.commands import Start
    from .mpi.node_worlds import NodeWorlds
    from .outbox import Outbox
    from .poll import Poll
    from .ranks.rank import Rank


class AgentHub:
    """What a part may use of the agent."""

    def __init__(self, poll: Poll, outbox: Outbox, folder: str) -> None:
        self.poll = poll  # to watch descriptors
        self.outbox = outbox  # to say events
        self.folder = folder  # the job's private one
        self.ranks: dict[int, Rank] = {}  # those that run, by pid
        self.mpi: NodeWorlds | None = None  # the worlds that ranks are to join
        self._dropped: set[int] = set()  # pids of ranks of which an answer was dropped

    @functools.cached_property
    def channel(self) -> DebugChannel:
        """To ask ranks; it listens from its first use on."""
        return DebugChannel(self.poll, self.folder, self._drop_answer)

    def _drop_answer(self, pid: int, why: str) -> None:
        if pid in self.ranks and pid not in self._dropped:
            self._dropped.add(pid)
            rank = self.ranks[pid].rank
            self.outbox.say(RecordDropped(time.monotonic_ns(), rank, "its answer about where it is", why))


class AgentPart:
    """One feature. It overrides what concerns it: here, nothing happens."""

    def __init__(self, hub: AgentHub) -> None:
        self._hub = hub

    @property
    def deadline(self) -> float | None:
        """When to call `tick`, by time.monotonic(); None: never."""
        return None

    def on(self, command: Any) -> None:
        """Carry out a command of a type that the part takes (parts.py)."""

    def tick(self, now: float) -> None:
        """The deadline has come."""

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Ranks are about to start. What is added to `environ` is for all of them."""

    def environ(self, rank: int) -> Mapping[str, str]:
        """Variables for this rank alone."""
        return {}

    def started(self, rank: Rank) -> None:
        """A rank has its process."""

    def exited(self, rank: Rank, code: int) -> None:
        """A rank's process has ended, which the head is about to hear."""

    def reaped(self, pid: int, code: int) -> None:
        """A child that is not a rank has exited, with this code, or -n for signal n."""

    def end(self) -> Collection[int]:
        """All ranks have ended: ask them no more. Returns the part's own processes, which no rank has left behind."""
        return ()

    def finish(self, leave: bool) -> None:
        """What ranks left behind is gone, too. `leave`: the agent is about to exit."""

    def close(self) -> None:
        """The agent exits."""
