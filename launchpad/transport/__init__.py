"""Links: how frames reach a node's agent, and come back.

A Link has four operations, the same ones for every transport: `send` never blocks the caller; `messages` yields
what the agent says, blocking, until the link ends; `close` hangs up and waits for the agent, `abandon` does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from launchpad.commands import Command


class Link(Protocol):
    """The head's end of the connection to one agent."""

    name: str  # of the node, as the user gave it; "" for the machine that the head runs on, if nobody named it
    remote: bool  # whether the link can fall silent without ending

    def send(self, command: Command) -> None:
        """Queue a command. A link that has ended takes it and forgets it: `messages` tells of the end."""

    def messages(self) -> Iterator[Any]:
        """The agent's events, until its end hangs up. Raises WireError for bytes that are not frames."""

    def close(self) -> None:
        """Hang up, and wait until the agent has ended; without a Finish before, it kills its ranks."""

    def abandon(self) -> None:
        """Hang up on an agent that does not answer, and don't wait for it."""


@runtime_checkable
class Delivering(Protocol):
    """A Link that needs no thread to be read: instead of `messages` it is told whom to call."""

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Give each of the agent's events to `take`, from any thread but one at a time; None at the link's end."""
