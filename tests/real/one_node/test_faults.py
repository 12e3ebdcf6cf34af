"""--inject: jobs that recover from each fault."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.support.command import Launchpad

pytestmark = pytest.mark.usefixtures("from_image")

# Jobs.

RECOVERS = """
import os, signal, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
while attempt not in sys.argv[1:]:
    signal.pause()
"""


@pytest.fixture
def recovers(launchpad: Launchpad) -> Path:
    """A program whose ranks stay, unless the number of the attempt is an argument."""
    path = launchpad.folder / "recovers.py"
    path.write_text(RECOVERS)
    return path


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_a_job_recovers_from_each_fault(launchpad: Launchpad, recovers: Path, way: tuple[str, str]) -> None:
    """The second one waits for the rank's next attempt."""
    faults = "kill:1@0,kill:1@0"
    done = launchpad.run("run", "-n", 2, *way, "--max-restarts", 2, "--inject", faults, recovers, 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[-1] == "[1] attempt 2"
    failed = "launchpad: failed: rank 1, killed by SIGKILL (Killed), by --inject, after T; restarting all ranks"
    notes = [re.sub(r"\d+\.\d\d s", "T", line) for line in done.stderr.splitlines()]
    assert notes == [
        *("launchpad: injected: SIGKILL to rank 1", f"{failed} (restart 1 of 2)"),
        *("launchpad: injected: SIGKILL to rank 1", f"{failed} (restart 2 of 2)"),
    ]


def test_a_rank_may_get_term(launchpad: Launchpad, recovers: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--max-restarts", 1, "--inject", "term:0@1", recovers, 1)
    assert done.returncode == 0, done.stderr
    assert "launchpad: failed: rank 0, killed by SIGTERM (Terminated), by --inject, after " in done.stderr


def test_the_verdict_says_what_was_injected(launchpad: Launchpad, recovers: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--inject", "kill:1@1,kill:0@9m", recovers)
    assert done.returncode == 137
    assert "launchpad: not injected: kill:0@540s; the job ended first\n" in done.stderr
    why = launchpad.run("why").stdout.splitlines()
    assert why[1].startswith("rank 1 failed first: killed by SIGKILL (Killed), by --inject (pid ")
    assert re.fullmatch(r"injected: SIGKILL to rank 1 \(\d\d:\d\d:\d\d\)", why[2])
    verdict = json.loads(launchpad.run("why", "--json").stdout)
    assert verdict["injected"] == ["SIGKILL to rank 1"]


def test_a_stopped_rank_is_a_hang(launchpad: Launchpad) -> None:
    script = launchpad.folder / "talks.py"
    script.write_text(
        "import os, time\nwhile True:\n    time.sleep(0.05)\n    print(end='.' * int(os.environ['RANK']))\n"
    )
    options = ("--stall-timeout", 2, "--grace", 0, "--inject", "stop:1@2")
    done = launchpad.run("run", "-n", 2, *options, script)
    assert done.returncode == 124, done.stderr
    assert "launchpad:   rank 1 is stopped by a signal" in done.stderr
    assert "launchpad: injected: SIGSTOP to rank 1 (" in done.stderr


def test_the_host_itself_may_be_killed(launchpad: Launchpad, recovers: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--inject", f"kill:host={socket.gethostname()}@0", recovers)
    assert done.returncode == 4, done.stderr
    assert f"launchpad: injected: SIGKILL to the agent on {socket.gethostname()}\n" in done.stderr
    assert "launchpad: the job's node was lost: the agent was killed by signal 9" in done.stderr


def test_random_kills_can_be_repeated(launchpad: Launchpad, recovers: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--inject", "random:20/1s:3", recovers)
    assert done.returncode == 137, done.stderr
    assert done.stderr.startswith("launchpad: ranks are killed at random (--inject random:20/1s:3)\n")
    again = launchpad.run("run", "-n", 2, "--inject", "random:20/1s", recovers)
    assert re.match(r"launchpad: ranks are killed at random \(--inject random:20/1s:\d+\)\n", again.stderr)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill:2@1", "--inject kill:2@1s: the job has no rank 2; it has ranks 0 to 1"),
        ("kill:host=b@1", "--inject kill:host=b@1s: the job has no host b; it has "),
        (f"cut:host={socket.gethostname()}@1", f"--inject cut:host={socket.gethostname()}@1s: nobody would notice"),
        ("boom:2@1", "--inject boom:2@1: 'boom' is not a fault"),
    ],
)
def test_bad_faults_end_with_2_before_anything_starts(launchpad: Launchpad, text: str, message: str) -> None:
    done = launchpad.run("run", "-n", 2, "--inject", text, "touch", "started")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"launchpad: error: {message}")
    assert not (launchpad.folder / "started").exists()
