"""Collects the profiles of ranks that someone has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from launchpad.job.outcome import ranks_in_words
from launchpad.protocol.commands import Command, Profile
from launchpad.protocol.events import ProfileRequested, ProfilesTaken, ProfileTaken


class _Collection:
    """One request: who asked, the ranks that have not answered, and the answers."""

    def __init__(self, asker: int, ranks: Collection[int]) -> None:
        self.asker = asker
        self.left = set(ranks)
        self.taken: list[ProfileTaken] = []


class Profiles:
    """The open requests. An agent answers for each rank that it is asked about, within a time."""

    def __init__(self, send: Callable[[int, Command], None], tell: Callable[[ProfilesTaken], None]) -> None:
        """`send(rank, command)` sends to the rank's node; `tell` answers a request."""
        self._send = send
        self._tell = tell
        self._open: dict[int, _Collection] = {}
        self._last = 0

    def ask(self, event: ProfileRequested, running: Collection[int]) -> None:
        """Have the ranks profiled."""
        _, asker, rank, seconds = event
        ranks = sorted(running) if rank < 0 else [rank]
        if not ranks or not set(ranks) <= set(running):
            there = ranks_in_words(sorted(running)) if running else "none"
            which = f"rank {rank} is not running" if rank >= 0 else "no rank is running"
            self._tell(ProfilesTaken(time.monotonic_ns(), asker, [], f"{which}; running now: {there}"))
            return
        self._last += 1
        self._open[self._last] = _Collection(asker, ranks)
        for one in ranks:
            self._send(one, Profile(self._last, [one], seconds))

    def take(self, event: ProfileTaken) -> None:
        """A rank's profile."""
        request = self._open.get(event.number)
        if request is not None and event.rank in request.left:
            request.left.discard(event.rank)
            request.taken.append(event)
            self._finish(event.number, request)

    def lose(self, ranks: Collection[int], why: str) -> None:
        """No profile of these ranks will come."""
        for number, request in list(self._open.items()):
            for rank in sorted(request.left.intersection(ranks)):
                self.take(ProfileTaken(time.monotonic_ns(), rank, number, why, ""))

    def _finish(self, number: int, request: _Collection) -> None:
        if not request.left:
            del self._open[number]
            taken = sorted(request.taken, key=lambda one: one.rank)
            self._tell(ProfilesTaken(time.monotonic_ns(), request.asker, taken, ""))
