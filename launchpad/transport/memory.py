"""The in-process twin of a link: the other end is a Python object, and frames are encoded as on a real one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

from launchpad import wire
from launchpad.commands import Command
from launchpad.events import Event


class MemoryLink:
    """A Link whose agent is the caller: `say` plays the agent's part, `heard` is what the head has asked."""

    def __init__(self, name: str = "", *, remote: bool = False) -> None:
        self.name = name
        self.remote = remote
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._decoder = wire.Decoder()
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, command: Command) -> None:
        """Take a command from the head."""
        for message in self._decoder.feed(wire.encode(command)):
            self.heard.put(message)

    def say(self, event: Event) -> None:
        """Report an event to the head."""
        self._frames.put(wire.encode(event))

    def hang_up(self) -> None:
        """End the link from the agent's side."""
        self._frames.put(None)

    def messages(self) -> Iterator[Any]:
        """What was said, until the agent's side hangs up."""
        decoder = wire.Decoder()
        while (frame := self._frames.get()) is not None:
            yield from decoder.feed(frame)

    def close(self) -> None:
        """End the link from the head's side."""
        self.hang_up()

    def abandon(self) -> None:
        """The same."""
        self.hang_up()


class DirectLink(MemoryLink):
    """The same with no thread between agent and head, for thousands of them. Nothing may be said before the Hello."""

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Give each event to `take` in the thread that says it; None at the end."""
        self._take = take
        self._said = wire.Decoder()

    def say(self, event: Event) -> None:
        """Report an event to the head."""
        for message in self._said.feed(wire.encode(event)):
            self._take(message)

    def hang_up(self) -> None:
        """End the link, from either side."""
        self._take(None)
