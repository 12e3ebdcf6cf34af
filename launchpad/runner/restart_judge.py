"""Judges before each restart whether it can help, from the history of the job and from the files of `--progress`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launchpad.diagnosis.diagnosis import Diagnosis

if TYPE_CHECKING:
    from launchpad.diagnosis.restarts import Signature

# A file server that is down would hold up the head for ever; nodes that are not heard for longer would be lost.
LOOK_SECONDS = 2.0


class RestartJudge:
    """Remembers how the attempt before failed, and the newest file of `--progress` at that time."""

    def __init__(self, diagnosis: Diagnosis, folder: str, progress: Sequence[str]) -> None:
        """Created before the ranks start. `progress`: patterns of files, relative to `folder`."""
        self._diagnosis = diagnosis
        self._folder = folder
        self._progress = progress
        self._before: Signature | None = None
        self._newest = self._look()

    def refusal(self) -> str:
        """Why the ranks must not start again, as a sentence; "" if they may. Asked once after each attempt."""
        from launchpad.diagnosis import restarts

        history, verdict = self._diagnosis.history, self._diagnosis.verdict()
        newest = self._look()
        # Files that could not be looked up in time may be new.
        new = newest is None or self._newest is None or newest > self._newest
        new_files = new if self._progress else None
        why = restarts.refusal(history, verdict, self._before, new_files, self._progress)
        self._before = restarts.signature_of(history, verdict)
        self._newest = newest
        return why

    def _look(self) -> int | None:
        """The time of the newest file, in ns; 0 if there is none, None if it takes too long to find out.

        Times of files are only compared with each other: a file server's clock may differ from ours.
        """
        if not self._progress:
            return 0
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(newest(self._folder, self._progress)), daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS)
        return found[0] if found else None


def newest(folder: str, patterns: Sequence[str]) -> int:
    """When the newest file that matches was modified, in ns since 1970; 0 if there is none."""
    import glob

    times = [0]
    for pattern in patterns:
        for path in glob.iglob(os.path.join(glob.escape(folder), os.path.expanduser(pattern)), recursive=True):
            try:
                times.append(os.stat(path).st_mtime_ns)
            except OSError:  # it was removed just now
                pass
    return max(times)
