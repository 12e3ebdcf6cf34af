"""`launchpad run --gpus`, and `launchpad gpus`: on a machine with eight GPUs, as far as its nvidia-smi says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.gpu_leases import clashes
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.gpus import FakeGpus

pytestmark = pytest.mark.usefixtures("from_image")

SHOW = ("sh", "-c", 'echo "$LOCAL_RANK $CUDA_VISIBLE_DEVICES"')


@pytest.fixture
def gpus(launchpad: Launchpad) -> Iterator[FakeGpus]:
    folder = launchpad.folder / "smi"
    folder.mkdir()
    launchpad.environ["PATH"] = f"{folder}:{launchpad.environ['PATH']}"
    launchpad.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with contextlib.closing(FakeGpus(folder)) as made:
        yield made


def seen(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What each rank sees, in the order of their numbers."""
    assert done.returncode == 0, done.stderr
    return [line.split("] ", 1)[1].split()[-1] for line in sorted(done.stdout.splitlines())]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpus", "1,3,5"), [1, 3, 5]),
        (("--nproc", "gpu:1,3,5"), [1, 3, 5]),
        (("--nproc", "gpu:6"), [6]),
        (("--gpus", "2"), [0, 1]),
        (("--gpus", "free:2"), [4, 5]),
        (("--gpus", "free"), [4, 5, 6, 7]),
    ],
)
def test_each_rank_sees_the_chosen_gpus(
    launchpad: Launchpad, gpus: FakeGpus, options: tuple[str, ...], expected: list[int]
) -> None:
    gpus.change(0, processes=[["C", os.getpid()]])
    gpus.change(1, used=9000)
    gpus.change(2, errors=3)
    gpus.change(3, processes=[["C+G", 1 << 22]])
    gpus.change(4, processes=[["G", os.getpid()]])  # a desktop
    every = ",".join(gpus.uuids[index] for index in expected)
    assert seen(launchpad.run("run", *options, *SHOW)) == [every] * len(expected)


def test_one_gpu_each_fewer_ranks_and_slices(launchpad: Launchpad, gpus: FakeGpus) -> None:
    one, two = gpus.split(0, 2)
    gpus.change_slice(0, 0, processes=[["C", 1 << 22]])
    own = launchpad.run("run", "--gpus", "free:2", "--virtual-local-rank", *SHOW)
    assert seen(own) == [two, gpus.uuids[1]]
    assert seen(launchpad.run("run", "--gpus", f"{one},{gpus.uuids[4]}", "-n", 1, *SHOW)) == [f"{one},{gpus.uuids[4]}"]
    launchpad.environ["CUDA_VISIBLE_DEVICES"] = f"5,{gpus.uuids[2]}"
    assert seen(launchpad.run("run", "--gpus", "free", *SHOW)) == [f"{gpus.uuids[5]},{gpus.uuids[2]}"] * 2


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--gpus", "x"), 2, "'x' is no GPU; write numbers or UUIDs like 1,3,5, how many (4), free or free:4"),
        (("--gpus", "1,1"), 2, "--gpus 1,1: GPU 1 is given twice; keep one"),
        (("--gpus", "1", "--nproc", "gpu:1"), 2, "--nproc gpu:1 and --gpus 1 both choose GPUs; leave one of them out"),
        (("--gpus", "1", "-x", "CUDA_VISIBLE_DEVICES=1"), 2, "--gpus sets it for each rank; leave one of them out"),
        (("--gpus", "1,9"), 3, "there is no GPU 9 that ranks can see; there are 0, 1, 2, 3, 4, 5, 6, 7"),
        (("--gpus", "0,1"), 3, "GPU 0 is split into 2 MIG slices; name slices, like MIG-"),
        (("--gpus", "free:9"), 3, "8 of its 9 GPUs are free and 9 are wanted: GPU 3 is used by "),
        (("--gpus", "12"), 3, "9 of its 9 GPUs are not leased and 12 are wanted"),
    ],
)
def test_refusals(launchpad: Launchpad, gpus: FakeGpus, options: tuple[str, ...], code: int, words: str) -> None:
    gpus.split(0, 2)
    gpus.change(3, processes=[["C", os.getpid()]])
    done = launchpad.run("run", *options, "true")
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr


def test_a_lease_lasts_as_long_as_its_job_and_is_shown(launchpad: Launchpad, gpus: FakeGpus) -> None:
    job = launchpad.start("run", "-n", 1, "--gpus", "0,1", "sh", "-c", "echo here; read line", stdin=subprocess.PIPE)
    assert job.stdout is not None
    job.stdout.readline()
    shown = launchpad.run("gpus")
    rows = shown.stdout.splitlines()
    assert (shown.returncode, len(rows)) == (0, 9)
    assert ["since" in row for row in rows] == [False, True, True, *[False] * 6]
    assert all(uuid in row and "3/81920 MiB" in row for uuid, row in zip(gpus.uuids, rows[1:], strict=True))
    refused = launchpad.run("run", "--gpus", "1,2", "true")
    assert refused.returncode == 3
    assert "GPU 1 is leased by " in refused.stderr
    assert seen(launchpad.run("run", "--gpus", "2", *SHOW)) == [",".join(gpus.uuids[2:4])] * 2
    os.kill(job.pid, signal.SIGKILL)  # nobody tidies up
    job.wait(DEADLINE)
    wait_until(lambda: not launchpad.survivors(), "the agent, whose lease it is, to be gone", show=launchpad.survivors)
    again = launchpad.run("run", "--gpus", "1,2", "true", timeout=DEADLINE)
    assert again.returncode == 0, again.stderr
    assert "since" not in launchpad.run("gpus").stdout


