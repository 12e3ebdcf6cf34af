"""Connects to a host a few times at once only, and again where it hung up because others were connecting too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

from launchpad.errors import ConnectError

# From ten unauthenticated connections on, sshd starts to drop some (MaxStartups 10:30:100).
AT_ONCE = 8
# Seconds to wait before each retry of a host that hung up without a banner: others may be connecting to it too.
RETRY_DELAYS = (0.1, 0.3, 0.9)

T = TypeVar("T")


class Dropped(Exception):
    """The host hung up, but may not do so on a retry. `error` is what to raise if it does."""

    def __init__(self, error: ConnectError) -> None:
        super().__init__(str(error))
        self.error = error


class Turns:
    """Who may connect now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[Hashable, threading.BoundedSemaphore] = {}
        self._over = threading.Event()

    def take(self, place: Hashable, connect: Callable[[], T]) -> T:
        """Connect to a place when it is our turn, and again while that raises Dropped. Raises ConnectError."""
        with self._lock:
            slot = self._slots.setdefault(place, threading.BoundedSemaphore(AT_ONCE))
        for delay in (*RETRY_DELAYS, None):
            with slot:
                try:
                    return connect()
                except Dropped as dropped:
                    error = dropped.error
            if delay is None or self._over.wait(delay):
                break
        raise error

    def end(self) -> None:
        """Try nothing again."""
        self._over.set()
