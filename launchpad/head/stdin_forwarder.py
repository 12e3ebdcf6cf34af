"""Forwards stdin to a rank on another machine. Reads only as fast as the rank does, and only in the foreground."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from launchpad.protocol.events import StdinRead

# The most bytes in flight. What we have read is lost to programs that read stdin after us, even if the rank doesn't.
WINDOW_BYTES = 64 << 10

# How often a launcher in the background checks whether it is in the foreground again.
FOREGROUND_SECONDS = 0.2


class StdinForwarder:
    """A thread that reads stdin and posts what it read to the loop."""

    def __init__(self, post: Callable[[StdinRead], None]) -> None:
        self._post = post
        self._room = WINDOW_BYTES
        self._ended = False
        self._more_room = threading.Condition()
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def taken(self, size: int) -> None:
        """The rank has read `size` bytes."""
        with self._more_room:
            self._room += size
            self._more_room.notify()

    def reset(self) -> None:
        """Reset for a restart: bytes in flight were lost with the node, and the new rank must see the end of file."""
        with self._more_room:
            self._room = WINDOW_BYTES
            self._more_room.notify()
            ended = self._ended
        if ended:
            self._post(StdinRead(time.monotonic_ns(), b""))

    def _read(self) -> None:
        data = b"."
        while data:
            with self._more_room:
                while self._room <= 0:
                    self._more_room.wait()
                room = self._room
            try:
                select.select([0], [], [])
                if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
                    time.sleep(FOREGROUND_SECONDS)
                    continue
                data = os.read(0, room)
            except OSError:  # the terminal is gone
                data = b""
            with self._more_room:
                self._room -= len(data)
                self._ended = not data
            self._post(StdinRead(time.monotonic_ns(), data))
