"""MPI programs, and what they leave."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad

MPI = ("--backend", "mpi")


def mpi(launchpad: Launchpad, *args: object) -> subprocess.CompletedProcess[str]:
    """Run to the end, and check that no shared memory is left."""
    done = launchpad.run("run", *MPI, *args)
    no_memory_is_left(done.stdout)
    return done


def compiled(launchpad: Launchpad, name: str, text: str) -> str:
    """The path of this C program, compiled with MPICH's wrapper; skips the test where there is no compiler."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    files = importlib.metadata.files("mpich") or []
    wrapper = next(Path(str(file.locate())).resolve() for file in files if file.name == "mpicc")
    (launchpad.folder / f"{name}.c").write_text(text)
    subprocess.run([wrapper, "-O2", "-o", name, f"{name}.c"], check=True, timeout=DEADLINE, cwd=launchpad.folder)
    return f"./{name}"


def no_memory_is_left(output: str) -> None:
    named = re.findall(r"shm (.*)", output)
    names = [name for line in named for name in line.split()]
    assert not [name for name in names if os.path.exists(f"/dev/shm/{name}")]


def printed(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    """What follows a word on the ranks' lines, sorted."""
    return sorted(re.findall(rf"^\[.*\] {word} (.*)$", done.stdout, re.M))


def sums(size: int) -> list[str]:
    return sorted(f"{rank} {size} {size * (size + 1) // 2}" for rank in range(size))


def spawns_a_program_without_mpi(launchpad: Launchpad) -> None:
    """Its parent would wait for it forever."""
    (launchpad.folder / "spawns.py").write_text("from mpi4py import MPI\nMPI.COMM_SELF.Spawn('true', maxprocs=1)\n")
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert done.returncode == 1
    assert (
        "launchpad: rank 1, spawned by rank 0, failed first: exited with code 0 without calling MPI_Init" in done.stderr
    )
