"""Our standard input, for a rank 0 on another machine: read as that rank takes it, and only in the foreground."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from launchpad.events import InputRead

# So much may be under way. Of what was read and not yet taken by the rank nothing is left for who reads after us.
WINDOW_BYTES = 64 << 10

# How often a launcher in the background looks whether the terminal is its own again.
FOREGROUND_SECONDS = 0.2


class Input:
    """A thread that reads, and tells the loop."""

    def __init__(self, post: Callable[[InputRead], None]) -> None:
        self._post = post
        self._room = WINDOW_BYTES
        self._ended = False
        self._more_room = threading.Condition()
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def taken(self, size: int) -> None:
        """The rank has room for so many bytes more."""
        with self._more_room:
            self._room += size
            self._more_room.notify()

    def reset(self) -> None:
        """What was under way is lost with its node; where all was read, who runs now is to hear that, too."""
        with self._more_room:
            self._room = WINDOW_BYTES
            self._more_room.notify()
            ended = self._ended
        if ended:
            self._post(InputRead(time.monotonic_ns(), b""))

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
            self._post(InputRead(time.monotonic_ns(), data))
