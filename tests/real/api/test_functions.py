"""`launchpad run file.py:run`: a function as the target of the command."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.runner import function_target
from launchpad.runner.spec import find_target
from tests.support.command import Launchpad
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import needs_sshd

TRAIN = """
import pickle
import sys

import torch
from launchpad import collectives as dist


class Point:
    pass


def run(rank, size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert rank == dist.get_rank() and pickle.loads(pickle.dumps(Point)) is Point
    print(rank, size, int(total), dist.get_backend(), __name__, *sys.argv)


def plain():
    print("plain", dist.get_world_size())


def defaults(rank=-1, world_size=-1, more=0):
    print("defaults", rank, world_size)


def boom(rank, size):
    if rank == 1:
        raise ValueError("batch 17 is empty")
    dist.barrier()


def again():
    dist.init_process_group("gloo")


def one(x):
    pass


def keyword(rank, size, *, lr):
    pass


async def coroutine(rank, size):
    pass


NUMBER = 3
decorated = lambda x: x
"""


@pytest.fixture(autouse=True)
def folder(launchpad: Launchpad) -> Path:
    (launchpad.folder / "train.py").write_text(TRAIN)
    return launchpad.folder


@needs_torch
@pytest.mark.parametrize("words", [("train.py:run",), ("--start-method", "exec", "train.py:run"), ("train:run",)])
@pytest.mark.usefixtures("from_image")
def test_a_function_finds_the_group_and_its_rank(launchpad: Launchpad, words: tuple[str, ...]) -> None:
    done = launchpad.run("run", "-n", "2", *words, "--lr", "1")
    name = words[-1].partition(":")[0]
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} 2 2 gloo train {name} --lr 1" for r in (0, 1)]
    assert (done.returncode, done.stderr) == (0, "")


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_the_signature_decides_what_it_is_called_with(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", "2", "-m", "train:plain")
    assert sorted(done.stdout.splitlines()) == ["[0] plain 2", "[1] plain 2"], done.stderr
    done = launchpad.run("run", "-n", "2", "--backend", "gloo", launchpad.folder / "train.py:defaults")
    assert sorted(done.stdout.splitlines()) == ["[0] defaults 0 2", "[1] defaults 1 2"], done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_function_that_returns_at_once_leaves_no_rank_still_connecting(launchpad: Launchpad) -> None:
    (launchpad.folder / "nothing.py").write_text("import torch\ndef nothing(): pass\n")
    done = launchpad.run("run", "-n", "12", "nothing.py:nothing")
    assert (done.returncode, done.stderr) == (0, "")


@needs_torch
@needs_mpi
@pytest.mark.usefixtures("from_image")
def test_a_function_on_mpi(launchpad: Launchpad) -> None:
    for method in ("fork", "exec"):
        done = launchpad.run("run", "-n", "2", "--backend", "mpi", "--start-method", method, "train.py:run")
        assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} 2 2 mpi train train.py" for r in (0, 1)], done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_failure_stops_the_others_and_shows_only_the_users_frames(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", "2", "train.py:boom")
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert "ValueError: batch 17 is empty" in done.stderr
    assert "forkserver" not in done.stderr
    done = launchpad.run("run", "-n", "1", "train.py:again")
    assert done.returncode == 1
    assert "launchpad initializes the process group before it calls the function" in done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.py:one", "train.py:one takes (x); it must take (rank, size), or nothing"),
        ("train:keyword", "train:keyword takes (rank, size, lr); it must take (rank, size), or nothing"),
        ("train.py:coroutine", "train.py:coroutine is a coroutine function; give a plain function"),
        ("train.py:nothing", "train.py has no nothing (it has run, plain, defaults, boom, again, one, keyword, "),
        ("other.py:run", "no such script: other.py"),
    ],
)
def test_a_wrong_function_is_refused_before_anything_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError) as error:
        find_target([word], module=False, no_python=False)
    assert str(error.value).startswith(message)


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_errors_that_only_the_ranks_can_find_are_one_sentence_too(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-q", "train.py:NUMBER")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "[0] launchpad: error: train.py:NUMBER can't be called: it is of type int",
    )
    done = launchpad.run("run", "-q", "train.py:decorated")
    assert done.returncode == 2
    assert "train.py:decorated takes (x)" in done.stderr
    done = launchpad.run("run", "-q", "--backend", "nccl", "train.py:run")
    assert done.returncode in (0, 2)  # 0 where there is a GPU
    assert "Traceback" not in done.stderr


def test_names_with_colons_that_are_not_functions(
    launchpad: Launchpad, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py:run").write_text("#!/bin/sh\necho a program\n")
    (folder / "train.py:run").chmod(0o755)
    (folder / "plain:file").write_text("print('a file')")
    (folder / "a:b.py").write_text("print('a script')")
    assert launchpad.run("run", "./train.py:run").stdout == "[0] a program\n"
    assert launchpad.run("run", "a:b.py").stdout == "[0] a script\n"
    assert launchpad.run("run", "--run-path", "plain:file").stdout == "[0] a file\n"
    monkeypatch.chdir(folder)
    assert find_target(["train.py:plain"], module=False, no_python=False).kind == "function"
    for word in ("C:\\x", "a:", ":b", "a b:c", "http://x:y"):
        assert function_target.split(word) is None or "/" in word
    with pytest.raises(UsageError, match=r"-m train\.py:run"):
        find_target(["train.py:run"], module=True, no_python=False)


def test_dry_run_shows_the_function(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", "2", "--dry-run", "--json", "train.py:run", "x")
    plan = json.loads(done.stdout)
    assert plan["preload"] == ["torch", "torch.distributed"]
    assert plan["nodes"][0]["ranks"][1]["argv"][1:] == ["-u", "train.py:run", "x"]


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
@needs_torch
def test_over_hosts_without_launchpad(launchpad: Launchpad, hosts: Hosts) -> None:
    """Simulated by a Python that does not see the installed one; in a copy of the folder."""
    site = Path(importlib.util.find_spec("torch").origin).parents[1]
    paths = launchpad.folder / "paths"
    paths.mkdir()
    for entry in site.iterdir():
        if "launchpad" not in entry.name and entry.name != "cloudpickle":
            (paths / entry.name).symlink_to(entry)
    python = launchpad.folder / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={paths}\nexec {Path("/proc/self/exe").readlink()} "$@"\n')
    python.chmod(0o755)
    for method, names, size in (("fork", "n1:1,n2:2", 3), ("exec", "n1:1,n2:1", 2)):
        words = ["--hosts", names, "--python", python, "--start-method", method, "train.py:run"]
        done = hosts.run(launchpad, *words, timeout=120)
        shown = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
        assert shown == [f"{r} {size} {size} gloo train train.py" for r in range(size)], done.stderr
