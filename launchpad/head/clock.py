"""The times of a job: all deadlines of the head's loop are in seconds of one of them. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class Clock:
    """`monotonic` always goes on. `now`, the job's time, stands still while the head does (Ctrl-Z).

    `limits`, for the job's time limits, also stands still while a rank waits for a person: at a prompt, in a debugger.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self._stood_still = 0.0  # seconds
        self._waits: set[Hashable] = set()  # what waits for a person
        self._since = 0.0  # when the first of those began, in the job's time
        self._waited = 0.0  # seconds of earlier waits

    def now(self) -> float:
        """The job's time."""
        return self.monotonic() - self._stood_still

    def limits(self) -> float:
        """The time for the job's limits."""
        return (self._since if self._waits else self.now()) - self._waited

    def stood_still(self, seconds: float) -> None:
        """The head did, for so long."""
        self._stood_still += seconds

    @property
    def waits_for_person(self) -> bool:
        """Whether something waits for a person, so that the limits' time stands still."""
        return bool(self._waits)

    def note_wait(self, wait: Hashable, *, begins: bool) -> None:
        """This waits for a person from now on, or no more."""
        if begins and not self._waits:
            self._since = self.now()
        if begins:
            self._waits.add(wait)
        elif self._waits == {wait}:
            self.end_waits()
        else:
            self._waits.discard(wait)

    def end_waits(self) -> None:
        """Nothing waits any more."""
        if self._waits:
            self._waited += self.now() - self._since
            self._waits.clear()
