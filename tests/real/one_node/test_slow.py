"""Which rank the others wait for: in jobs in which one is slow."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from launchpad.agent.host import hindrances
from launchpad.agent.host.hindrances import HindranceReader, of_host
from launchpad.diagnosis.stragglers import Straggler
from tests.support.command import Launchpad
from tests.support.hosts import Hosts
from tests.support.hosts import hosts as hosts
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import needs_sshd

# Why.


def test_the_figures_of_a_process() -> None:
    """It is read without complaint; what this kernel does not tell is -1."""
    reader = HindranceReader()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        figures = reader.read({process.pid: [process.pid]})[process.pid]
        process.communicate(b"\n")
    assert len(figures) == 5
    assert all(figure >= -1 for figure in figures)
    assert figures[2] >= 0
    host = of_host()
    assert host["cores"] >= 1
    assert host["busy"] > 0
    assert reader.read({process.pid: [process.pid]}) == {process.pid: (0, -1, -1, -1, -1)}  # it is gone


THREADS = """
import threading
end = threading.Event()
for _ in range(30):
    threading.Thread(target=end.wait).start()
print("ready", flush=True)
input()
end.set()
"""


def test_the_threads_that_are_looked_at_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has its share of them, the oldest. How long one has waited counts only from when it is seen."""
    reader = HindranceReader()
    with contextlib.ExitStack() as stack:
        popen = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes = [stack.enter_context(popen([sys.executable, "-c", THREADS])) for _ in range(3)]
        for process in processes:
            assert process.stdout.readline() == b"ready\n"
        trees = {process.pid: [process.pid] for process in processes}
        for limit, each in ((12, 4), (1000, 31), (2, 1)):
            monkeypatch.setattr(hindrances, "_MOST_THREADS", limit)
            figures = reader.read(trees)
            assert [len([one for one in reader._threads if one[0] == pid]) for pid in trees] == [each] * 3
            assert all((pid, str(pid)) in reader._threads for pid in trees)
            if limit == 12:
                assert [figure[0] for figure in figures.values()] == [0.0] * 3
        for process in processes:
            process.communicate(b"\n")


# Real jobs.

# Seconds. On a busy machine each rank is late now and then: mostly by tens of milliseconds, seldom by one second.
LONG_STEP, LONG_RUN = 0.15, 8


def why(launchpad: Launchpad) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(launchpad.run("why", "--json").stdout)
    return found


WAYS = [
    pytest.param(["--start-method", "fork"], marks=needs_torch, id="forked"),
    pytest.param(["--backend", "mpi", "--start-method", "exec"], marks=needs_mpi, id="mpi, executed"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("from_image")
def test_a_slow_rank_is_named_at_the_end_and_by_why(launchpad: Launchpad, way: list[str]) -> None:
    done = launchpad.run("run", "-n", 2, *way, "slowed.py", "double", LONG_RUN, LONG_STEP)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "is the last" in line]
    assert said.startswith("launchpad: rank 1 is the last to enter ")
    told = why(launchpad)
    assert said == f"launchpad: {told['text'][-1]}"
    assert told["slow"].keys() == set(Straggler._fields)
    assert told["slow"]["ranks"] == [1]
    launchpad.run("report", "-o", "page.html")
    assert "rank 1 is the last to enter" in (launchpad.folder / "page.html").read_text()


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_no_advice_is_given_where_none_is_wanted(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--no-advice", "slowed.py", "double", LONG_RUN, LONG_STEP)
    assert (done.returncode, done.stderr) == (0, "")
    assert why(launchpad)["slow"]["ranks"] == [1]


@needs_torch
@needs_sshd
def test_the_slow_host_is_named(launchpad: Launchpad, hosts: Hosts) -> None:
    options = ("--hosts", "n1:2,n2:2", "--sample", "0.5")
    done = hosts.run(launchpad, *options, "slowed.py", "second_host", LONG_RUN, LONG_STEP)
    assert done.returncode == 0, done.stderr
    assert "launchpad: ranks 2-3 (host n2) are the last to enter " in done.stderr
    (events,) = launchpad.state.glob("launchpad/jobs/*/events.jsonl")
    assert events.read_text().count("ArrivalsCompared") > 1  # not only at the end
