"""agent/ranks/rundir: who may remove a job's folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad.agent.ranks import rundir

CREATES = "import sys; from launchpad.agent.ranks import rundir; print(rundir.create(), flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _own_folder(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "_parents", lambda: iter([str(scratch)]))


class Owner:
    """A process that has created a folder."""

    def __init__(self, scratch: Path) -> None:
        argv = [sys.executable, "-c", CREATES]
        environ = {**os.environ, "TMPDIR": str(scratch)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=environ, text=True)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        with self.process:
            self.process.kill()


def test_a_folder_is_abandoned_once_its_owner_is_dead(scratch: Path) -> None:
    owner = Owner(scratch)
    (owner.folder / "0.error.json").write_text("{}")
    assert list(rundir.abandoned()) == []
    owner.kill()
    assert list(rundir.abandoned()) == [str(owner.folder)]
    rundir.remove(str(owner.folder))
    assert list(scratch.iterdir()) == []


def test_only_one_removes_it(scratch: Path) -> None:
    owner = Owner(scratch)
    owner.kill()
    first = rundir.abandoned()
    assert next(first) == str(owner.folder)
    assert list(rundir.abandoned()) == []
    first.close()
    assert list(rundir.abandoned()) == [str(owner.folder)]


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
