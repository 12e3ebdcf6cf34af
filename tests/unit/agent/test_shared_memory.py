"""agent/ranks/shared_memory: which files of dead ranks are removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launchpad.agent.ranks import shared_memory

DEAD = 2**22 + 7  # above the largest pid


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "_SHM", str(tmp_path))
    monkeypatch.setattr(shared_memory, "_FIRST_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    return tmp_path


def test_only_what_dead_processes_of_ours_have_made_is_removed(shm: Path) -> None:
    theirs = [f"torch_{DEAD}_1_0", f"mpich_shm_{DEAD:x}_0", f"mpich_vci_{DEAD:x}_1"]
    kept = [f"torch_{DEAD + 1}_1_0", f"torch_{os.getpid()}_1_0", f"mpich_shm_{DEAD}_0", f"my_{DEAD}_1_0", "torch_x_1_0"]
    for name in theirs + kept:
        (shm / name).touch()
    shared_memory.remove({DEAD, os.getpid()}, time.time() + 60)
    assert sorted(os.listdir(shm)) == sorted(theirs + kept)
    shared_memory.remove({DEAD, os.getpid()}, 0.0)
    assert sorted(os.listdir(shm)) == sorted(kept)


def test_in_a_container_nothing_is_removed(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its /dev/shm may be the host's, where the pid is another process's."""
    monkeypatch.setattr(shared_memory, "_FIRST_NAMESPACE", 1)
    (shm / f"torch_{DEAD}_1_0").touch()
    shared_memory.remove({DEAD}, 0.0)
    assert os.listdir(shm) == [f"torch_{DEAD}_1_0"]
