"""The standard input of a rank whose head is on another machine: what comes in frames goes into a pipe."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from ..events import InputTaken
from .outbox import Outbox
from .poll import Poll


class Input:
    """The pipe. The head sends the next bytes when it hears that the last ones were taken."""

    def __init__(self, poll: Poll, outbox: Outbox) -> None:
        self._poll = poll
        self._outbox = outbox
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._waiting: deque[memoryview] = deque()

    def take(self, data: bytes) -> None:
        """Write these bytes as there is room for them; if there are none, close the pipe after what came before."""
        if self._writer >= 0:
            self._waiting.append(memoryview(data))
            self._write()

    def _write(self) -> None:
        taken = 0
        while self._waiting:
            data = self._waiting[0]
            if not data:
                self._poll.unwatch(self._writer)
                os.close(self._writer)
                self._writer = -1
                self._waiting.clear()
                break
            try:
                written = os.write(self._writer, data)
            except BlockingIOError:
                if self._writer not in self._poll:
                    self._poll.watch(self._writer, lambda _: self._write(), select.EPOLLOUT)
                break
            taken += written
            self._waiting[0] = data[written:]
            if written == len(data):
                self._waiting.popleft()
        else:
            self._poll.unwatch(self._writer)
        if taken:
            self._outbox.say(InputTaken(time.monotonic_ns(), taken))
