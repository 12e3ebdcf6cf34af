"""record/resume_lock: who has it, and who is told so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.record import resume_lock
from launchpad.record.resume_lock import ResumeLock


def test_the_other_is_told_who_has_it(tmp_path: Path) -> None:
    lock = ResumeLock(str(tmp_path))
    with pytest.raises(UsageError, match=rf"is being resumed by process {os.getpid()} on {os.uname().nodename}"):
        ResumeLock(str(tmp_path))
    os.close(lock._fd)
    os.close(ResumeLock(str(tmp_path))._fd)
    resume_lock.remove(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = ResumeLock(str(tmp_path))
    with pytest.raises(UsageError, match="by another launchpad"):
        ResumeLock(str(tmp_path))
    os.close(lock._fd)
