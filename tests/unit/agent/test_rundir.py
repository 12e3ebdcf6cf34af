"""agent/ranks/rundir: who may remove a job's folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from launchpad.agent.ranks import rundir
from tests.support.rundir import _own_folder as _own_folder


def test_a_folder_without_a_lock_goes_only_if_it_is_empty(scratch: Path) -> None:
    empty, full = (scratch / f"launchpad-{rundir._boot()}-1-{digit * 12}" for digit in "ab")
    for folder in (empty, full):
        folder.mkdir()
    (full / "unlocked").touch()
    assert list(rundir.abandoned()) == []
    assert list(scratch.iterdir()) == [full]


@pytest.mark.parametrize(
    "name", ["launchpad-logs-abc", "launchpad-1-aaaaaaaaaaaa", "launchpad-{boot}-1-aaaaaaaaaaaa.old"]
)
def test_other_names_are_not_ours(scratch: Path, name: str) -> None:
    folder = scratch / name.format(boot=rundir._boot())
    folder.mkdir()
    (folder / "lock").touch()
    assert list(rundir.abandoned()) == []
    assert folder.exists()


@pytest.mark.parametrize(("device", "found"), [(os.makedev(0, 40), False), (os.makedev(8, 1), True)])
def test_a_folder_of_another_boot_counts_only_on_a_disk(
    scratch: Path, device: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system it may be another machine's."""
    folder = scratch / "launchpad-00000001-1-aaaaaaaaaaaa"
    folder.mkdir()
    (folder / "lock").touch()
    facts = list(os.lstat(folder))
    facts[2] = device
    monkeypatch.setattr(os, "lstat", lambda _: os.stat_result(facts))
    assert list(rundir.abandoned()) == [str(folder)] * found


def test_where_there_are_no_locks_nothing_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        folder = rundir.create()
        assert os.listdir(folder) == ["unlocked"]
    assert list(rundir.abandoned()) == []
    rundir.remove(folder)


def test_a_new_folder_that_is_taken_for_abandoned_is_replaced(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, removed = os.open, []

    def steal(path: str, flags: int, mode: int = 0o777) -> int:
        if not removed:
            removed.append(os.path.dirname(path))
            os.rmdir(removed[0])
        return real(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", steal)
        folder = rundir.create()
    assert [str(one) for one in scratch.iterdir()] == [folder] != removed
    rundir.remove(folder)