def test_two_jobs_in_the_same_second_get_different_gpus(launchpad: Launchpad, gpus: FakeGpus) -> None:
    waits = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.stdin.readline()"
    words = ("run", "-n", 1, "--gpus", "free:2", sys.executable, "-c", waits)
    jobs = [launchpad.start(*words, stdin=subprocess.PIPE) for _ in range(4)]
    found: list[str] = []
    for job in jobs:
        assert job.stdout is not None
        found += job.stdout.readline().decode().split()[-1].split(",")
    assert sorted(found) == sorted(gpus.uuids)
    refused = launchpad.run("run", "--gpus", "free:2", "true")
    assert "0 of its 8 GPUs are free and 2 are wanted: GPU 0 is leased by " in refused.stderr
    for job in jobs:
        job.communicate(b"\n", timeout=DEADLINE)
        assert job.returncode == 0


def test_two_users_never_get_the_same_gpu() -> None:
    """`tests/bench/gpu_leases.py --tries 1000` tries it more often."""
    assert clashes(tries=10) == []


def test_without_nvidia_smi(launchpad: Launchpad, tmp_path: Path) -> None:
    launchpad.environ["PATH"] = str(tmp_path)
    for command in (("gpus",), ("run", "--gpus", "1", "/bin/true")):
        done = launchpad.run(*command)
        assert done.returncode == 3
        assert "there is no nvidia-smi, which knows the GPUs" in done.stderr


def test_from_python_and_a_job_file(launchpad: Launchpad, gpus: FakeGpus) -> None:
    (launchpad.folder / "calls.py").write_text(
        "import os, launchpad\n"
        "def f(): return os.environ['CUDA_VISIBLE_DEVICES']\n"
        "for one in ([1, 3], 2, 'free:3'): print(len(launchpad.run(f, gpus=one)), launchpad.run(f, gpus=one)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "calls.py"], cwd=launchpad.folder, env=launchpad.environ, capture_output=True, text=True
    )
    first, second, third = done.stdout.splitlines()
    assert first == f"2 {gpus.uuids[1]},{gpus.uuids[3]}"
    assert second == f"2 {','.join(gpus.uuids[:2])}"
    assert third == f"3 {','.join(gpus.uuids[:3])}"
    (launchpad.folder / "job.toml").write_text(
        'gpus = "free:2"\ntarget = ["sh", "-c", "echo . $CUDA_VISIBLE_DEVICES"]\n'
    )
    assert seen(launchpad.run("run", "--config", "job.toml")) == [",".join(gpus.uuids[:2])] * 2


@pytest.mark.usefixtures("gpus")
def test_a_job_that_waits_for_nvidia_smi_can_be_stopped(launchpad: Launchpad) -> None:
    """One that hangs, as with a GPU that has fallen off the bus, is killed with the job."""
    asked = launchpad.folder / "asked"
    (launchpad.folder / "smi" / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {asked}\nsleep 1000\n")
    job = launchpad.start("run", "--gpus", "1", *SHOW)
    wait_until(asked.exists, "nvidia-smi to be asked")
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=DEADLINE)
    assert (job.returncode, said) == (130, b"launchpad: stopped by SIGINT before any rank was started\n")


def test_roles_see_disjoint_ones(launchpad: Launchpad, gpus: FakeGpus) -> None:
    show = f"[{', '.join(map(repr, SHOW))}]"
    (launchpad.folder / "job.toml").write_text(
        f'[jobs.j]\ngpus = "free:6"\n[jobs.j.roles.a]\ntarget = {show}\nreplicas = 2\ngpus = 2\n'
        f"[jobs.j.roles.b]\ntarget = {show}\nnproc = 2\ngpus = 1\n"
        '[jobs.j.roles.c]\ntarget = ["sh", "-c", "echo none=$CUDA_VISIBLE_DEVICES"]\ngpus = 0\n'
    )
    gpus.change(1, processes=[["C", os.getpid()]])
    done = launchpad.run("run", "--config", "job.toml", "--job", "j")
    names = [gpus.uuids[index] for index in (0, 2, 3, 4, 5, 6)]
    assert seen(done) == [*(",".join(names[at : at + 2]) for at in (0, 2)), *[",".join(names[4:])] * 2, "none="]
    (launchpad.folder / "job.toml").write_text(f"[jobs.j]\n[jobs.j.roles.a]\ntarget = {show}\ngpus = 9\n")
    done = launchpad.run("run", "--config", "job.toml", "--job", "j")
    assert done.returncode == 2
    assert "jobs.j.roles.a, gpus: it needs 9, and " in done.stderr
