"""Collects the profiles of ranks that someone has asked for."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.job.outcome import ranks_in_words
from launchpad.protocol.commands import Profile
from launchpad.protocol.events import ProfileRequested, ProfilesTaken, ProfileTaken


class _Collection:
    """One request: who asked, the ranks that have not answered, and the answers."""

    def __init__(self, asker: int, ranks: Collection[int]) -> None:
        self.asker = asker
        self.left = set(ranks)
        self.taken: list[ProfileTaken] = []


class Profiles(Part):
    """The open requests. An agent answers for each rank that it is asked about, within a time."""

    takes = (ProfileRequested, ProfileTaken)

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._open: dict[int, _Collection] = {}
        self._last = 0

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """Take a request, or a rank's profile."""
        match message:
            case ProfileRequested(asker=asker, rank=rank, seconds=seconds):
                self._ask(asker, rank, seconds)
            case ProfileTaken():
                self._take(message)

    def _ask(self, asker: int, rank: int, seconds: float) -> None:
        """Have the ranks profiled."""
        running = self._hub.running
        ranks = sorted(running) if rank < 0 else [rank]
        if not ranks or not set(ranks) <= set(running):
            there = ranks_in_words(sorted(running)) if running else "none"
            which = f"rank {rank} is not running" if rank >= 0 else "no rank is running"
            self._hub.tell(ProfilesTaken(time.monotonic_ns(), asker, [], f"{which}; running now: {there}"))
            return
        self._last += 1
        self._open[self._last] = _Collection(asker, ranks)
        for one in ranks:
            self._hub.send(one, Profile(self._last, [one], seconds))

    def _take(self, event: ProfileTaken) -> None:
        request = self._open.get(event.number)
        if request is not None and event.rank in request.left:
            request.left.discard(event.rank)
            request.taken.append(event)
            self._finish(event.number, request)

    def lose(self, ranks: Collection[int], why: str) -> None:
        """No profile of these ranks will come."""
        for number, request in list(self._open.items()):
            for rank in sorted(request.left.intersection(ranks)):
                self._take(ProfileTaken(time.monotonic_ns(), rank, number, why, ""))

    def _finish(self, number: int, request: _Collection) -> None:
        if not request.left:
            del self._open[number]
            taken = sorted(request.taken, key=lambda one: one.rank)
            self._hub.tell(ProfilesTaken(time.monotonic_ns(), request.asker, taken, ""))
