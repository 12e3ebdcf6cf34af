"""The agent's one place to wait: descriptors and what to do when they are ready."""

from __future__ import annotations

import select
from collections.abc import Callable


class Poll:
    """epoll, with a handler for each descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `handler(fd)` whenever one of the events has come."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch_once(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler(fd)` when there is something to read, and not again before `arm`."""
        self.watch(fd, handler, select.EPOLLIN | select.EPOLLONESHOT)

    def arm(self, fd: int) -> None:
        """Watch once more."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, if it is watched; before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wait(self, seconds: float) -> None:
        """Wait for events, -1 for any time, and handle them."""
        for fd, _ in self._epoll.poll(seconds):
            handler = self._handlers.get(fd)  # None where an earlier handler of this round closed it
            if handler is not None:
                handler(fd)
