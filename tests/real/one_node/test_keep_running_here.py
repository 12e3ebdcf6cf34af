"""--keep-running on launchpad's own machine: ranks go on when it is killed, and launchpad resume takes them over."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until

COUNTS = """\
import os, sys, time
number = 0
while not os.path.exists("go"):
    os.write(1, f"line {number} {os.getpid()}\\n".encode())
    number += 1
    time.sleep(0.005)
sys.exit(5 if os.environ["RANK"] == os.environ.get("FAILS") else 0)
"""


def numbers(text: str) -> dict[str, list[int]]:
    """What each rank has counted, in one process."""
    found: dict[str, list[int]] = {}
    pids: dict[str, set[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\[(\d)\] line (\d+) (\d+)", line)
        assert match, line
        found.setdefault(match[1], []).append(int(match[2]))
        pids.setdefault(match[1], set()).add(match[3])
    assert all(len(one) == 1 for one in pids.values())
    return found


def killed(launchpad: Launchpad, *options: object) -> str:
    """Kill a launchpad whose two ranks count. Returns the job's id."""
    (launchpad.folder / "counts.py").write_text(COUNTS)
    job = launchpad.start("run", "-n", 2, "--keep-running", "10m", *options, "counts.py", bufsize=0)
    assert job.stdout is not None
    for _ in range(20):
        assert job.stdout.readline()
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=DEADLINE)
    (name,) = os.listdir(os.path.join(launchpad.environ["XDG_STATE_HOME"], "launchpad", "jobs"))
    return name


@pytest.mark.parametrize("code", [0, 5])
def test_ranks_go_on_without_launchpad(launchpad: Launchpad, code: int) -> None:
    """One may fail meanwhile."""
    name = killed(launchpad, "-x", f"FAILS={1 if code else -1}")
    assert "without launchpad since" in launchpad.run("jobs").stdout
    if code:
        (launchpad.folder / "go").touch()
    following = launchpad.start("resume", bufsize=0, stdout=subprocess.PIPE)
    assert following.stdout is not None
    assert following.stdout.readline()
    (launchpad.folder / "go").touch()
    _, err = following.communicate(timeout=DEADLINE)
    assert following.returncode == code, err
    counted = numbers(launchpad.run("logs", name).stdout)
    assert sorted(counted) == ["0", "1"]
    assert all(one == list(range(len(one))) for one in counted.values())


def test_stop_ends_them(launchpad: Launchpad) -> None:
    name = killed(launchpad)
    stop = launchpad.run("stop")
    assert (stop.returncode, stop.stderr) == (0, f"the launchpad of job {name} is gone; ended its ranks on localhost\n")
    wait_until(lambda: not launchpad.survivors(), "the ranks to be gone")


def test_with_a_launchpad_on_every_node_it_is_refused(launchpad: Launchpad) -> None:
    run = launchpad.run("run", "--keep-running", "1h", "--nnodes", 2, "true")
    assert run.returncode == 2
    assert run.stderr.endswith("--keep-running is for a job of one launchpad, not for --nnodes 2; leave it out\n")
