"""tests/bench: that what the benches bring along still runs. No figure is judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
DEADLINE = 60.0


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=DEADLINE, cwd=BENCH)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_simulated_nodes_start_fail_and_stop() -> None:
    rows = run("scale.py", "--nodes", "2,30").splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["2", "30"]


@pytest.mark.parametrize(("part", "count"), [("join", "20"), ("lose", "200")])
def test_simulated_nodes_join_and_are_lost(part: str, count: str) -> None:
    (row,) = run("scale.py", f"--{part}", count).splitlines()[2:]
    assert row.split()[1] == count


@pytest.mark.parametrize(
    "name",
    ["launch", "ssh", "scale", "collectives", "gallery", "chaos", "goodput", "recovery", "succession", "roles"],
)
def test_a_bench_says_what_it_does(name: str) -> None:
    assert f"{name}.py" in run(f"{name}.py", "--help")


def test_stacks_and_records_are_made_and_read() -> None:
    assert "the odd one" not in run("stacks.py", "--nodes", "20")
    assert "launchpad report" in run("records.py", "--ranks", "8", "--restarts", "3")


def test_strangers_at_the_door_end_no_member() -> None:
    assert run("strangers.py", "--seconds", "1", "--silence", "30").endswith("members lost: 0 of 8\n")
