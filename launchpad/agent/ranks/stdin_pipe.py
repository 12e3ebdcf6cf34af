"""Standard input for a rank whose head is on another machine: writes what arrives in frames into a pipe."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from ...protocol.events import StdinTaken
from ..outbox import Outbox
from ..poll import Poll


class StdinPipe:
    """The pipe. The head sends more bytes once it hears that the previous ones were written."""

    def __init__(self, poll: Poll, outbox: Outbox) -> None:
        self._poll = poll
        self._outbox = outbox
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._backlog: deque[memoryview] = deque()

    def take(self, data: bytes) -> None:
        """Write these bytes as room permits; empty data closes the pipe once the backlog is written."""
        if self._writer >= 0:
            self._backlog.append(memoryview(data))
            self._write()

    def _write(self) -> None:
        taken = 0
        while self._backlog:
            data = self._backlog[0]
            if not data:
                self._poll.unwatch(self._writer)
                os.close(self._writer)
                self._writer = -1
                self._backlog.clear()
                break
            try:
                written = os.write(self._writer, data)
            except BlockingIOError:
                if self._writer not in self._poll:
                    self._poll.watch(self._writer, lambda _: self._write(), select.EPOLLOUT)
                break
            taken += written
            self._backlog[0] = data[written:]
            if written == len(data):
                self._backlog.popleft()
        else:
            self._poll.unwatch(self._writer)
        if taken:
            self._outbox.say(StdinTaken(time.monotonic_ns(), taken))
