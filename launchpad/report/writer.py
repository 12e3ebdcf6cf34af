"""A thread that writes: a slow reader makes it wait, and nothing else."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable

from launchpad.events import Output, Written

# Pieces under way are joined up to this many for one system call (IOV_MAX is 1024).
_MOST_PIECES = 64


class Writer:
    """Writes pieces in order. How much may wait is bounded by the credit that is given only for what was written."""

    def __init__(self, report: Callable[[Written], None], failed: Callable[[int, OSError], None]) -> None:
        """`report` hears of each written Output; `failed` once of each descriptor that takes no more."""
        self._report = report
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[list[tuple[int, bytes]], Output | int | None] | None] = queue.SimpleQueue()
        self._dead: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, pieces: list[tuple[int, bytes]], output: Output | None = None) -> None:
        """Write these (descriptor, bytes); then report the output that they hold the last of."""
        self._queue.put((pieces, output))

    def close_later(self, fd: int) -> None:
        """Close a descriptor once all that was put for it is written."""
        self._queue.put(([], fd))

    def close(self, seconds: float | None = None) -> None:
        """Wait until all is written, at most so long. Without a limit: a paused reader will want the rest."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pieces, then = item
            start = 0
            while start < len(pieces):
                fd = pieces[start][0]
                end = start + 1
                while end < len(pieces) and pieces[end][0] == fd and end - start < _MOST_PIECES:
                    end += 1
                if fd not in self._dead:
                    self._write(fd, [memoryview(data) for _, data in pieces[start:end] if data])
                start = end
            if isinstance(then, Output):
                self._report(Written(then))
            elif then is not None:
                os.close(then)
                self._dead.discard(then)

    def _write(self, fd: int, views: list[memoryview]) -> None:
        while views:
            try:
                written = os.writev(fd, views)
            except BlockingIOError:  # whoever shares the descriptor with us has made it non-blocking
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()
                continue
            except OSError as error:
                self._dead.add(fd)
                self._failed(fd, error)
                return
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]
