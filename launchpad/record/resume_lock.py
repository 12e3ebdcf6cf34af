"""Who takes a job over whose launchpad was killed, or ends its ranks: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os

from launchpad.errors import UsageError

_LOCK = "resumed"


class ResumeLock:
    """Whoever has it has it until its process ends."""

    def __init__(self, folder: str) -> None:
        """`folder`: of the job's record. Raises UsageError if another one has it, and OSError."""
        self._fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(self._fd, 200).decode(errors="replace").strip() or "another launchpad"
            os.close(self._fd)
            raise UsageError(f"job {os.path.basename(folder)} is being resumed by {who}") from None
        except OSError:  # a file system without locks
            pass
        self.sign()

    def sign(self) -> None:
        """Say that it is this process that has it."""
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def remove(folder: str) -> None:
    """Nobody needs it any more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, _LOCK))
