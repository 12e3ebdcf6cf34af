"""Writes output: in a thread, so that a slow reader blocks nothing else, and with a limit on files that are open."""

from __future__ import annotations

import os
import queue
import select
import stat
import threading
from collections.abc import Callable, Sequence

from launchpad.output import status_line
from launchpad.output.mark import SinkMark
from launchpad.protocol.events import Output, Written

Target = int | str  # a descriptor, or the path of a file to append to

# The most pieces that are written with one system call (IOV_MAX is 1024).
_MOST_PIECES = 64

# Well below the soft limit on descriptors; links to nodes need some too.
MOST_OPEN = 32


class Writer:
    """A thread that writes pieces in order. Its backlog is bounded: credit is given only for what has been written."""

    def __init__(self, report: Callable[[Written], None], failed: Callable[[Target, OSError], None]) -> None:
        """`report` is called for each written Output, and `failed` once for each target that can't be written to."""
        self._report = report
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[Sequence[tuple[Target, bytes]], Output | None] | str | SinkMark | None]
        self._queue = queue.SimpleQueue()
        self._files = OpenFiles()
        self._dead: set[Target] = set()
        self._written: set[Target] = set()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, pieces: Sequence[tuple[Target, bytes]], output: Output | None = None) -> None:
        """Queue (target, bytes) pieces; when they are written, `output` is reported."""
        self._queue.put((pieces, output))

    def mark(self, mark: SinkMark) -> None:
        """Tell it how long our files are when everything so far is written."""
        self._queue.put(mark)

    def finish(self, path: str) -> None:
        """Close this file when everything so far is written."""
        self._queue.put(path)

    def close(self, seconds: float | None = None) -> None:
        """Wait until everything is written, at most `seconds`. The default is no limit: a paused reader may resume."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._files.close(item)
                continue
            if isinstance(item, SinkMark):
                item.written(dict(filter(None, map(_size, self._written))))
                continue
            pieces, output = item
            start = 0
            while start < len(pieces):
                target = pieces[start][0]
                end = start + 1
                while end < len(pieces) and pieces[end][0] == target and end - start < _MOST_PIECES:
                    end += 1
                if target not in self._dead:
                    self._write(target, [memoryview(data) for _, data in pieces[start:end] if data])
                start = end
            if output is not None:
                self._report(Written(output))
        self._files.close_all()

    def _write(self, target: Target, views: list[memoryview]) -> None:
        if isinstance(target, str) or not (status_line.is_shown() and views and os.isatty(target)):
            self._write_all(target, views)
            return
        with status_line.aside:
            status_line.wrote(views[-1][-1])
            self._write_all(target, views)

    def _write_all(self, target: Target, views: list[memoryview]) -> None:
        while views:
            try:
                fd = self._files.descriptor(target) if isinstance(target, str) else target
                written = os.writev(fd, views)
            except BlockingIOError:  # another process that shares the descriptor has made it non-blocking
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()
                continue
            except OSError as error:
                self._dead.add(target)
                self._failed(target, error)
                return
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]
        self._written.add(target)


def _size(target: Target) -> tuple[str, int] | None:
    """The path and length of a file; None for standard streams, and for what is no file."""
    try:
        found = os.stat(target)
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
    except OSError:
        return None
    return (path, found.st_size) if stat.S_ISREG(found.st_mode) and target not in (0, 1, 2) else None


class OpenFiles:
    """Descriptors to append with, by path. At MOST_OPEN, the least recently used one is closed to open another."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}  # most recently used last

    def descriptor(self, path: str) -> int:
        """The file's descriptor; creates the file if needed. Raises OSError."""
        fd = self._fds.pop(path, None)
        if fd is None:
            while len(self._fds) >= MOST_OPEN:
                self.close(next(iter(self._fds)))
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._fds[path] = fd
        return fd

    def close(self, path: str) -> None:
        """Close the file, if it is open."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close_all(self) -> None:
        """Close all files."""
        for path in list(self._fds):
            self.close(path)
