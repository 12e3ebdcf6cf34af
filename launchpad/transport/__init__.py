"""Links: how frames travel between the head and a node's agent.

Every transport has the same four operations: `send` never blocks the caller; `messages` yields the agent's events and
blocks between them, until the link ends; `close` hangs up and waits for the agent; `abandon` hangs up without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from launchpad.protocol.commands import Command

# How much to read at once from an agent.
READ_BYTES = 1 << 20

# More links than this, of up to six descriptors each, may be too many for our limit of open files: raise it first.
FEW_LINKS = 8

# How long `close` waits. Guard and agent exit by themselves, within guard.STUCK_AGENT plus processes.SWEEP_SECONDS.
CLOSE_SECONDS = 20.0


class Link(Protocol):
    """The head's end of the connection to one agent."""

    name: str  # the node's name, as the user gave it; "" for the head's own machine if the user didn't name it
    remote: bool  # whether the link can go silent without ending

    def send(self, command: Command) -> None:
        """Queue a command. A link that has ended silently drops it; `messages` reports the end."""

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it hangs up. Raises WireError for bytes that are not frames."""

    def close(self) -> None:
        """Hang up and wait until the agent has exited. Unless it got a Finish first, it kills its ranks."""

    def abandon(self) -> None:
        """Hang up on an agent that doesn't answer, without waiting for it."""


@runtime_checkable
class Delivering(Protocol):
    """A Link that needs no reader thread: it calls back instead of offering `messages`."""

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Pass each of the agent's events to `take`, from any thread but one at a time; None when the link ends.

        An exception (OSError, WireError) before that says what went wrong.
        """
