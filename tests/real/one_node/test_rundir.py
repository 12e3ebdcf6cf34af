"""A job's folder, while processes use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launchpad.agent.ranks import rundir
from tests.support.rundir import _own_folder as _own_folder

CREATES = "import sys; from launchpad.agent.ranks import rundir; print(rundir.create(), flush=True); sys.stdin.read()"


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
