"""Several programs in one world, as mpirun writes them: a.py : -n 4 b.py."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.command import Launchpad
from tests.support.needs import needs_torch

pytestmark = pytest.mark.usefixtures("from_image")

SHOW = (
    "import os, sys\n"
    "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LR'.split()\n"
    "print(*(os.environ.get(name, '-') for name in names), os.path.basename(os.getcwd()), *sys.argv[1:])\n"
)


@pytest.fixture(autouse=True)
def _scripts(launchpad: Launchpad) -> None:
    for name in ("server.py", "worker.py"):
        (launchpad.folder / name).write_text(SHOW)
    (launchpad.folder / "sub").mkdir()
    (launchpad.folder / "sub" / "there.py").write_text(SHOW)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def test_each_has_its_own_count_variables_folder_and_arguments(launchpad: Launchpad) -> None:
    (launchpad.folder / "more.env").write_text("LR=7\n")
    here = launchpad.folder.name
    done = launchpad.run(
        *("run", "-n", 1, "server.py", "--port", 0, ":", "-n", 2, "-x", "LR=0.1", "worker.py", "a"),
        *(":", "--wdir", "sub", "--env-file", "more.env", "there.py"),
    )
    assert lines(done) == [
        f"[server.py 0] 0 0 4 4 - {here} --port 0",
        "[there.py  3] 3 3 4 4 7 sub",
        f"[worker.py 1] 1 1 4 4 0.1 {here} a",
        f"[worker.py 2] 2 2 4 4 0.1 {here} a",
    ]


def test_a_shell_keeps_a_colon_of_a_program(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "sh", "-c", "echo a : b", ":", "server.py", "x:y")
    assert lines(done) == [f"[server.py 1] 1 1 2 2 - {launchpad.folder.name} x:y", "[sh        0] a : b"]


def test_the_verdict_and_the_record_name_program_and_rank(launchpad: Launchpad) -> None:
    (launchpad.folder / "worker.py").write_text("raise SystemExit(3)\n")
    (launchpad.folder / "server.py").write_text("import signal\nsignal.pause()\n")
    done = launchpad.run("run", "server.py", ":", "worker.py", "--lr", 1)
    assert done.returncode == 3
    assert "launchpad: rank 1 (worker.py) failed first: exit code 3" in done.stderr
    (row,) = json.loads(launchpad.run("jobs", "--json").stdout)
    assert row["words"] == ["server.py", ":", "worker.py", "--lr", "1"]
    assert "rank 1 (worker.py) failed first" in launchpad.run("why").stdout


def test_later_commands_show_the_programs_too(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "server.py", ":", "worker.py")
    assert sorted(launchpad.run("logs").stdout.splitlines()) == lines(done)


def test_a_dry_run_shows_them(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--dry-run", "server.py", "--port", 0, ":", "-n", 2, "-x", "LR=secret", "worker.py")
    assert done.stdout.startswith("program 0: server.py --port 0 (rank 0)\nprogram 1: worker.py (ranks 1-2)\n")
    assert "LR=***" in done.stdout
    assert "secret" not in done.stdout


@needs_torch
def test_torch_programs_form_one_group(launchpad: Launchpad) -> None:
    """One of them is forked, the other has a variable that torch reads when it is imported."""
    text = (
        "import os, sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(1)\n"
        "dist.all_reduce(ones)\nprint(int(ones), os.environ.get('OMP_NUM_THREADS'))\ndist.destroy_process_group()\n"
    )
    for name in ("one.py", "two.py"):
        (launchpad.folder / name).write_text(text)
    done = launchpad.run("run", "one.py", ":", "-x", "OMP_NUM_THREADS=3", "two.py")
    assert lines(done) == ["[one.py 0] 2 1", "[two.py 1] 2 3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["server.py", ":"], "a ':' separates two programs, and one is missing next to it"),
        (["server.py", ":", ":", "worker.py"], "a ':' separates two programs, and one is missing next to it"),
        (["server.py", ":", "-n", "2"], "nothing to run after ':' -n 2"),
        (["server.py", ":", "--timeout", "3", "worker.py"], "--timeout is the whole job's"),
        (["server.py", ":", "-n", "gpu", "worker.py"], "-n gpu: several programs are numbered before they start"),
        (["server.py", ":", "gone.py"], "no such script: gone.py"),
        (["server.py", ":", "--wdir", "gone", "worker.py"], "/gone: No such file or directory"),
        (["server.py", ":", "-x", "RANK=3", "worker.py"], "--env RANK: launchpad sets RANK for each rank"),
        (["--nnodes", "2", "--rdzv-endpoint", "a", "server.py", ":", "worker.py"], "--nnodes and --node-rank are for"),
        (["--nnodes", "1", "--spares", "1", "server.py", ":", "worker.py"], "--spares 1: each program has hosts"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(launchpad: Launchpad, words: list[str], said: str) -> None:
    done = launchpad.run("run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
