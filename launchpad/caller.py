"""The process that the user started: this one, or the one for which a kept head (`launchpad warm`) runs the command.

A kept head belongs to another session, so it can't ask the terminal itself who is in its foreground.
"""

from __future__ import annotations

import errno
import os

_pid = 0  # 0: it is this process

# What a descriptor of /dev/tty leads to: the terminal of whoever opened it.
_DEV_TTY = os.makedev(5, 0)


def stand_in_for(pid: int) -> None:
    """We run the command for this process."""
    global _pid
    _pid = pid


def is_another_process() -> bool:
    """Whether we are a kept head."""
    return bool(_pid)


def in_foreground(terminal: int) -> bool:
    """Whether the caller is in the foreground of this terminal. Raises OSError if it is not that of its session."""
    if not _pid:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    with open(f"/proc/{_pid}/stat", "rb") as file:
        group, _, device, foreground = map(int, file.read().rpartition(b")")[2].split()[2:6])
    number = os.makedev(device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00)
    if not os.isatty(terminal) or os.fstat(terminal).st_rdev not in (number, _DEV_TTY):
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    return group == foreground
