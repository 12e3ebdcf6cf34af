"""What ranks leave behind has time to finish when they have ended well: it is told, and a signal ends the wait."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until

LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True)
"""

# Ends by itself; works without a pause; works, and TERM would find it at it; saves on TERM; hears nothing.
UPLOADS = "import sys, time; time.sleep(0.7); open(sys.argv[1], 'x')"
COMPUTES = """
import sys, time
start = time.process_time()
while time.process_time() < start + 2.5:
    pass
open(sys.argv[1], "x")
"""
SAVES = """
import signal, sys
def save(*_):
    open(sys.argv[1], "x")
    sys.exit()
signal.signal(signal.SIGTERM, save)
open(sys.argv[2], "x")
while True:
    signal.pause()
"""
SPINS = "while True: pass"


@pytest.fixture
def program(launchpad: Launchpad) -> Path:
    """A rank that leaves a process behind."""
    path = launchpad.folder / "leave.py"
    path.write_text(LEAVES)
    return path


@pytest.mark.parametrize("work", [UPLOADS, COMPUTES], ids=["uploads", "computes"])
def test_work_that_ranks_left_behind_is_not_cut_short(launchpad: Launchpad, program: Path, work: str) -> None:
    done = launchpad.run("run", "-n", 1, program, work, "done")
    assert (done.returncode, "killed" in done.stderr) == (0, False), done.stderr
    assert (launchpad.folder / "done").exists()


def test_work_is_not_cut_short_in_a_job_from_a_kept_image(from_image: Launchpad, program: Path) -> None:
    done = from_image.run("run", "-n", 1, program, UPLOADS, "done")
    assert (done.returncode, done.stderr) == (0, "")
    assert (from_image.folder / "done").exists()


def test_who_handles_term_gets_it_and_may_save(launchpad: Launchpad, program: Path) -> None:
    program.write_text(f"import os, time\n{LEAVES}\nwhile not os.path.exists('ready'):\n    time.sleep(0.01)\n")
    done = launchpad.run("run", "-n", 1, program, SAVES, "done", "ready")
    assert (done.returncode, done.stderr) == (0, "")
    assert (launchpad.folder / "done").exists()


def test_what_does_nothing_is_not_waited_for_long(launchpad: Launchpad, program: Path) -> None:
    done = launchpad.run("run", "-n", 1, "--grace", 3 * DEADLINE, program, "import signal; signal.pause()")
    assert done.returncode == 0
    assert "killed 1 process that ranks left behind" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(launchpad: Launchpad, program: Path, signum: int) -> None:
    with launchpad.start("run", "-n", 1, "--grace", 3 * DEADLINE, program, SPINS) as job:
        assert job.stderr is not None
        assert b"waiting up to 180 s for 1 process that ranks left behind" in job.stderr.readline()
        os.kill(job.pid, signum)
        assert b"killed 1 process that ranks left behind" in job.stderr.read()
        assert job.wait(DEADLINE) == 0
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)
