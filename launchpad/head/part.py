"""The interface of a part: one feature of a running job, which takes the messages that are its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

Take = Callable[[int, Any], None]  # takes a message, and the node that it comes from; -1: the head itself


class InvalidMessage(Exception):
    """The agent may not send this: its node is as good as lost."""


class Part:
    """Does nothing. A part says what it does otherwise.

    Messages are what agents send, what the head's own threads report, and the actions of the state machine.
    """

    # Messages that are for this part, and not for the state machine and the sinks; a part may pass them on.
    takes: ClassVar[tuple[type, ...]] = ()
    # Events of the job and actions that this part hears of when the state machine and the sinks have had them.
    sees: ClassVar[tuple[type, ...]] = ()

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called at the latest, in the job's time."""
        return None

    def on(self, source: int, message: Any) -> None:
        """Take a message. Raises InvalidMessage."""

    def tick(self, now: float) -> None:
        """Do what is due. Called after each batch of messages too, for what these have made possible."""

    def lose(self, ranks: Collection[int], why: str) -> None:
        """These ranks are gone: with their node, or because all are started again."""

    def start(self) -> None:
        """The ranks are about to be started, for the first time or again."""

    def state(self) -> Any:
        """What this part of another head would need to go on from here, if that takes over. It is pickled at once."""
        return None

    def go_on(self, started: Collection[int], state: Any) -> None:
        """Another head is gone, and we take over from that state. Called instead of the first `start`.

        `started`: the ranks that have a process.
        """

    def close(self) -> None:
        """The job is over."""


def takers(parts: Iterable[Part]) -> dict[type, tuple[Take, ...]]:
    """Who takes each type of message."""
    return _by_type((kind, part) for part in parts for kind in part.takes)


def seers(parts: Iterable[Part]) -> dict[type, tuple[Take, ...]]:
    """Who hears of each type of event and action."""
    return _by_type((kind, part) for part in parts for kind in part.sees)


def _by_type(pairs: Iterable[tuple[type, Part]]) -> dict[type, tuple[Take, ...]]:
    found: dict[type, tuple[Take, ...]] = {}
    for kind, part in pairs:
        found[kind] = (*found.get(kind, ()), part.on)
    return found
