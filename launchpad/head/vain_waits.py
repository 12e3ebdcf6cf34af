"""Decides whether ranks wait in torch's store for what nobody is left to set, by comparing samples of them. Pure.

A rank has returned, and each other rank's main thread waits for an answer of the store that launchpad serves. Their
stacks tell the rest (rank/alone.py): if no rank has another thread or a process that could set anything, and none would
go on when its wait times out, the job can only end, with torch's time-out: after 5 or 30 minutes, unless the program
says otherwise. A wait that may be survived is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launchpad.head.stall import stalled
from launchpad.protocol.events import StackDump

# Between two samples that both must show it.
SECONDS = 5.0
# While ranks do something else, they are looked at less and less often, down to once in this time.
MOST_SECONDS = 120.0


class VainWatch:
    """Holds the last sample, and decides when to take the next one. Times are in seconds of one clock."""

    found = ""

    def __init__(self, port: int, now: float) -> None:
        """A rank has returned; the others may wait in the store at this port."""
        self._port = port
        self._since = now  # when a rank did something last
        self._last: Mapping[int, StackDump] = {}
        self._last_at = now
        self._pause = SECONDS
        self.deadline = now + SECONDS

    def moved(self, now: float, rank: int = -1) -> None:  # noqa: ARG002
        """A rank has written something, started or exited."""
        self._since = now
        self._last = {}
        self.deadline = now + self._pause

    def quiet(self, now: float) -> float:
        """How long nothing has moved."""
        return now - self._since

    def asked(self, now: float) -> None:
        """The ranks are being sampled."""
        self.deadline = now + self._pause

    def sampled(self, now: float, sample: Mapping[int, StackDump], running: Collection[int]) -> bool:
        """Take a sample. Returns whether all ranks have waited in the store since the last one."""
        wait = waits_in_store(sample, running, self._port)
        vain = (
            wait
            and waits_in_store(self._last, running, self._port)
            and stalled(self._last, sample, running, now - self._last_at)
        )
        self._pause = SECONDS if wait else min(2 * self._pause, MOST_SECONDS)
        self._last, self._last_at = sample, now
        return vain


def waits_in_store(sample: Mapping[int, StackDump], running: Collection[int], port: int) -> bool:
    """Whether each of these ranks waits for an answer of the store at this port."""
    return bool(running) and all(
        rank in sample and sample[rank].collectives.get("reads_port") == port for rank in running
    )


def in_vain(sample: Collection[StackDump]) -> bool:
    """Whether none of these ranks can do anything but wait: their complete stacks tell."""
    return all(one.collectives.get("alone", False) for one in sample)
