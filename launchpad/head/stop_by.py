"""Tells each node how long its ranks have until they are stopped, for `launchpad.stop_by`; again when that changes."""

from __future__ import annotations

import time
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.job.limits import Limits
from launchpad.protocol.commands import StopBy
from launchpad.protocol.events import PhaseChanged

# A time that has moved by less is the same: clocks are slewed, and read one after the other.
_SAME_SECONDS = 0.5


class StopTimes(Part):
    """Nodes are told nothing as long as there is no such time."""

    # A rank may ask as soon as it gets the signal, which is sent after this.
    sees = (PhaseChanged,)

    def __init__(self, hub: Hub, limits: Limits) -> None:
        self._hub = hub
        self._limits = limits
        self._told: float | None = None  # of the job, in seconds since 1970

    def start(self) -> None:
        """The ranks of each node find it there when they start."""
        self._tell(self._at())

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """The ranks are about to be asked to stop, or have ended."""
        self._tell_if_changed()

    def tick(self, now: float) -> None:  # noqa: ARG002
        """The job's time may have stood still, or the time of day may have been set."""
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        if self._hub.phase not in ("running", "stopping"):
            return
        at = self._at()
        before = self._told
        if (at is None) != (before is None) or (at and before and abs(at - before) >= _SAME_SECONDS):
            self._tell(at)

    def _tell(self, of_job: float | None) -> None:
        self._told = of_job
        for node in self._hub.plan.taking_part:
            at = _first(of_job, node.ends_at)
            if node.index in self._hub.nodes.open and (at is not None or self._hub.attempt):
                self._hub.nodes.send(node.index, StopBy(None if at is None else at - time.time()))

    def _at(self) -> float | None:
        """When the job's ranks are stopped."""
        limit = self._hub.stops_at
        by_limit = None if limit is None else time.time() + limit - self._hub.clock.limits()
        asked_at = self._limits.stop_at if self._hub.phase == "running" else None
        return _first(by_limit, asked_at, self._limits.ends_at)


def _first(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)
