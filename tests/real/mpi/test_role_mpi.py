"""Roles that are MPI programs: each world is an MPI_COMM_WORLD of its own, with MPICH and with Open MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchpad as lp
from launchpad import Role
from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpi, needs_mpich, needs_torch
from tests.support.run_mpi import no_memory_is_left, printed
from tests.support.sshd import needs_sshd

pytestmark = pytest.mark.usefixtures("from_image")

OPEN_MPI = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}

needs_open_mpi = pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed")

LIBRARIES = pytest.mark.parametrize(
    "mpi",
    [
        pytest.param({}, id="mpich", marks=needs_mpich),
        pytest.param(OPEN_MPI, id="openmpi", marks=[needs_open_mpi, needs_mpi]),
    ],
    indirect=True,
)


@pytest.fixture
def mpi(request: pytest.FixtureRequest, launchpad: Launchpad) -> None:
    """The MPI that mpi4py loads."""
    launchpad.environ |= request.param


@pytest.fixture(autouse=True)
def program(launchpad: Launchpad) -> None:
    """A file of jobs names it."""
    shutil.copy(PROGRAMS / "mpi_does.py", launchpad.folder)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    cluster = Hosts(launchpad, tmp_path / "ssh")
    for host in cluster.hosts:
        host.environ |= request.node.callspec.params["mpi"]
    with cluster:
        yield cluster


def role(name: str, *words: object, more: str = "nproc = 2", backend: str = "mpi") -> str:
    target = ", ".join(f'"{word}"' for word in words)
    return f'[jobs.j.roles.{name}]\ntarget = [{target}]\nbackend = "{backend}"\n{more}\n'


def run(launchpad: Launchpad, *roles: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the job to its end, and check that no shared memory is left."""
    (launchpad.folder / "job.toml").write_text(before + "".join(roles))
    done = launchpad.run("run", "--config", "job.toml", "--job", "j")
    no_memory_is_left(done.stdout)
    return done


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_each_world_is_one_of_its_own(launchpad: Launchpad) -> None:
    """Replicas too; a role without MPI beside them is told nothing of it."""
    done = run(
        launchpad,
        role("a", "mpi_does.py", "sum", more="nproc = 2\nreplicas = 2"),
        role("b", "mpi_does.py", "sum", more="nproc = 3"),
        role("c", "sh", "-c", "echo has $PMI_RANK $PMIX_RANK $OMPI_COMM_WORLD_SIZE", more="", backend="gloo"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    own = {"a.0": 2, "a.1": 2, "b": 3}
    found = sorted(re.findall(r"^\[(\S+) +\d+\] sum (.*)$", done.stdout, re.M))
    assert found == sorted(
        (name, f"{rank} {size} {size * (size + 1) // 2}") for name, size in own.items() for rank in range(size)
    )
    assert "[c   0] has" in done.stdout.splitlines()
    shown = re.findall(r"^\[(\S+) +0\] shm (\S+)", done.stdout, re.M)
    assert len({memory for _, memory in shown}) == 3


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_worlds_share_no_names_and_spawn_each_for_itself(launchpad: Launchpad) -> None:
    """Both publish and look up the same name."""
    done = run(launchpad, *(role(name, "mpi_does.py", "publish") for name in "ab"))
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "heard") == ["a word", "a word"]
    done = run(launchpad, *(role(name, "mpi_does.py", "spawn") for name in "ab"))
    assert done.returncode == 0, done.stderr
    assert printed(done, "told") == ["33"] * 4
    assert printed(done, "spawned") == sorted(["0 3 2 1", "1 3 2 1", "2 3 2 1"] * 2)
    assert sorted(launchpad.run("logs").stdout.splitlines()) == sorted(done.stdout.splitlines())
    assert launchpad.run("report", "-o", "report.html").returncode == 0
    of_a = [line for line in done.stdout.splitlines() if line.startswith("[a")]
    assert sorted(launchpad.run("logs", "--role", "a").stdout.splitlines()) == sorted(of_a)
    spawned = {name: set(re.findall(rf"^\[{name} (\d)\] spawned", done.stdout, re.M)) for name in "ab"}
    assert set(map(frozenset, spawned.values())) == {frozenset("456"), frozenset("789")}
    assert sorted(re.findall(r"^launchpad: (. rank 0 spawned ranks \S+):", done.stderr, re.M)) in (
        ["a rank 0 spawned ranks 4-6", "b rank 0 spawned ranks 7-9"],
        ["a rank 0 spawned ranks 7-9", "b rank 0 spawned ranks 4-6"],
    )


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_a_world_starts_again_alone(launchpad: Launchpad) -> None:
    """Its ranks meet in a new one, while the other world, which waits for it, runs on."""
    (launchpad.folder / "waits.py").write_text(
        "import os, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\ndeadline = time.monotonic() + 60\n"
        "while not world.bcast(os.path.exists('again')):\n    assert time.monotonic() < deadline\n"
        "    time.sleep(0.01)\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    (launchpad.folder / "once.py").write_text(
        "import os, signal\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.barrier()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL if world.rank else 0)\n    world.barrier()\n"
        "print('sum', world.allreduce(1))\nopen('again', 'w').close()\n"
    )
    done = run(launchpad, role("a", "waits.py"), role("b", "once.py", more="nproc = 2\nmax-restarts = 1"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] start 0", "[a 1] start 0", "[b 0] sum 2", "[b 1] sum 2"]
    assert "failed: b rank 1, killed by SIGKILL" in done.stderr


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_a_world_whose_spawned_rank_fails_starts_again(launchpad: Launchpad) -> None:
    (launchpad.folder / "spawns.py").write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1':\n    print('again')\n    sys.exit()\n"
        "MPI.COMM_WORLD.Spawn(sys.executable, args=['dies.py'], maxprocs=1).Barrier()\n"
    )
    (launchpad.folder / "dies.py").write_text("from mpi4py import MPI\nMPI.Comm.Get_parent()\nraise ValueError('no')\n")
    done = run(launchpad, role("a", "true", more=""), role("b", "spawns.py", more="nproc = 2\nmax-restarts = 1"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[b 0] again", "[b 1] again"]
    assert "failed: b rank 3, spawned by b rank 0, ValueError: no" in done.stderr
    assert "no rank of a called MPI_Init" in done.stderr


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_a_service_of_mpi_ends_with_what_it_has_spawned(launchpad: Launchpad) -> None:
    (launchpad.folder / "serves.py").write_text(
        "import sys, time\nfrom mpi4py import MPI\n"
        "if MPI.Comm.Get_parent() == MPI.COMM_NULL:\n"
        "    MPI.COMM_WORLD.Spawn(sys.executable, args=['serves.py'], maxprocs=1)\n"
        "else:\n    print('up', flush=True)\ntime.sleep(1000)\n"
    )
    (launchpad.folder / "waits.py").write_text("import os\nwhile not os.path.exists('up'):\n    os.sched_yield()\n")
    (launchpad.folder / "job.toml").write_text(
        role("serve", "serves.py", more="service = true") + role("work", "waits.py", more="", backend="gloo")
    )
    seen = launchpad.folder / "out"
    with seen.open("wb") as out:
        job = launchpad.start("run", "--config", "job.toml", "--job", "j", stdout=out)
        wait_until(lambda: b"up" in seen.read_bytes(), "the spawned rank to run")
        (launchpad.folder / "up").touch()
        _, said = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0, said


@LIBRARIES
@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize("answer", ["exits", "spawns"])
def test_what_a_service_of_mpi_does_when_it_is_stopped_does_not_count(launchpad: Launchpad, answer: str) -> None:
    """It exits with 0 without MPI_Finalize, or spawns what would run on."""
    (launchpad.folder / "serves.py").write_text(
        "import os, signal, sys\nfrom mpi4py import MPI\n"
        "def exits(*_):\n    os._exit(0)\n"
        "def spawns(*_):\n    MPI.COMM_SELF.Spawn('sleep', args=['1000'], maxprocs=1)\n"
        "signal.signal(signal.SIGTERM, globals()[sys.argv[1]])\nprint('up', flush=True)\n"
        "while True:\n    signal.pause()\n"
    )
    more = 'service = true\nready = "line:up"\ngrace = "1s"\n'
    done = run(
        launchpad,
        role("serve", "serves.py", answer, more=more),
        role("work", "true", more='after = "serve"', backend="gloo"),
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr


@LIBRARIES
@pytest.mark.usefixtures("mpi")
def test_who_is_to_blame_in_a_world(launchpad: Launchpad) -> None:
    done = run(launchpad, role("a", "mpi_does.py", "sum"), role("b", "mpi_does.py", "abort", 1))
    assert done.returncode == 5
    assert "launchpad: b rank 1 failed first: called MPI_Abort(5)" in done.stderr
    done = run(launchpad, role("a", "mpi_does.py", "sum"), role("b", "mpi_does.py", "absent", 1))
    assert done.returncode == 1
    assert "launchpad: b rank 1 failed first: exited with code 0 without calling MPI_Init" in done.stderr


@needs_mpich
def test_an_mpi_that_is_named_is_for_the_roles_that_use_mpi(launchpad: Launchpad) -> None:
    show = role("a", "mpi_does.py", "sum"), role("b", "true", more="", backend="gloo")
    (launchpad.folder / "job.toml").write_text('[jobs.j]\nmpi = "mpich"\n' + "".join(show))
    done = launchpad.run("run", "--config", "job.toml", "--job", "j", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("MPI: a: MPICH: --mpi mpich\nrole a: ")
    done = run(launchpad, role("b", "true", more='mpi = "mpich"', backend="gloo"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "jobs.j.roles.b: --mpi mpich says which MPI makes the ranks' world; add --backend mpi" in done.stderr


@needs_mpich
@needs_torch
def test_functions(launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    def total() -> tuple[int, int]:
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank())

    monkeypatch.chdir(launchpad.folder)
    found = lp.run(
        {
            "a": Role(total, nproc=2, backend="mpi"),
            "b": Role(total, nproc=3, backend="mpi"),
            "c": Role(os.getpid, backend=None),
        },
        mpi="mpich",
    )
    assert (found["a"], found["b"]) == (((2, 1),) * 2, ((3, 3),) * 3)


@LIBRARIES
@needs_sshd
@pytest.mark.usefixtures("mpi")
def test_worlds_over_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    """Two that share both hosts, one of which starts again."""
    (launchpad.folder / "job.toml").write_text(
        '[jobs.j]\nhosts = "n1:3,n2:2"\nbackend = "mpi"\n'
        '[jobs.j.roles.a]\ntarget = ["mpi_does.py", "sum"]\nhosts = ["n1:2", "n2:2"]\n'
        '[jobs.j.roles.b]\ntarget = ["mpi_does.py", "once", "3"]\nnproc = 4\nmax-restarts = 1\n'
    )
    done = hosts.run(launchpad, "--config", "job.toml", "--job", "j")
    assert done.returncode == 0, done.stderr
    assert printed(done, "sum") == sorted(f"{rank} 4 10" for rank in range(4))
    assert "failed: b rank 3 on n2, killed by SIGKILL" in done.stderr
    no_memory_is_left(done.stdout)
