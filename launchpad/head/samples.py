"""Has the agents sample their ranks: regularly for the record, and whenever someone asks (`launchpad top`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from launchpad.head.nodes import Nodes
from launchpad.protocol.commands import Sample
from launchpad.protocol.events import Sampled, SampleRequested, SamplesTaken

# An agent gives its ranks 0.3 s (agent/ranks/sampler.py). A node that has not answered by then is left out.
ANSWER_SECONDS = 1.0

# The record of a long job would grow without end: after this many figures (some 50 bytes each), half as many are taken.
MOST_FIGURES = 100_000


class Samples:
    """One request at a time; those who ask meanwhile get its answer. Times are in seconds of time.monotonic()."""

    def __init__(
        self,
        nodes: Nodes,
        ranks_of: Callable[[int], Collection[int]],
        period: float,
        now: float,
        tell: Callable[[Sampled | SamplesTaken], None],
    ) -> None:
        """`ranks_of`: a node's. `period`: seconds between two samples for the record, 0 for none.

        `tell` gets both kinds of samples.
        """
        self._nodes = nodes
        self._ranks_of = ranks_of
        self._period = period
        self._tell = tell
        self._due = now + period if period else None
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

    def ask(self, event: SampleRequested) -> None:
        """Someone wants to know."""
        self._askers.append(event.asker)
        if self._until is None:
            self._taken = []
            self._awaited = set(self._nodes.open)
            self._until = time.monotonic() + ANSWER_SECONDS
            self._request(asks=True)

    def take(self, node: int, event: Sampled) -> None:
        """A node's sample. It may be late, and about ranks that run elsewhere by now."""
        own = self._ranks_of(node)
        event = event._replace(
            ranks=[row for row in event.ranks if row[0] in own], waits=[row for row in event.waits if row[0] in own]
        )
        if event.number == self._for_record:
            self._figures += len(event.ranks)
            self._tell(event)
        elif node in self._awaited:
            self._awaited.discard(node)
            self._taken.append(event)

    def tick(self, now: float, running: Collection[int], joining: Callable[[], list[str]]) -> None:
        """Answer, and take the next sample for the record. `running`: ranks; `joining`: names of machines."""
        if self._until is not None and (now >= self._until or not self._awaited & self._nodes.open):
            self._until, self._awaited = None, set()
            askers, self._askers = self._askers, []
            self._tell(SamplesTaken(time.monotonic_ns(), askers, self._taken, joining()))
        if self._due is not None and now >= self._due:
            self._due = now + self._period * 2 ** (self._figures // MOST_FIGURES)
            if running:
                self._request(asks=False)
                self._for_record = self._number

    def _request(self, *, asks: bool) -> None:
        self._number += 1
        self._nodes.send_all(Sample(self._number, asks))


def is_valid(event: Sampled) -> bool:
    """Whether an agent's sample has the right form."""

    def each(rows: list[list[Any]], *kinds: Any) -> bool:
        return all(len(row) == len(kinds) and all(map(isinstance, row, kinds)) for row in rows)

    number = (int, float)
    return (
        each(event.ranks, int, str, number, int, int, int, int)
        and each(event.waits, int, str, int, number)
        and each(event.gpus, str, int, int, int, dict)
    )
