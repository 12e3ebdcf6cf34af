"""`launchpad run --backend mpi` with a real Open MPI: one MPI_COMM_WORLD by PMIx, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpi
from tests.support.netns import Network, needs_namespaces
from tests.support.run_mpi import MPI, mpi, no_memory_is_left, printed, spawns_a_program_without_mpi, sums
from tests.support.sshd import needs_sshd

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed"),
    needs_mpi,
    pytest.mark.usefixtures("from_image"),
]

ABI = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}

EXECUTED_OR_FORKED = pytest.mark.parametrize(
    "way", [pytest.param((), id="executed"), pytest.param(("--preload", "mpi4py.MPI"), id="forked")]
)


@pytest.fixture(autouse=True)
def open_mpi(launchpad: Launchpad) -> None:
    """Open MPI for mpi4py. The job's folder, which has the session folders too, is looked after by `launchpad`."""
    launchpad.environ |= ABI


@EXECUTED_OR_FORKED
@pytest.mark.parametrize("size", [1, 4])
def test_a_world(launchpad: Launchpad, size: int, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", size, *way, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(size)


def test_the_hardware_is_looked_at_once(launchpad: Launchpad) -> None:
    """The ranks have what the PMIx server found."""
    (launchpad.folder / "maps.py").write_text(
        "from mpi4py import MPI\nprint('hwloc.sm' in open('/proc/self/maps').read())\n"
    )
    assert sorted(mpi(launchpad, "-n", 2, "maps.py").stdout.splitlines()) == ["[0] True", "[1] True"]


ENDS = [
    ("abort", 5, "called MPI_Abort(5)"),
    ("raise", 1, "ValueError: no good (exit code 1"),
    ("exit", 7, "exit code 7"),
    ("leave", 1, "exited with code 0 after MPI_Init, without calling MPI_Finalize"),
    ("absent", 1, "exited with code 0 without calling MPI_Init, in which others wait for it"),
    ("kill", 137, "killed by SIGKILL"),
]


@pytest.mark.parametrize(("what", "code", "words"), ENDS)
def test_how_a_world_ends(launchpad: Launchpad, what: str, code: int, words: str) -> None:
    done = mpi(launchpad, "-n", 3, "mpi_does.py", what, 1)
    assert done.returncode == code, done.stderr
    assert f"launchpad: rank 1 failed first: {words}" in done.stderr
    assert "launchpad: stopped because of it: ranks 0, 2" in done.stderr


def test_a_rank_that_finalizes_may_exit_in_any_way(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 2, "mpi_does.py", "finalize")
    assert (done.returncode, done.stderr) == (0, "")


def test_restarts(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 2, "--max-restarts", 1, "mpi_does.py", "once", 1)
    assert done.returncode == 0, done.stderr
    assert "failed: rank 1, killed by SIGKILL" in done.stderr


def test_names_and_spawned_ranks(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 2, "mpi_does.py", "publish")
    assert (done.returncode, printed(done, "heard"), "[1] gone" in done.stdout) == (0, ["a word"], True), done.stderr
    done = mpi(launchpad, "-n", 2, "mpi_does.py", "spawn")
    assert (done.returncode, printed(done, "told")) == (0, ["33", "33"]), done.stderr
    assert printed(done, "spawned") == ["0 3 2 1", "1 3 2 1", "2 3 2 1"]
    assert re.search(r"^launchpad: rank 0 spawned ranks 2-4: .*mpi_does.py spawned -1$", done.stderr, re.M)


def test_a_failed_spawn_ends_the_job(launchpad: Launchpad) -> None:
    (launchpad.folder / "spawns.py").write_text(
        "from mpi4py import MPI\nMPI.COMM_WORLD.Spawn('no-such-program', maxprocs=1)\n"
    )
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert done.returncode == 2
    assert "launchpad: rank 1, spawned by rank 0, could not be started: can't execute no-such-program" in done.stderr


def test_a_spawned_program_without_mpi_ends_the_job(launchpad: Launchpad) -> None:
    spawns_a_program_without_mpi(launchpad)


def test_variables_for_what_is_spawned(launchpad: Launchpad) -> None:
    (launchpad.folder / "spawned.py").write_text("import os\nfrom mpi4py import MPI\nprint('got', os.environ['FOO'])\n")
    (launchpad.folder / "spawns.py").write_text(
        "import sys\nfrom mpi4py import MPI\ninfo = MPI.Info.Create()\ninfo.Set('env', 'FOO=bar')\n"
        "MPI.COMM_SELF.Spawn(sys.executable, args=['spawned.py'], maxprocs=1, info=info)\n"
    )
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert (done.returncode, printed(done, "got")) == (0, ["bar"]), done.stderr


def test_an_impossible_spawn_raises_in_its_rank(launchpad: Launchpad) -> None:
    (launchpad.folder / "spawns.py").write_text(
        "from mpi4py import MPI\n"
        "try:\n    MPI.COMM_SELF.Spawn('true', maxprocs=0)\n"
        "except MPI.Exception as error:\n    print('raised', error.Get_error_class() == MPI.ERR_SPAWN)\n"
        "print('sum', MPI.COMM_WORLD.allreduce(1))\n"
    )
    done = mpi(launchpad, "-n", 2, "spawns.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert (printed(done, "raised"), printed(done, "sum")) == (["True"] * 2, ["2"] * 2)


def test_windows_intercommunicators_files_threads_and_datatypes(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 3, "mpi_sample.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "did") == ["windows between file threads datatypes"] * 3


def test_waiting_ranks_yield_where_they_outnumber_the_cores(launchpad: Launchpad) -> None:
    (launchpad.folder / "show.py").write_text(
        "import os\nprint('has', os.environ.get('OMPI_MCA_mpi_yield_when_idle'))\n"
    )
    cores = len(os.sched_getaffinity(0))
    done = mpi(launchpad, "-n", cores + 1, "show.py")
    assert printed(done, "has") == ["1"] * (cores + 1)


def test_spawned_ranks_yield_where_all_outnumber_the_cores(launchpad: Launchpad) -> None:
    show = "import os; from mpi4py import MPI; print('has', os.environ.get('OMPI_MCA_mpi_yield_when_idle'))"
    cores = len(os.sched_getaffinity(0))
    (launchpad.folder / "spawns.py").write_text(
        f"{show}\nimport sys\nMPI.COMM_SELF.Spawn(sys.executable, ['show.py'], maxprocs={cores}).Disconnect()\n"
    )
    (launchpad.folder / "show.py").write_text(f"{show}\nMPI.Comm.Get_parent().Disconnect()\n")
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert printed(done, "has") == ["1"] * cores + ["None"], done.stderr


def test_a_dead_server_ends_the_ranks(launchpad: Launchpad) -> None:
    (launchpad.folder / "waits.py").write_text(
        "import os, signal, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    server = int(os.environ['PMIX_SERVER_URI2'].split('.')[0].split('-')[-1])\n"
        "    os.kill(server, signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    done = mpi(launchpad, "-n", 2, "waits.py")
    assert done.returncode == 1
    assert "launchpad: rank 0 failed first: lost its PMIx server, which died" in done.stderr


def test_a_killed_agent_leaves_nothing(launchpad: Launchpad) -> None:
    (launchpad.folder / "waits.py").write_text(
        "import os, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n"
        "print('agent', os.getppid(), os.environ['OMPI_MCA_btl_sm_backing_directory'], flush=True)\ntime.sleep(600)\n"
    )
    process = launchpad.start("run", *MPI, "-n", 2, "waits.py")
    assert process.stdout is not None
    agent, memory = process.stdout.readline().decode().split()[-2:]
    assert os.path.isdir(memory)
    os.kill(int(agent), signal.SIGKILL)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 4
    wait_until(lambda: not launchpad.survivors(), "the guard to exit")
    assert not os.path.exists(memory)


# Which MPI.


def test_a_program_that_calls_no_mpi_is_told(launchpad: Launchpad) -> None:
    (launchpad.folder / "nothing.py").touch()
    for options, words in (((), "of Open MPI; if"), (("--mpi", "mpich"), "of MPICH or Intel MPI; if")):
        done = mpi(launchpad, *options, "-n", 2, "nothing.py")
        assert (done.returncode, f"launchpad: no rank called MPI_Init {words}" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_mpi4py_uses_the_one_that_is_named(launchpad: Launchpad, library: str) -> None:
    """What mpi4py would load by itself is the MPICH that the tests bring, which MPI4PY_MPIABI doesn't find."""
    for name in ABI:
        del launchpad.environ[name]
    done = launchpad.run("run", "--backend", "mpi", "--mpi", library, "-n", 2, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(2)


def test_dry_run_says_which_and_why(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "--dry-run", "-n", 2, "mpi_does.py", "sum")
    assert re.search(r"Open MPI.*MPI4PY_MPIABI is openmpi", done.stdout)
    done = mpi(launchpad, "--mpi", "intel", "--dry-run", "-n", 2, "mpi_does.py", "sum")
    assert re.search(r"Intel MPI.*--mpi intel", done.stdout)


# Several hosts.


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    cluster = Hosts(launchpad, tmp_path / "ssh")
    for host in cluster.hosts:
        host.environ |= ABI
    with cluster:
        yield cluster


@needs_sshd
@pytest.mark.parametrize("slots", ["n1:2,n2:2", "n2:1,n1:3"])
def test_a_world_across_hosts(launchpad: Launchpad, hosts: Hosts, slots: str) -> None:
    done = hosts.run(launchpad, *MPI, "-H", slots, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(4)
    no_memory_is_left(done.stdout)


@needs_sshd
@pytest.mark.parametrize(("what", "code", "words"), [end for end in ENDS if end[0] in ("abort", "leave", "absent")])
def test_how_a_world_across_hosts_ends(launchpad: Launchpad, hosts: Hosts, what: str, code: int, words: str) -> None:
    done = hosts.run(launchpad, *MPI, "-H", "n1:2,n2:1", "mpi_does.py", what, 2)
    assert done.returncode == code, done.stderr
    assert f"launchpad: rank 2 on n2 failed first: {words}" in done.stderr
    no_memory_is_left(done.stdout)


@needs_sshd
def test_names_and_spawned_ranks_across_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, *MPI, "-H", "n1:1,n2:1", "mpi_does.py", "publish")
    assert (done.returncode, printed(done, "heard")) == (0, ["a word"]), done.stderr
    done = hosts.run(launchpad, *MPI, "-H", "n1:1,n2:1", "mpi_does.py", "spawn")
    assert (done.returncode, printed(done, "told")) == (0, ["33", "33"]), done.stderr


@needs_sshd
def test_hosts_with_different_mpis(launchpad: Launchpad, tmp_path: Path) -> None:
    (launchpad.folder / "waits.py").write_text("import signal\nsignal.pause()\n")
    del launchpad.environ["MPI4PY_MPIABI"]  # it would be forwarded
    hosts = Hosts(launchpad, tmp_path / "ssh")
    for host, abi in zip(hosts.hosts, ("openmpi", "mpich"), strict=False):
        host.environ["MPI4PY_MPIABI"] = abi
    with hosts:
        done = hosts.run(launchpad, *MPI, "-H", "n1:1,n2:1", "waits.py")
    assert done.returncode == 2
    assert re.search(r"rank \d on n\d failed first: uses another MPI than n\d: MPI4PY_MPIABI is", done.stderr)


@needs_namespaces
def test_hosts_with_their_own_addresses(launchpad: Launchpad, tmp_path: Path) -> None:
    with Network(tmp_path / "network", 2) as network:
        options = ("--ssh-config", network.ssh_config, *MPI, "-x", "MPI4PY_LIBMPI", "-H", "h1:2,h2:1")
        argv = network.argv(*launchpad.argv("run", *options, "mpi_does.py", "sum"))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE, env=launchpad.environ)
        assert done.returncode == 0, done.stderr
        assert printed(done, "sum") == sums(3)
