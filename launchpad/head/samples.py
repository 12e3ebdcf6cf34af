"""Has the agents sample their ranks: regularly for the record, and whenever someone asks (`launchpad top`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.protocol.commands import Sample
from launchpad.protocol.events import Sampled, SampleRequested, SamplesTaken

# An agent gives its ranks 0.3 s, on a busy node 1.2 s (agent/ranks/sampler.py). A node that has not answered by then is
# left out.
ANSWER_SECONDS = 2.0

# The record of a long job would grow without end: after this many figures (some 50 bytes each), half as many are taken.
MOST_FIGURES = 100_000


class Samples(Part):
    """One request at a time; those who ask meanwhile get its answer."""

    takes = (SampleRequested, Sampled)

    def __init__(self, hub: Hub, period: float, joining: Callable[[], list[str]]) -> None:
        """`period`: seconds between two samples for the record, 0 for none.

        `joining`: the names of the machines that are being brought up.
        """
        self._hub = hub
        self._period = period
        self._joining = joining
        self._due = hub.clock.now() + period if period else None
        self._figures = 0  # in the record
        self._number = 0
        self._for_record = 0  # the number of the last request for the record
        self._until: float | None = None  # when to answer those who have asked
        self._askers: list[int] = []
        self._awaited: set[int] = set()  # nodes
        self._taken: list[Sampled] = []

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return min((at for at in (self._due, self._until) if at is not None), default=None)

    def on(self, source: int, message: Any) -> None:
        """Take a question, or a node's sample."""
        match message:
            case SampleRequested(asker=asker):
                self._ask(asker)
            case Sampled():
                self._take(source, message)

    def _ask(self, asker: int) -> None:
        self._askers.append(asker)
        if self._until is None:
            self._taken = []
            self._awaited = set(self._hub.nodes.open)
            self._until = self._hub.clock.now() + ANSWER_SECONDS
            self._request(asks=True)

    def _take(self, node: int, event: Sampled) -> None:
        """It may be late, and about ranks that run elsewhere by now."""
        own = self._hub.ranks_of(node)
        names = {str(rank) for rank in own}  # as JSON has keys
        event = event._replace(
            ranks=[row for row in event.ranks if row[0] in own],
            waits=[row for row in event.waits if row[0] in own],
            children=[row for row in event.children if row[0] in own],
            gpus=[(*gpu, {one: size for one, size in users.items() if one in names}) for *gpu, users in event.gpus],
        )
        if event.number == self._for_record:
            self._figures += len(event.ranks)
            self._hub.tell(event)
        elif node in self._awaited:
            self._awaited.discard(node)
            self._taken.append(event)

    def tick(self, now: float) -> None:
        """Answer, and take the next sample for the record."""
        if self._until is not None and (now >= self._until or not self._awaited & self._hub.nodes.open):
            self._until, self._awaited = None, set()
            askers, self._askers = self._askers, []
            self._hub.tell(SamplesTaken(time.monotonic_ns(), askers, self._taken, self._joining()))
        if self._due is not None and now >= self._due:
            self._due = now + self._period * 2 ** (self._figures // MOST_FIGURES)
            if self._hub.running:
                self._request(asks=False)
                self._for_record = self._number

    def _request(self, *, asks: bool) -> None:
        self._number += 1
        self._hub.nodes.send_all(Sample(self._number, asks))
