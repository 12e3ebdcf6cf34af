"""Watches each world of a job by itself for stalls: one may hang while others go on. Pure.

A service waits for requests, which is no stall, so none is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf

from launchpad.head.stall import StallWatch
from launchpad.protocol.events import StackDump


class WorldStalls:
    """What StallWatch is for one world. Times are in seconds of one clock."""

    def __init__(self, timeout: float, worlds: Collection[str], world_of: Callable[[int], str], now: float) -> None:
        """`worlds`: those that are no services. `world_of`: that of a rank, which may have been spawned."""
        self._world_of = world_of
        self._watches = {name: StallWatch(timeout, now) for name in worlds}
        self._due: list[str] = []  # the worlds that the next sample is for
        self.found = ""  # the world that has stalled

    @property
    def deadline(self) -> float:
        """When to take the next sample."""
        return min((watch.deadline for watch in self._watches.values()), default=inf)

    def moved(self, now: float, rank: int) -> None:
        """A rank has written something, started or exited; -1: each may have."""
        worlds = self._watches if rank < 0 else {self._world_of(rank)} & self._watches.keys()
        for world in worlds:
            self._watches[world].moved(now)

    def quiet(self, now: float) -> float:
        """How long there has been no output of the world that has stalled."""
        return self._watches[self.found].quiet(now) if self.found else 0.0

    def asked(self, now: float) -> None:
        """The ranks are being sampled."""
        self._due = [name for name, watch in self._watches.items() if watch.deadline <= now]
        for name in self._due:
            self._watches[name].asked(now)

    def sampled(self, now: float, sample: Mapping[int, StackDump], running: Collection[int]) -> bool:
        """Take a sample. Returns whether a world has stalled."""
        for name in self._due:
            ranks = {rank for rank in running if self._world_of(rank) == name}
            own = {rank: one for rank, one in sample.items() if rank in ranks}
            if self._watches[name].sampled(now, own, ranks):
                self.found = name
                return True
        return False
