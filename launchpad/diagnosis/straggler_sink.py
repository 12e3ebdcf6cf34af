"""A sink that compares when the ranks enter their collectives, and tells the other sinks what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launchpad.diagnosis.history import History
from launchpad.protocol.events import ArrivalsCompared, ArrivalTimes, Hindrances, PhaseChanged, Restarted

if TYPE_CHECKING:
    from launchpad.diagnosis.arrivals import Comparison

# How long after the first rank has told the others have to, too.
PATIENCE_SECONDS = 1.0


class StragglerSink:
    """The sink. It comes after the one that keeps the history."""

    def __init__(self, history: History, tell: Callable[[ArrivalsCompared], None]) -> None:
        self._history = history
        self._tell = tell
        self.deadline: float | None = None
        self._comparison: Comparison | None = None
        self._hindrances: dict[int, list[Hindrances]] = {}  # by node: the last two

    def on(self, event: Any) -> bool:
        """Take an event."""
        match event:
            case ArrivalTimes():
                if self._comparison is None:
                    from launchpad.diagnosis.arrivals import Comparison

                    self._comparison = Comparison()
                self._comparison.add(event, self._history.of(event.rank).node)
                self.deadline = self.deadline or time.monotonic() + PATIENCE_SECONDS
            case Hindrances() if event.ranks:
                node = self._history.of(event.ranks[0][0]).node
                self._hindrances[node] = [*self._hindrances.get(node, [])[-1:], event]
            case PhaseChanged(phase="over"):
                self.tick(0.0)
            case Restarted():
                self.deadline, self._comparison = None, None
                self._hindrances.clear()
        return False

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Compare what the ranks have told."""
        self.deadline = None
        compared = self._comparison.compare(time.monotonic_ns()) if self._comparison else None
        if compared is not None:
            self._tell(compared._replace(because=self._reason(compared)))

    def _reason(self, compared: ArrivalsCompared) -> str:
        from launchpad.diagnosis.hindered import reason
        from launchpad.diagnosis.stragglers import worst_of

        rank, *_, caused, _, others = worst_of(compared)
        taken = {node: (both[0], both[1]) for node, both in self._hindrances.items() if len(both) > 1}
        return reason(int(rank), taken, caused / others) if others and caused else ""

    def close(self) -> None:
        """Nothing is held open."""
