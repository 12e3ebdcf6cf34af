"""An in-process Link for tests and simulations: a Python object plays the agent, and frames are really encoded."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from launchpad.protocol import wire
from launchpad.protocol.commands import Command
from launchpad.protocol.events import Event


class MemoryLink:
    """A Link whose agent is the caller: `say` plays the agent's part, `heard` holds the head's commands."""

    def __init__(self, name: str = "", *, remote: bool = False) -> None:
        self.name = name
        self.remote = remote
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._decoder = wire.Decoder()
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, command: Command) -> None:
        """Receive a command from the head."""
        for message in self._decoder.feed(wire.encode(command)):
            self.heard.put(message)

    def say(self, event: Event) -> None:
        """Report an event to the head."""
        self._frames.put(wire.encode(event))

    def hang_up(self) -> None:
        """End the link from the agent's side."""
        self._frames.put(None)

    def messages(self) -> Iterator[Any]:
        """The reported events, until the agent's side hangs up."""
        decoder = wire.Decoder()
        while (frame := self._frames.get()) is not None:
            yield from decoder.feed(frame)

    def close(self) -> None:
        """End the link from the head's side."""
        self.hang_up()

    def abandon(self) -> None:
        """Same as `close`."""
        self.hang_up()
