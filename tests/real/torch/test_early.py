"""The API of early torch.distributed in launchpad.collectives, used the way programs of that time use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import launchpad as package
from tests.support.command import DEADLINE, PROGRAMS, Launchpad
from tests.support.needs import needs_mpi, needs_torch
from tests.support.ports import free_port

pytestmark = needs_torch

MPI = pytest.param("mpi", marks=needs_mpi)

# A process for each list of words, all forked from one that has imported torch, as that takes a second or two.
FORKS = """
import json, os, runpy, sys
import torch.distributed
from launchpad import collectives
pids = []
for number, words in enumerate(json.loads(sys.argv[2])):
    pids.append(os.fork())
    if pids[-1] == 0:
        for fd in (1, 2):
            os.dup2(os.open(f"{number}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
        sys.argv = [sys.argv[1], *words]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""


def run(launchpad: Launchpad, size: int, backend: str, *words: str) -> None:
    done = launchpad.run("run", "--nproc", size, "--backend", backend, "early.py", backend, *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] done" for rank in range(size)]


@pytest.mark.usefixtures("from_image")
@pytest.mark.parametrize("backend", ["gloo", MPI])
def test_names_lists_requests_and_multigpu(backend: str, launchpad: Launchpad) -> None:
    run(launchpad, 3, backend, "all")


@pytest.mark.usefixtures("from_image")
@pytest.mark.parametrize("backend", ["gloo", MPI])
def test_a_function_runs_in_a_group(backend: str, launchpad: Launchpad) -> None:
    run(launchpad, 2, backend, "function")


@pytest.mark.usefixtures("from_image")
def test_tcp_is_gloo(launchpad: Launchpad) -> None:
    run(launchpad, 2, "gloo", "tcp")


def processes(launchpad: Launchpad, *argvs: list[str], **variables: str) -> list[tuple[int, str, str]]:
    """Start processes without a launcher; for each, its exit code, output and last line on stderr."""
    environ = launchpad.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])} | variables
    words = json.dumps([["gloo", *words] for words in argvs])
    done = subprocess.run(
        [sys.executable, "-c", FORKS, PROGRAMS / "early.py", words],
        env=environ,
        cwd=launchpad.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    ends = []
    for number, code in enumerate(json.loads(done.stdout)):
        out, err = ((launchpad.folder / f"{number}.{fd}").read_text() for fd in (1, 2))
        ends.append((code, out, (err.strip().splitlines() or [""])[-1]))
    return ends


def test_the_tutorials_processes_find_each_other(launchpad: Launchpad) -> None:
    """Each is given its rank and the world size; the address is in the variables that the tutorials set."""
    ends = processes(
        launchpad,
        ["function", "0", "2"],
        ["function", "1", "2"],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert ends == [(0, "done\n", "")] * 2


def test_ranks_are_assigned_if_nobody_sets_them(launchpad: Launchpad, tmp_path: Path) -> None:
    urls = (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/meet")
    assert processes(launchpad, *[["unranked", url, "3"] for url in urls] * 3) == [(0, "done\n", "")] * 6


def test_unusable_addresses_say_why(launchpad: Launchpad, tmp_path: Path) -> None:
    leave = (
        "import os, sys\nfrom torch.distributed import FileStore\n"
        "FileStore(sys.argv[1], 9).add('default_pg/launchpad/ranks', 1)\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", leave, tmp_path / "meet"], check=True, timeout=DEADLINE)
    stale, multicast, no_port = processes(
        launchpad,
        ["unranked", f"file://{tmp_path}/meet", "1"],
        ["unranked", "tcp://224.1.1.1:23456", "2"],
        ["unranked", "tcp://127.0.0.1", "2"],
    )
    assert [code for code, _, _ in (stale, multicast, no_port)] == [1] * 3
    assert "all 1 ranks are taken: too many processes were started, or" in stale[2]
    assert "is left over from an earlier job: remove it" in stale[2]
    assert "tcp://224.1.1.1:23456: torch 1.0 removed multicast" in multicast[2]
    assert "tcp://127.0.0.1 has no host or no port: use tcp://HOST:PORT" in no_port[2]
