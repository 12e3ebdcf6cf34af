"""A sink: answers those who want to stop a role, or have it start again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launchpad.console.debugger_sink import REFUSED
from launchpad.protocol.events import WorldAnswered, WorldRequested


class WorldRequests:
    """The sink."""

    deadline = None

    def __init__(self, answer: Callable[[int, str], None]) -> None:
        """`answer` responds to a request."""
        self._answer = answer

    def on(self, event: Any) -> bool:
        """Pass on an answer; a request that comes here has no part of the head that takes it."""
        if type(event) is WorldAnswered:
            self._answer(event.asker, f"{REFUSED if event.refused else ''}{event.text}")
        elif type(event) is WorldRequested:
            self._answer(event.asker, f"{REFUSED}this job has no roles")
        return False

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is held open."""
