"""Every example, run as its first line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launchpad

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_hello(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 4, EXAMPLES / "hello.py")
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert [line.partition(", process")[0] for line in lines] == [f"[{r}] hello from rank {r} of 4" for r in range(4)]


def test_all_reduce(launchpad: Launchpad) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    done = launchpad.run("run", "--nproc", 4, EXAMPLES / "all_reduce.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{r}] rank {r} of 4: the sum of all ranks is [6.0, 6.0, 6.0]" for r in range(4)
    ]


def test_all_reduce_many_times_at_once(launchpad: Launchpad) -> None:
    """Jobs that start together get different ports: nobody meets "address already in use"."""
    pytest.importorskip("torch", reason="torch is not installed")
    jobs = [launchpad.start("run", "--nproc", 2, EXAMPLES / "all_reduce.py") for _ in range(4)]
    for job in jobs:
        out, err = job.communicate(timeout=180)
        assert job.returncode == 0, err
        assert out.count(b"the sum of all ranks is [1.0, 1.0, 1.0]") == 2
