"""The interface of early torch.distributed under launchpad.collectives, as programs of that time use it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import launchpad as package

from .conftest import DEADLINE, PROGRAMS, Launchpad
from .sshd import free_port

pytest.importorskip("torch", reason="torch is not installed")

MPI = pytest.param("mpi", marks=pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed"))


def run(launchpad: Launchpad, size: int, backend: str, *words: str) -> None:
    done = launchpad.run("run", "--nproc", size, "--backend", backend, "early.py", backend, *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] done" for rank in range(size)]


@pytest.mark.parametrize("backend", ["gloo", MPI])
def test_names_lists_requests_and_multigpu(backend: str, launchpad: Launchpad) -> None:
    run(launchpad, 3, backend, "all")


@pytest.mark.parametrize("backend", ["gloo", MPI])
def test_a_function_runs_in_a_group(backend: str, launchpad: Launchpad) -> None:
    run(launchpad, 2, backend, "function")


def test_tcp_is_gloo(launchpad: Launchpad) -> None:
    run(launchpad, 2, "gloo", "tcp")


def processes(launchpad: Launchpad, *argvs: list[str], **variables: str) -> list[tuple[int, str, str]]:
    """What processes that nobody launches end with: code, output, last line of errors."""
    environ = launchpad.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])} | variables
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "early.py"), "gloo", *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in argvs
    ]
    ends = []
    for process in started:
        out, err = process.communicate(timeout=DEADLINE)
        ends.append((process.returncode, out, (err.strip().splitlines() or [""])[-1]))
    return ends


def test_processes_of_the_tutorials_meet(launchpad: Launchpad) -> None:
    """Each is told its rank and the size; where to meet is in the variables, as the tutorials set them."""
    ends = processes(
        launchpad,
        ["function", "0", "2"],
        ["function", "1", "2"],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert ends == [(0, "done\n", "")] * 2


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_are_handed_out_where_nobody_tells_them(scheme: str, launchpad: Launchpad, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    assert processes(launchpad, *[["unranked", url, "3"]] * 3) == [(0, "done\n", "")] * 3


def test_a_file_whose_ranks_are_gone_is_named(launchpad: Launchpad, tmp_path: Path) -> None:
    leave = (
        "import os, sys\nfrom torch.distributed import FileStore\n"
        "FileStore(sys.argv[1], 9).add('default_pg/launchpad/ranks', 1)\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", leave, tmp_path / "meet"], check=True, timeout=DEADLINE)
    ((code, _, error),) = processes(launchpad, ["unranked", f"file://{tmp_path}/meet", "1"])
    assert code == 1
    assert "has handed out its 1 ranks: more processes came, or an earlier job left" in error


def test_what_cannot_be_met_says_why(launchpad: Launchpad) -> None:
    ends = processes(launchpad, ["unranked", "tcp://224.1.1.1:23456", "2"], ["unranked", "tcp://127.0.0.1", "2"])
    assert "tcp://224.1.1.1:23456: ranks met by multicast before torch 1.0" in ends[0][2]
    assert "tcp://127.0.0.1 is no place to meet: tcp://HOST:PORT" in ends[1][2]
