"""Tells whether a rank waits for what its user types: the system call that its main thread is in says so.

/proc/PID/syscall has the call's number and arguments, and is readable for an agent, from which its ranks descend. Where
it isn't, or on an unknown processor, no rank is ever found to wait.
"""

from __future__ import annotations

import os
import struct
import time

from ...protocol.events import AtPrompt
from ..host import procfs
from ..part import AgentHub, AgentPart
from .rank import Rank

# How often to look. A person doesn't notice, and the time limits that are paused meanwhile are longer.
LOOK_SECONDS = 0.5

# By processor: the numbers of read and readv; of select and pselect6; of poll and ppoll; of epoll_wait and epoll_pwait.
_CALLS = {
    "x86_64": ((0, 19), (23, 270), (7, 271), (232, 281)),
    "aarch64": ((63, 65), (72,), (73,), (22,)),
}

_MOST_POLLED = 64
_POLLFD = struct.Struct("ihh")


def waits_for_input(pid: int) -> bool:
    """Whether this process waits until its standard input has something to read, or for a child that does.

    Only main threads count: others may always wait for a key, and the program goes on.
    """
    if _reads_input(pid):
        return True
    if not procfs.waits_for_children(pid):
        return False
    try:
        ours = os.readlink(f"/proc/{pid}/fd/0")
        return any(os.readlink(f"/proc/{one}/fd/0") == ours and waits_for_input(one) for one in procfs.children(pid))
    except OSError:  # one of them has just ended
        return False


def _reads_input(pid: int) -> bool:
    reads, selects, polls, epolls = _CALLS.get(os.uname().machine, ((), (), (), ()))
    try:
        with open(f"/proc/{pid}/syscall") as file:
            number, first, second = (int(word, 0) for word in file.read().split()[:3])
        if number in reads:
            return first == 0
        if number in selects:  # how many descriptors, and the set of those to be read
            return first > 0 and second != 0 and bool(_memory(pid, second, 1)[0] & 1)
        if number in polls:
            count = min(second, _MOST_POLLED)
            return any(fd == 0 for fd, _, _ in _POLLFD.iter_unpack(_memory(pid, first, count * _POLLFD.size)))
        return number in epolls and 0 in procfs.watched_by(pid, first)
    except (OSError, ValueError, IndexError):  # it runs ("running"), is gone, or may not be looked at
        return False


def _memory(pid: int, address: int, size: int) -> bytes:
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, size, address)
    finally:
        os.close(fd)


class PromptWatch(AgentPart):
    """Reports when the rank that gets what is typed begins to wait for it, and when it goes on."""

    deadline: float | None = None  # when to look

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._rank = -1
        self._pid = 0
        self._waits = False

    def started(self, rank: Rank) -> None:
        """Watch the one that gets what is typed."""
        if rank.typed:
            self._rank, self._pid, self._waits = rank.rank, rank.pid, False
            self.deadline = time.monotonic() + LOOK_SECONDS

    def exited(self, rank: Rank, code: int) -> None:
        """It doesn't wait any more."""
        if rank.pid == self._pid:
            self._pid, self.deadline = 0, None
            self._set(False)

    def tick(self, now: float) -> None:
        """Look."""
        self.deadline = now + LOOK_SECONDS
        self._set(waits_for_input(self._pid))

    def _set(self, waits: bool) -> None:
        if waits != self._waits:
            self._waits = waits
            self._hub.outbox.say(AtPrompt(time.monotonic_ns(), self._rank, waits))
