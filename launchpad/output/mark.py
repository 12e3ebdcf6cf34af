"""A mark between two events: how long the files are that hold what came before it, and the state of their writers."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from launchpad.named import NamedTuple


class SinkMark:
    """Shown to all sinks like an event. Those that write files say so at once, and later how long their files are."""

    def __init__(self, done: Callable[["SinkMark"], None]) -> None:
        """`done` is called when all have written, in the thread of the last one."""
        self.states: dict[str, Any] = {}  # by the names of those who write: what they need to go on from here
        self.sizes: dict[str, int] = {}  # in bytes, by path
        self._done = done
        self.failed = False  # something before it could not be written
        self._lock = threading.Lock()
        self._left = 1

    def awaits(self, name: str, state: Any) -> None:
        """`name` calls `written` when it has written all before."""
        self.states[name] = state
        self._left += 1

    def fail(self) -> None:
        """Somebody who is awaited can't write."""
        self.failed = True
        self.written({})

    def written(self, sizes: Mapping[str, int]) -> None:
        """These are the lengths of somebody's files. To be called once more when all sinks have been shown it."""
        with self._lock:
            self.sizes.update(sizes)
            self._left -= 1
            over = not self._left
        if over:
            self._done(self)


class Resumed(NamedTuple):
    """Where those who write files go on in another process: the files have been cut to the lengths of a mark."""

    folder: str  # of the job's record
    states: Mapping[str, Any]
