"""`launchpad run --backend mpi` with a real MPICH: one MPI_COMM_WORLD on one or several nodes, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpich, needs_torch
from tests.support.netns import Network, needs_namespaces
from tests.support.run_mpi import MPI, compiled, mpi, no_memory_is_left, printed, spawns_a_program_without_mpi, sums
from tests.support.sshd import needs_sshd

pytestmark = [needs_mpich, pytest.mark.usefixtures("from_image")]

# How the ranks are started: each on its own, or forked from a process that has imported something.
EXECUTED, FORKED, WITH_MPI = (), ("--preload", "mpi4py"), ("--preload", "mpi4py.MPI")
EXECUTED_OR_FORKED = pytest.mark.parametrize("way", [EXECUTED, FORKED], ids=["executed", "forked"])


@pytest.mark.parametrize(
    ("size", "way"),
    [(1, EXECUTED), (1, WITH_MPI), (4, EXECUTED), (4, FORKED), (4, WITH_MPI), (16, EXECUTED), (16, FORKED)],
)
def test_a_world(launchpad: Launchpad, size: int, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", size, *way, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(size)


@needs_torch
def test_a_world_of_ranks_that_import_torch(launchpad: Launchpad) -> None:
    (launchpad.folder / "both.py").write_text(
        "import torch\nfrom mpi4py import MPI\nones = torch.ones(3)\n"
        "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, ones.numpy())\nprint('sum', ones.tolist())\n"
    )
    done = mpi(launchpad, "-n", 3, "both.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == ["[3.0, 3.0, 3.0]"] * 3


@EXECUTED_OR_FORKED
def test_ranks_share_a_session_in_which_they_can_yield_to_each_other(
    launchpad: Launchpad, way: tuple[str, ...]
) -> None:
    (launchpad.folder / "show.py").write_text("import os\nprint('has', os.getsid(0), os.getpgrp() == os.getpid())\n")
    first, second = printed(mpi(launchpad, "-n", 2, *way, "show.py"), "has")
    assert first == second
    assert re.fullmatch(r"\d+ True", first)
    assert first != f"{os.getsid(0)} True"


def test_a_program_that_is_not_a_python_script(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 2, "--no-python", sys.executable, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(2)


def test_a_module_and_its_place_on_the_path(launchpad: Launchpad) -> None:
    (launchpad.folder / "beside.py").write_text("from mpi4py import MPI\nsize = MPI.COMM_WORLD.Get_size()\n")
    (launchpad.folder / "main.py").write_text(
        "import sys, beside\nprint('found', beside.size, sys.argv[1:], sys.orig_argv[1:3], __name__)\n"
    )
    assert printed(mpi(launchpad, "-n", 2, "-m", "main", "x"), "found") == ["2 ['x'] ['-u', '-m'] __main__"] * 2
    assert printed(mpi(launchpad, "-n", 2, "main.py", "x"), "found") == ["2 ['x'] ['-u', 'main.py'] __main__"] * 2


def test_two_programs_in_a_row(launchpad: Launchpad) -> None:
    program = launchpad.folder / "twice.sh"
    program.write_text(f"#!/bin/sh\nset -e\nfor one in 1 2; do {sys.executable} $1 sum; done\n")
    program.chmod(0o755)
    done = mpi(launchpad, "-n", 2, "./twice.sh", "mpi_does.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sorted(sums(2) * 2)


def test_windows_intercommunicators_files_threads_and_datatypes(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 3, "mpi_sample.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "did") == ["windows between file threads datatypes"] * 3


def test_the_variables_that_scripts_for_other_launchers_read(launchpad: Launchpad) -> None:
    (launchpad.folder / "show.py").write_text(
        "import os\nnames = 'RANK WORLD_SIZE PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS OMPI_COMM_WORLD_RANK "
        "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_NODE_RANK "
        "LAUNCHPAD_BACKEND'\nprint('has', *(os.environ[name] for name in names.split()))\n"
    )
    done = launchpad.run("run", *MPI, "-n", 2, "show.py")
    assert printed(done, "has") == ["0 2 0 2 0 2 0 2 0 2 0 mpi", "1 2 1 2 1 2 1 2 1 2 1 mpi"]
    assert "launchpad: no rank called MPI_Init of MPICH or Intel MPI; " in done.stderr
    done = launchpad.run("run", "--backend", "gloo", "-n", 1, "sh", "-c", "echo has $LAUNCHPAD_BACKEND $PMI_RANK")
    assert (printed(done, "has"), done.stderr) == (["gloo"], "")


def test_hydra_still_starts_scripts(launchpad: Launchpad) -> None:
    hydra = Path(sys.executable).parent / "mpiexec.hydra"
    script = Path(__file__).parents[2] / "programs" / "mpi_does.py"
    done = subprocess.run(
        [hydra, "-n", "2", sys.executable, script, "sum"],
        capture_output=True, text=True, timeout=DEADLINE, check=True, env=launchpad.environ,
    )  # fmt: skip
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("sum")) == ["sum 0 2 3", "sum 1 2 3"]


def test_a_world_inside_another_launchers_world(launchpad: Launchpad) -> None:
    launchpad.environ |= {"PMI_RANK": "1", "PMI_SIZE": "7", "PMI_PORT": "nowhere:1", "PMI_ID": "1", "PMI_FD": "9"}
    assert printed(mpi(launchpad, "-n", 2, "mpi_does.py", "sum"), "sum") == sums(2)


def test_several_programs_have_numbers_of_their_own(launchpad: Launchpad) -> None:
    """A world of two, as a coupled code asks for it, and MPI_APPNUM."""
    text = (
        "import sys\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nnumber = world.Get_attr(MPI.APPNUM)\n"
        "own = world.Split(number, world.rank)\nprint('has', sys.argv[1], number, world.rank, world.size, own.size)\n"
    )
    (launchpad.folder / "coupled.py").write_text(text)
    done = mpi(launchpad, "coupled.py", "ocean", ":", "-n", 2, "coupled.py", "air")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "has") == ["air 1 1 3 2", "air 1 2 3 2", "ocean 0 0 3 1"]


# How it ends.


@EXECUTED_OR_FORKED
def test_an_abort_ends_all_with_its_code(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 4, *way, "mpi_does.py", "abort", 2)
    assert done.returncode == 5
    assert "launchpad: rank 2 failed first: called MPI_Abort(5)" in done.stderr
    assert "launchpad: stopped because of it: ranks 0-1, 3" in done.stderr


@EXECUTED_OR_FORKED
def test_an_exception_in_one_rank_ends_all(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 4, *way, "mpi_does.py", "raise", 1)
    assert done.returncode == 1
    assert re.search(r"launchpad: rank 1 failed first: \w+: .* \(exit code 1, pid ", done.stderr)
    trace = re.findall(r"^\[1\] (.*)$", done.stderr, re.M)
    assert trace[0] == "Traceback (most recent call last):"
    assert "mpi_does.py" in trace[1]  # none of our own frames come before the program's
    assert trace[-1] == "ValueError: no good"


@EXECUTED_OR_FORKED
def test_an_exit_code_of_one_rank_ends_all(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 3, *way, "mpi_does.py", "exit", 0)
    assert done.returncode == 7
    assert "launchpad: rank 0 failed first: exit code 7" in done.stderr


@EXECUTED_OR_FORKED
def test_a_rank_that_exits_without_finalize_has_failed(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 3, *way, "mpi_does.py", "leave", 1)
    assert done.returncode == 1
    assert (
        "launchpad: rank 1 failed first: exited with code 0 after MPI_Init, without calling MPI_Finalize" in done.stderr
    )


@EXECUTED_OR_FORKED
def test_a_rank_that_never_joins_has_failed(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 3, *way, "mpi_does.py", "absent", 1)
    assert done.returncode == 1
    text = "rank 1 failed first: exited with code 0 without calling MPI_Init, in which others wait for it"
    assert text in done.stderr


@EXECUTED_OR_FORKED
def test_a_rank_that_finalizes_may_exit_in_any_way(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 3, *way, "mpi_does.py", "finalize")
    assert (done.returncode, done.stderr) == (0, "")


@EXECUTED_OR_FORKED
def test_a_killed_rank_ends_all_and_leaves_no_memory(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 4, *way, "mpi_does.py", "kill", 3)
    assert done.returncode == 137
    assert "launchpad: rank 3 failed first: killed by SIGKILL" in done.stderr
    assert "shm mpich_shm_" in done.stdout


@EXECUTED_OR_FORKED
def test_restarts(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 3, *way, "--max-restarts", 1, "mpi_does.py", "once", 1)
    assert done.returncode == 0
    assert "failed: rank 1, killed by SIGKILL" in done.stderr
    first, second = re.findall(r"shm (mpich_\S+)", done.stdout)
    assert first != second


def testno_memory_is_left_after_the_agent_was_killed(launchpad: Launchpad) -> None:
    (launchpad.folder / "waits.py").write_text(
        "import os, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\nopen(f'here{os.getppid()}', 'w').close()\n"
        "named = {part.split()[0] for part in open('/proc/self/maps').read().split('/dev/shm/')[1:]}\n"
        "print('shm', *sorted(named), flush=True)\ntime.sleep(600)\n"
    )
    process = launchpad.start("run", *MPI, "-n", 2, "waits.py")
    assert process.stdout is not None
    lines = process.stdout.readline().decode() + process.stdout.readline().decode()
    (agent,) = (int(path.name.removeprefix("here")) for path in launchpad.folder.glob("here*"))
    os.kill(agent, signal.SIGKILL)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 4
    wait_until(lambda: not launchpad.survivors(), "the guard to exit")
    assert lines.count("mpich_shm_") == 2
    no_memory_is_left(lines)


# Published names and spawned worlds.


def test_names_are_published_looked_up_and_unpublished(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 3, "mpi_does.py", "publish")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "heard") == ["a word"]
    assert "[1] gone" in done.stdout.splitlines()


@EXECUTED_OR_FORKED
def test_spawned_processes_are_ranks_too(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    done = mpi(launchpad, "-n", 2, *way, "mpi_does.py", "spawn")
    assert done.returncode == 0, done.stderr
    assert printed(done, "told") == ["33", "33"]  # the sum of what the others sent: 10 + 11 + 12
    assert printed(done, "spawned") == ["0 3 2 1", "1 3 2 1", "2 3 2 1"]
    assert re.search(r"^launchpad: rank 0 spawned ranks 2-4: .*mpi_does.py spawned -1$", done.stderr, re.M)
    assert re.search(r"^\[4\] spawned", done.stdout, re.M)


def test_the_failure_of_a_spawned_rank_ends_the_job(launchpad: Launchpad) -> None:
    done = mpi(launchpad, "-n", 2, "--log-dir", "logs", "mpi_does.py", "spawn-and-fail")
    assert done.returncode == 1
    assert "launchpad: rank 3, spawned by rank 0, failed first: ValueError: no good (exit code 1, " in done.stderr
    assert "launchpad: stopped because of it: ranks 0-2" in done.stderr
    (log,) = launchpad.folder.glob("logs/*/attempt_0/3/stderr.log")
    assert log.read_text().endswith("ValueError: no good\n")


def test_a_failed_spawn_ends_the_job(launchpad: Launchpad) -> None:
    (launchpad.folder / "spawns.py").write_text(
        "from mpi4py import MPI\nMPI.COMM_WORLD.Spawn('no-such-program', maxprocs=1)\n"
    )
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert done.returncode == 2
    assert "launchpad: rank 1, spawned by rank 0, could not be started: can't execute no-such-program" in done.stderr


def test_a_spawned_program_without_mpi_ends_the_job(launchpad: Launchpad) -> None:
    spawns_a_program_without_mpi(launchpad)


def test_what_is_spawned_gets_its_arguments_as_they_are(launchpad: Launchpad) -> None:
    code = "from mpi4py import MPI\nprint('its parent has', MPI.Comm.Get_parent().Get_remote_size())"
    (launchpad.folder / "spawns.py").write_text(
        f"import sys\nfrom mpi4py import MPI\nMPI.COMM_SELF.Spawn(sys.executable, args=['-c', {code!r}], maxprocs=1)\n"
    )
    done = mpi(launchpad, "-n", 1, "spawns.py")
    assert (done.returncode, done.stdout) == (0, "[1] its parent has 1\n"), done.stderr


# Several hosts.


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
@pytest.mark.parametrize(
    ("slots", "way"), [("n1:2,n2:2", EXECUTED), ("n2:1,n1:3", FORKED), ("n1:1,n2:2,n3:2", EXECUTED)]
)
def test_a_world_across_hosts(launchpad: Launchpad, hosts: Hosts, way: tuple[str, ...], slots: str) -> None:
    size = sum(int(slot[-1]) for slot in slots.split(","))
    done = hosts.run(launchpad, *MPI, *way, "-H", slots, "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(size)
    no_memory_is_left(done.stdout)


@needs_sshd
@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_either_network_of_the_mpich_wheel(launchpad: Launchpad, hosts: Hosts, netmod: str) -> None:
    done = hosts.run(launchpad, *MPI, "-x", f"MPIR_CVAR_CH4_NETMOD={netmod}", "-H", "n1:2,n2:1", "mpi_does.py", "sum")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done, "sum") == sums(3)


@needs_sshd
@pytest.mark.parametrize(
    ("what", "rank", "code", "words"),
    [
        ("abort", 1, 5, "called MPI_Abort(5)"),
        ("raise", 2, 1, "ValueError: no good (exit code 1"),
        ("leave", 1, 1, "exited with code 0 after MPI_Init, without calling MPI_Finalize"),
        ("absent", 2, 1, "exited with code 0 without calling MPI_Init, in which others wait for it"),
    ],
)
def test_how_a_world_across_hosts_ends(
    launchpad: Launchpad, hosts: Hosts, what: str, rank: int, code: int, words: str
) -> None:
    done = hosts.run(launchpad, *MPI, "-H", "n1:2,n2:2", "mpi_does.py", what, rank)
    assert done.returncode == code
    assert f"launchpad: rank {rank} on n{1 + rank // 2} failed first: {words}" in done.stderr
    no_memory_is_left(done.stdout)


@needs_sshd
@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_that_never_joins_has_failed(launchpad: Launchpad, hosts: Hosts, rank: int) -> None:
    slots = "n1:1,n2:2" if rank == 0 else "n1:2,n2:1"
    done = hosts.run(launchpad, *MPI, "-H", slots, "mpi_does.py", "absent", rank)
    assert done.returncode == 1
    name = f"rank {rank} on n{1 if rank == 0 else 2}"
    assert f"{name} failed first: exited with code 0 without calling MPI_Init, in which others" in done.stderr


@needs_sshd
def test_names_and_spawned_ranks_across_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, *MPI, "-H", "n1:1,n2:2", "mpi_does.py", "publish")
    assert (done.returncode, printed(done, "heard")) == (0, ["a word"])
    done = hosts.run(launchpad, *MPI, "-H", "n1:1,n2:1", "mpi_does.py", "spawn")
    assert (done.returncode, printed(done, "told")) == (0, ["33", "33"])
    assert re.search(r"^\[n1 4\] spawned", done.stdout, re.M)


@needs_sshd
def test_restarts_across_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, *MPI, "--max-restarts", 1, "-H", "n1:1,n2:2", "mpi_does.py", "once", 2)
    assert done.returncode == 0
    assert "failed: rank 2 on n2, killed by SIGKILL" in done.stderr


@needs_namespaces
def test_hosts_with_their_own_names_addresses_and_memory(launchpad: Launchpad, tmp_path: Path) -> None:
    with Network(tmp_path / "network", 2) as network:
        # MPICH may crash in the ranks that lose a peer, so soon after that the two can't be ordered.
        for what, codes in (("sum", (0,)), ("kill", (128 + signal.SIGKILL, 128 + signal.SIGSEGV))):
            options = ("--ssh-config", network.ssh_config, *MPI, "-H", "h1:2,h2:1")
            launchpad.environ["PYTHONFAULTHANDLER"] = "1"  # MPICH has crashed here, seldom
            argv = network.argv(*launchpad.argv("run", *options, "mpi_does.py", what, 2))
            done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE, env=launchpad.environ)
            assert done.returncode in codes, done.stderr
            assert printed(done, "sum") == (sums(3) if what == "sum" else [])
            assert network.exec("h1", "ls", "/dev/shm") == network.exec("h2", "ls", "/dev/shm") == ""


# Without --backend mpi.

SAID = r"launchpad: ranks \d\D+\d use MPI, each in a world of its own; --backend mpi makes all ranks one world\n"


@pytest.fixture
def linked(launchpad: Launchpad) -> str:
    """A program in C that stays in its world until it is stopped."""
    text = "#include <mpi.h>\n#include <unistd.h>\nint main(void) { MPI_Init(0, 0); for (;;) pause(); }\n"
    return compiled(launchpad, "stays", text)


@pytest.mark.parametrize(
    ("program", "way"),
    [
        ("from mpi4py import MPI", ()),
        ("from mpi4py import MPI", WITH_MPI),
        ("import mpi4py\nmpi4py.rc.threads = False\nimport mpi4py.MPI", ()),
    ],
    ids=["executed", "forked", "later"],
)
def test_worlds_of_one_are_told(launchpad: Launchpad, program: str, way: tuple[str, ...]) -> None:
    (launchpad.folder / "alone.py").write_text(f"import mpi4py\n{program}\nprint(mpi4py.MPI.COMM_WORLD.size)\n")
    done = launchpad.run("run", "-n", 3, *way, "alone.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 1", "[1] 1", "[2] 1"])
    assert re.fullmatch(SAID, done.stderr)


def test_a_program_that_is_linked_with_mpi_is_told_while_it_runs(launchpad: Launchpad, linked: str) -> None:
    process = launchpad.start("run", "-n", 2, linked, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert re.fullmatch(SAID, process.stderr.readline().decode())
    process.terminate()
    process.communicate(timeout=DEADLINE)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nif os.environ['RANK'] == '1': from mpi4py import MPI",
        "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI",
        "import os\nos.environ['PMI_RANK'] = '0'\nfrom mpi4py import MPI",
    ],
    ids=["one rank", "not initialized", "another's world"],
)
def test_nothing_is_said_of_ranks_that_are_not_alone_together(launchpad: Launchpad, program: str) -> None:
    (launchpad.folder / "quiet.py").write_text(program)
    done = launchpad.run("run", "-n", 2, "quiet.py")
    assert (done.returncode, done.stderr) == (0, "")
