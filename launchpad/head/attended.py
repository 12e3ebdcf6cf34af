"""Keeps the job's time limits standing still while a rank waits for a person. Pure."""

from __future__ import annotations

from collections.abc import Hashable


class Attended:
    """What waits for a person: a rank at a prompt, one in a debugger. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._waits: set[Hashable] = set()
        self._since = 0.0  # when the first of those began
        self._before = 0.0  # seconds of earlier waits

    def __bool__(self) -> bool:
        return bool(self._waits)

    def begin(self, wait: Hashable, now: float) -> None:
        """This waits from now on."""
        if not self._waits:
            self._since = now
        self._waits.add(wait)

    def end(self, wait: Hashable, now: float) -> bool:
        """This waits no more. Returns whether that lets the clock go on."""
        if self._waits != {wait}:
            self._waits.discard(wait)
            return False
        return self.clear(now)

    def clear(self, now: float) -> bool:
        """Nothing waits any more. Returns whether that lets the clock go on."""
        went = not self._waits
        if not went:
            self._before += now - self._since
            self._waits.clear()
        return not went

    def clock(self, now: float) -> float:
        """The time without the waits."""
        return (self._since if self._waits else now) - self._before
