"""The agent's event loop core: epoll, with a handler for each descriptor."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable

# epoll takes no more than 2^31 ms; whoever waits for longer looks again.
LONGEST_WAIT = 86_400.0


def earliest(deadlines: Iterable[float | None]) -> float | None:
    """The first of these times, by time.monotonic(); None if there is none."""
    return min((at for at in deadlines if at is not None), default=None)


class Poll:
    """Descriptors, and what to call when they are ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `handler(fd)` whenever one of the events occurs."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch_once(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler(fd)` when there is something to read, then not again until `arm`."""
        self.watch(fd, handler, select.EPOLLIN | select.EPOLLONESHOT)

    def arm(self, fd: int) -> None:
        """Re-arm a descriptor of `watch_once`."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of a watched descriptor."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor; a no-op if it is not watched. Call it before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Close our own descriptor; those that are watched stay open."""
        self._epoll.close()

    def wait(self, deadline: float | None) -> None:
        """Wait for events until `deadline`, by time.monotonic() (None: without limit), and handle them."""
        seconds = -1 if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
        for fd, _ in self._epoll.poll(seconds):
            handler = self._handlers.get(fd)  # None if an earlier handler of this round closed it
            if handler is not None:
                handler(fd)
