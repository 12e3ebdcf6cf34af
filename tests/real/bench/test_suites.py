"""tests/suites: that they compare what they find, without the suites themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.needs import needs_mpi

SUITES = Path(__file__).parents[2] / "suites"


@needs_mpi
def test_a_case_that_only_launchpad_fails(launchpad: Launchpad, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "main.py").write_text(
        "import os, sys\nprint('Ran 1 test')\nsys.exit('LAUNCHPAD_BACKEND' in os.environ and 'test_b' in sys.argv)\n"
    )
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / "test" / name).touch()
    done = subprocess.run(
        [sys.executable, SUITES / "mpi4py_suite.py", tmp_path, "--np", "1"],
        capture_output=True, text=True, timeout=DEADLINE, env=launchpad.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "| pass under both | 1 |" in done.stdout
    assert "| only launchpad fails | 1 |" in done.stdout
    assert "test_b -n 1\n  launchpad: exit code 1, 1 tests, 0 skipped, 0 failed\n  mpiexec" in done.stdout


@pytest.mark.parametrize("name", ["mpi4py_suite", "mpich_suite"])
def test_a_folder_that_has_no_suite(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, SUITES / f"{name}.py", tmp_path], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 2
    assert f"error: {tmp_path} is not " in done.stderr
