"""The interface of a sink, which consumes the event stream: the console, the files, the summary …"""

from __future__ import annotations

from typing import Any, Protocol


class Sink(Protocol):
    """Consumes the event stream."""

    def on(self, event: Any) -> bool:
        """Take an event. True if an Output's bytes are still held; a Written will follow."""

    @property
    def deadline(self) -> float | None:
        """When to call `tick`, in seconds of time.monotonic()."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def close(self) -> None:
        """Finish writing."""
