"""Asks the ranks to stop before the job's allocation ends (--stop-before)."""

from __future__ import annotations

import signal
import time

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.protocol.events import StopRequested


class StopBefore(Part):
    """Acts once."""

    def __init__(self, hub: Hub, at: float) -> None:
        """`at`: in seconds since 1970."""
        self._hub = hub
        self._at: float | None = at

    @property
    def deadline(self) -> float | None:
        """The time of day can be set, so this may change."""
        return None if self._at is None else self._hub.clock.now() + self._at - time.time()

    def tick(self, now: float) -> None:
        """Stop the ranks if it is time to."""
        due = self.deadline
        if due is not None and due <= now:
            self._at = None
            reason = "the allocation is about to end (--stop-before)"
            self._hub.happened(-1, StopRequested(time.monotonic_ns(), signal.SIGTERM, reason))
