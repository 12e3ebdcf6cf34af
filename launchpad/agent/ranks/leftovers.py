"""Gives what ranks left behind time to finish its work, when all of them have ended well.

Who handles TERM is sent it at once, and knows what to do. Any other process would die of it in the middle of its work,
so it is sent TERM only when it has done none for a while. What is still there after the grace is for the sweep.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from ...protocol.events import LeftoversAwaited
from ..host import processes, procfs, traffic

# A process that has used no CPU and moved no bytes for so long has nothing to finish: an upload waits for its server.
IDLE_SECONDS = 2.0

# How often to look what they do.
LOOK_SECONDS = 0.25

# When the user is told what we wait for.
TELL_SECONDS = 1.0


class Leftovers:
    """Waits for them, in the agent's loop."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        self.deadline: float | None = None  # when to call `tick`; None: nobody is waited for
        self._say = say
        self._own: Collection[int] = ()
        self._then: Callable[[dict[int, str]], None] | None = None
        self._begun = self._until = 0.0
        self._told = False
        self._asked: set[int] = set()  # those that have got TERM
        self._killed: dict[int, str] = {}  # those that die of it
        self._worked: dict[int, tuple[Any, float]] = {}  # what each has used so far, and when that grew last

    def wait(self, own: Collection[int], seconds: float, then: Callable[[dict[int, str]], None]) -> None:
        """Call `then` when none are left, or after so many seconds, with those that had to be killed.

        `own`: children of ours that no rank has left.
        """
        self._own, self._then, self._told = own, then, False
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self._asked.clear()
        self._killed = {}
        self._worked.clear()
        self.tick(self._begun)

    def recheck(self) -> None:
        """A child has ended: look again in the next round."""
        if self._then is not None:
            self.deadline = 0.0

    def hurry(self) -> None:
        """Wait no more."""
        if self._then is not None:
            self._until = self.deadline = 0.0

    def tick(self, now: float) -> None:
        """Look at those that are left."""
        if self._then is None or (self.deadline is not None and now < self.deadline):
            return
        left = processes.left_behind(self._own) if now < self._until else {}
        if not left:
            then, self._then, self.deadline = self._then, None, None
            then(self._killed)
            return
        sockets = traffic.by_socket()
        for pid in left.keys() - self._asked:
            fields = procfs.status(pid)
            handles = procfs.has_signal(fields, "SigCgt", signal.SIGTERM)
            if handles or self._is_idle(pid, sockets, now):
                self._asked.add(pid)
                if not handles and not procfs.has_signal(fields, "SigIgn", signal.SIGTERM):
                    self._killed[pid] = left[pid]
                try:
                    os.kill(pid, signal.SIGTERM)
                except (ProcessLookupError, PermissionError):  # it is gone, or another user's (sudo)
                    pass
        if not self._told and now >= self._begun + TELL_SECONDS:
            self._told = True
            seconds = round(self._until - self._begun, 3)
            self._say(LeftoversAwaited(time.monotonic_ns(), processes.shown(left), seconds))
        self.deadline = min(now + LOOK_SECONDS, self._until)

    def _is_idle(self, pid: int, sockets: dict[str, traffic.Connection], now: float) -> bool:
        seconds, busy, moved = procfs.use(pid, sockets)
        before, since = self._worked.get(pid, (None, now))
        if busy or before != (seconds, moved):
            since = now
        self._worked[pid] = ((seconds, moved), since)
        return now >= since + IDLE_SECONDS
