"""Judges before each restart whether it can help, from the history of the job and from the files of `--progress`."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launchpad.diagnosis.diagnosis import Diagnosis, WorldDiagnosis
from launchpad.head.machine import Judgement
from launchpad.job.limits import Limits
from launchpad.job.spec import RoleSpec

if TYPE_CHECKING:
    from launchpad.diagnosis.history import History
    from launchpad.diagnosis.restarts import Signature
    from launchpad.diagnosis.verdict import Verdict

# A file server that is down would hold up the head for ever; nodes that are not heard for longer would be lost.
LOOK_SECONDS = 2.0

# So often a node may fail because of its own hardware before it comes last.
DOUBTED_TIMES = 2


class RestartJudge:
    """Remembers how the attempt before failed, and the newest file of `--progress` at that time."""

    def __init__(self, diagnosis: Diagnosis | WorldDiagnosis, folder: str, limits: Limits) -> None:
        """Created before the ranks start. The patterns of `limits.progress` are relative to `folder`."""
        self._diagnosis = diagnosis
        self._folder = folder
        self._progress = limits.progress
        self._refuses = limits.restart != "always"
        self._before: Signature | None = None
        self._faults: Counter[int] = Counter()  # by node: how often its own hardware made an attempt fail
        self._newest = self._look()

    def judge(self) -> Judgement:
        """Whether the ranks may start again, and on which nodes rather not. Asked once after each attempt."""
        from launchpad.diagnosis.hardware import hardware_fault

        history, verdict = self._diagnosis.history, self._diagnosis.verdict()
        fault = hardware_fault(history, verdict)
        if fault is None:
            return Judgement(self._refusal(history, verdict) if self._refuses else "")
        self._before = None  # it came from outside the program
        self._faults[fault.node] += 1
        times = self._faults[fault.node]
        return Judgement(doubted={fault.node: (times, fault.reason)} if times >= DOUBTED_TIMES else {})

    def _refusal(self, history: History, verdict: Verdict) -> str:
        """Why the ranks must not start again, as a sentence; "" if they may."""
        from launchpad.diagnosis import restarts

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


class WorldJudges:
    """Judges for each world of a job whether to start it again."""

    def __init__(self, diagnosis: Diagnosis, roles: Sequence[RoleSpec]) -> None:
        """Created before the ranks start."""
        self._judges = {
            role.name: RestartJudge(diagnosis.world(role.name), role.spec.cwd, role.spec.limits)
            for role in roles
            if role.spec.limits.max_restarts.most
        }

    def judge(self, world: str) -> Judgement:
        """Whether its ranks may start again. Asked once after each of its attempts."""
        return self._judges[world].judge()


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
