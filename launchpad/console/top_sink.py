"""A sink for `launchpad top`: answers with what each rank does and uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launchpad.diagnosis.history import History
from launchpad.protocol.events import (
    RESULT,
    AtPrompt,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    Output,
    PhaseChanged,
    Restarted,
    SamplesTaken,
)

# Lines are counted only while somebody looks: until nobody has asked for so long.
COUNT_SECONDS = 10.0


class TopSink:
    """The sink. It comes after the one that keeps the history."""

    def __init__(self, history: History, most_restarts: int, answer: Callable[[int, str], None]) -> None:
        """`answer` responds to a request."""
        self._history = history
        self._most_restarts = most_restarts
        self._answer = answer
        self._lines: dict[int, int] = {}
        self._counts = False
        self._at_prompt = -1
        self._restarts = 0
        self._lost: dict[int, str] = {}  # why nodes are gone
        self.deadline: float | None = None

    def on(self, event: Any) -> bool:
        """Take an event."""
        kind = type(event)
        if kind is Output:
            if self._counts and event.stream != RESULT:
                self._lines[event.rank] = self._lines.get(event.rank, 0) + event.data.count(b"\n")
        elif kind is SamplesTaken:
            self._answer_all(event)
        elif kind is AtPrompt:
            self._at_prompt = event.rank if event.waits else -1
        elif kind is NodeLost:
            self._lost.setdefault(event.node, f"lost: {event.reason}")
        elif kind is NodeLeaving:
            self._lost[event.node] = "has left"
        elif kind is NodeJoined:
            self._lost.pop(event.node, None)
        elif kind is PhaseChanged:
            self._at_prompt = -1
        elif kind is Restarted:
            self._restarts = event.restarts
            self._at_prompt = -1
        return False

    def _answer_all(self, event: SamplesTaken) -> None:
        import json

        from launchpad.diagnosis.activity import look_at

        self._counts = True
        self.deadline = time.monotonic() + COUNT_SECONDS
        look = look_at(self._history, event, self._lines, self._at_prompt, self._lost)
        look = look._replace(restarts=self._restarts, most_restarts=self._most_restarts)
        text = json.dumps(look)
        for asker in event.askers:
            self._answer(asker, text)

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Nobody has asked for a while."""
        self.deadline = None
        self._counts = False

    def close(self) -> None:
        """Nothing is held open."""
