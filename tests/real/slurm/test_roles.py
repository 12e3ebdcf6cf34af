"""Slurm: roles over the nodes of an allocation, on a real cluster of this machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.command import PROGRAMS, Launchpad, wait_until
from tests.support.needs import needs_mpich
from tests.support.run_mpi import no_memory_is_left, printed
from tests.support.slurm import Slurm, needs_slurm

pytestmark = needs_slurm

# Says where it runs, and answers at its port.
SERVE = """\
import os, socket
listener = socket.create_server(("", int(os.environ["LAUNCHPAD_PORT_ANSWERS"])), reuse_port=True)
while True:
    taken, _ = listener.accept()
    again = os.environ["TORCHELASTIC_RESTART_COUNT"]
    taken.sendall(f"{os.environ['SLURMD_NODENAME']} {again}".encode())
    taken.close()
    if again == "0" and os.environ["LAUNCHPAD_REPLICA"] == "1":
        os._exit(7)
"""

# Asks all of them until each says so.
ASK = """\
import os, socket, sys, time
own = os.environ
print("at", own["SLURMD_NODENAME"], own["RANK"], own["WORLD_SIZE"], own["LOCAL_RANK"], flush=True)
deadline = time.monotonic() + 60
for place, text in zip(own["LAUNCHPAD_SERVE_ANSWERS"].split(","), sys.argv[1:]):
    host, _, port = place.rpartition(":")
    while True:
        assert time.monotonic() < deadline
        try:
            if socket.create_connection((host, int(port))).recv(100).decode() == text:
                break
        except OSError:
            pass
        time.sleep(0.01)
"""

FILE = """
[jobs.j.roles.serve]
target = "serve.py"
replicas = 2
service = true
ports = ["answers"]
ready = "tcp:answers"
max-restarts = 1

[jobs.j.roles.ask]
target = ["ask.py", "c1 0", "c1 1"]
nproc = 2
after = "serve"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), 2) as running:
        yield running


def run(slurm: Slurm, launchpad: Launchpad, options: list[str], file: str) -> subprocess.CompletedProcess[str]:
    """Run the job in an allocation, and wait until that is gone."""
    (launchpad.folder / "job.toml").write_text(file)
    done = slurm.salloc(launchpad, options, "run", "--config", "job.toml", "--job", "j")
    wait_until(slurm.is_idle, "the cluster to be idle", lambda: slurm.ask("squeue"))
    return done


def test_worlds_share_nodes_and_one_starts_again_alone(slurm: Slurm, launchpad: Launchpad) -> None:
    """Two of a role are on the first node, the other one is on the second."""
    (launchpad.folder / "serve.py").write_text(SERVE)
    (launchpad.folder / "ask.py").write_text(ASK)
    done = run(slurm, launchpad, ["-N2", "--ntasks-per-node=2"], FILE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[ask     0] at c2 0 2 0", "[ask     1] at c2 1 2 1"]
    assert "launchpad: using the 2 nodes of this Slurm allocation: c1:2, c2:2\n" in done.stderr
    assert "failed: serve.1 rank 0 on c1, exit code 7" in done.stderr


@needs_mpich
def test_a_world_over_the_nodes_beside_others_of_mpi(slurm: Slurm, launchpad: Launchpad) -> None:
    """One has hosts of its own."""
    (launchpad.folder / "mpi_does.py").write_bytes((PROGRAMS / "mpi_does.py").read_bytes())
    (launchpad.folder / "at.py").write_text("import os\nprint('at', os.environ['SLURMD_NODENAME'])\n")
    does = 'target = ["mpi_does.py", "sum"]\nbackend = "mpi"\nnproc = '
    done = run(
        slurm,
        launchpad,
        ["-N2", "--ntasks-per-node=2"],
        f'[jobs.j.roles.a]\n{does}1\n[jobs.j.roles.b]\n{does}2\n[jobs.j.roles.c]\ntarget = "at.py"\nhosts = ["c2:3"]\n',
    )
    assert (done.returncode, "[b 1] sum 1 2 3" in done.stdout.splitlines()) == (0, True), done.stderr
    assert printed(done, "sum") == ["0 1 1", "0 2 3", "1 2 3"]
    assert printed(done, "at") == ["c2"] * 3
    no_memory_is_left(done.stdout)


def test_roles_that_all_name_nodes_go_by_srun_too(slurm: Slurm, launchpad: Launchpad) -> None:
    (launchpad.folder / "at.py").write_text("import os\nprint('at', os.environ['SLURMD_NODENAME'])\n")
    both = '[jobs.j.roles.a]\ntarget = "at.py"\nhosts = ["c1"]\n[jobs.j.roles.b]\ntarget = "at.py"\nhosts = ["c2:2"]\n'
    done = run(slurm, launchpad, ["-N2"], both)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] at c1", "[b 0] at c2", "[b 1] at c2"]


def test_the_one_node_of_an_allocation_has_the_slots_of_its_tasks(slurm: Slurm, launchpad: Launchpad) -> None:
    """Launchpad runs on it, so no srun is needed."""
    for nproc, code, said in (
        (2, 0, "[a 1] at c1"),
        (3, 2, "jobs.j.roles.a: it needs 3 ranks, and the job's hosts ha"),
    ):
        (launchpad.folder / "at.py").write_text("import os\nprint('at', os.environ['SLURMD_NODENAME'])\n")
        (launchpad.folder / "job.toml").write_text(f'[jobs.j.roles.a]\ntarget = "at.py"\nnproc = {nproc}\n')
        job = slurm.sbatch(launchpad, ["-N1", "--ntasks-per-node=2"], "launchpad run --config job.toml --job j")
        found, output = job.end()
        assert (found, said in output) == (code, True), output


def test_scancel_stops_all_of_them(slurm: Slurm, launchpad: Launchpad) -> None:
    (launchpad.folder / "waits.py").write_text(
        "import os, signal, time\nsignal.signal(15, lambda *_: os.write(1, b'saved\\n'))\n"
        "print('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    (launchpad.folder / "job.toml").write_text(
        '[jobs.j.roles.a]\ntarget = "waits.py"\nreplicas = 2\n[jobs.j.roles.b]\ntarget = "waits.py"\n'
    )
    job = slurm.sbatch(launchpad, ["-N2", "--ntasks-per-node=2"], "launchpad run --config job.toml --job j")
    job.await_output("ready", 3)
    job.signal()
    job.await_output("sent SIGTERM to ")  # else all may have gone well before launchpad gets the signal
    told = re.compile(r"^\[.*\] saved$", re.MULTILINE)
    wait_until(lambda: len({*told.findall(job.output)}) == 3, "all ranks to be told", lambda: job.output)
    (launchpad.folder / "go").touch()
    code, output = job.end()
    assert code == 143, output
    wait_until(lambda: not launchpad.survivors(), "all to be gone")


def test_what_an_allocation_can_not_give_is_one_sentence(slurm: Slurm, launchpad: Launchpad) -> None:
    for more, said in (
        (
            "nproc = 3\n",
            "jobs.j.roles.a: it needs 3 ranks, and the job's hosts have 2; ask for more tasks, or say where",
        ),
        ('hosts = ["c1", "x"]\n[jobs.j.roles.b]\ntarget = "true"\n', "jobs.j.roles.a, hosts: x is none of the alloc"),
    ):
        done = run(slurm, launchpad, ["-N2"], f'[jobs.j.roles.a]\ntarget = "true"\n{more}')
        assert (done.returncode, done.stdout) == (2, "")
        _, error = done.stderr.splitlines()
        assert said in error
