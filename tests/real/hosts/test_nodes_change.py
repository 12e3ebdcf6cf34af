"""Nodes come and go while a job runs: spares, `--nnodes MIN:MAX`, machines that join late."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad.agent.host.topology import read_topology
from launchpad.job.binding import bind_ranks, in_words, written
from tests.support.command import Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.joined import c10d, ends, leads, said_until, started, static
from tests.support.needs import needs_mpi, needs_torch
from tests.support.ports import free_port
from tests.support.sshd import needs_sshd

# Each attempt of each rank leaves a file; they end when the test says so.
STAYS = """\
import os, time
names = "GROUP_WORLD_SIZE WORLD_SIZE GROUP_RANK TORCHELASTIC_RESTART_COUNT"
print(*(os.environ[name] for name in names.split()), flush=True)
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
"""

# The same for torch: after each all_reduce the ranks agree on whether to go on.
AGREES = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    over = torch.tensor([1.0, float(os.path.exists("go"))])
    dist.all_reduce(over)
    open(f"{dist.get_rank()}-ready", "w").close()
    if over[1]: break
    time.sleep(0.01)
print("sum", int(over[0]), flush=True)
"""

MPI_AGREES = """\
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
size = 0
while not world.allreduce(os.path.exists("go")):
    if not size: open(f"{world.Get_rank()}-{time.time_ns()}", "w").close()
    size = world.Get_size()
    time.sleep(0.01)
print("size", size, flush=True)
"""


def check(out: str, expected: list[str], lost: list[str]) -> None:
    """Fail unless these lines were printed. Those of a host whose power was cut may have been lost, or cut off."""
    left = Counter(expected)
    left.subtract(out.splitlines())
    assert +left <= Counter(lost), out
    assert all(any(line.startswith(cut) for line in (+left).elements()) for cut in -left), out
    assert (-left).total() <= (+left).total(), out


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    (launchpad.folder / "stays.py").write_text(STAYS)
    (launchpad.folder / "agrees.py").write_text(AGREES)
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


# Spares.


@needs_sshd
def test_a_spare_takes_the_place_of_a_lost_host(launchpad: Launchpad, hosts: Hosts) -> None:
    """Rank numbers stay. The lost host is the new spare when it is back, also for the host with rank 0."""
    job = hosts.begin(launchpad, "-H", "n1:2,n2:2,n3:2", "--spares", 1, "stays.py")
    started(launchpad, 4)
    hosts.cut_power(2)
    started(launchpad, 8)
    hosts.hosts[1].start()
    said = said_until(job, "n2 is back")
    hosts.cut_power(1)
    started(launchpad, 12)
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    attempts = (("n1", "n2"), ("n1", "n3"), ("n2", "n3"))
    lines = [[f"[{hosts[rank // 2]} {rank}] 2 4 {rank // 2} 0" for rank in range(4)] for hosts in attempts]
    check(out, [*lines[0], *lines[1], *lines[2]], [*lines[0][2:], *lines[1][:2]])
    assert "launchpad: failed: n2 was lost (its agent hung up); going on with n1, n3" in said
    assert "launchpad: failed: n1 was lost (its agent hung up); going on with n2, n3" in err


@needs_sshd
def test_a_spare_binds_the_ranks_that_it_gets(launchpad: Launchpad, hosts: Hosts) -> None:
    """It has room for two, and gets one, which has all its cores."""
    words = ("--bind", "exclusive", "--report-bindings", "stays.py")
    job = hosts.begin(launchpad, "-H", "n1,n2:2", "--spares", 1, *words)
    started(launchpad, 1)
    hosts.cut_power(1)
    started(launchpad, 2)
    (launchpad.folder / "go").touch()
    code, _, err = ends(job)
    assert code == 0, err
    (alone,) = bind_ranks("exclusive", read_topology(dict(os.environ)), 1, "")
    bound = [line for line in err.splitlines() if "rank 0 on" in line]
    assert bound == [f"launchpad: rank 0 on {host}: {in_words(*written(alone))}" for host in ("n1", "n2")]


@needs_sshd
@needs_torch
def test_torch_goes_on_with_a_spare(launchpad: Launchpad, hosts: Hosts) -> None:
    """The store and its address move, as the first host is lost. The spare has imported torch before."""
    job = hosts.begin(launchpad, "-H", "n1:2,n2:2,n3:2", "--spares", 1, "agrees.py")
    started(launchpad, 4)
    hosts.cut_power(1)
    said_until(job, "going on with")
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    assert out.count("sum 4") == 4


@needs_sshd
@needs_mpi
def test_an_mpi_world_goes_on_with_a_spare(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "mpi.py").write_text(MPI_AGREES)
    job = hosts.begin(launchpad, "--backend", "mpi", "-H", "n1:2,n2:2,n3:2", "--spares", 1, "mpi.py")
    started(launchpad, 4)
    hosts.cut_power(1)
    started(launchpad, 8)
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{name}] size 4" for name in ("n2 2", "n2 3", "n3 0", "n3 1")]


@needs_sshd
def test_a_lost_spare_is_told_and_comes_back(launchpad: Launchpad, hosts: Hosts) -> None:
    job = hosts.begin(launchpad, "-H", "n1,n2,n3", "--spares", 1, "stays.py")
    started(launchpad, 2)
    hosts.cut_power(3)
    assert job.stderr is not None
    assert job.stderr.readline() == b"launchpad: n3, which runs no ranks, was lost (its agent hung up)\n"
    hosts.hosts[2].start()
    assert job.stderr.readline() == b"launchpad: n3 is back\n"
    (launchpad.folder / "go").touch()
    assert ends(job)[0] == 0


@needs_sshd
def test_without_a_spare_left_a_lost_host_ends_the_job(launchpad: Launchpad, hosts: Hosts) -> None:
    job = hosts.begin(launchpad, "-H", "n1,n2,n3", "--spares", 1, "stays.py")
    started(launchpad, 2)
    hosts.cut_power(2)
    started(launchpad, 4)
    hosts.cut_power(3)
    code, _, err = ends(job)
    assert code == 4
    assert "launchpad: n3 was lost: its agent hung up; it was running rank 1" in err
    assert "launchpad: restarts before: 1" in err or "n2 was lost" in err


@needs_sshd
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--spares", 3), "--spares 3: of 3 hosts none would be left to run ranks; name more hosts"),
        (("--nnodes", "2:4"), "--nnodes 2:4: the job has 3 hosts besides spares; write 3, or LEAST:3"),
        (("--nnodes", "3:2"), "--nnodes 3:2: the least number of nodes is more than the most; write 2:3"),
    ],
)
def test_sizes_that_make_no_sense(launchpad: Launchpad, hosts: Hosts, options: tuple[object, ...], said: str) -> None:
    done = hosts.run(launchpad, "-H", "n1,n2,n3", *options, "stays.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"launchpad: error: {said}\n")


@needs_sshd
def test_a_spare_with_too_few_slots(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1:2,n2:2,n3", "--spares", 1, "stays.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "n3 is a spare for 1 ranks, and n1 has 2: a spare must have room for the ranks of any host" in done.stderr


def test_spares_without_hosts(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--spares", 1, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--spares 1 needs hosts; name them with --hosts or --hostfile, or leave it out" in done.stderr


# Varying numbers of nodes.


@needs_sshd
def test_a_job_over_ssh_goes_on_with_fewer_hosts_and_with_those_that_come_back(
    launchpad: Launchpad, hosts: Hosts
) -> None:
    job = hosts.begin(launchpad, "-H", "n1,n2,n3", "--nnodes", "2:3", "stays.py")
    started(launchpad, 3)
    hosts.cut_power(1)
    started(launchpad, 5)
    hosts.hosts[0].start()
    started(launchpad, 8)
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    lines = ["[n1 0] 3 3 0 0", "[n2 1] 3 3 1 0", "[n3 2] 3 3 2 0", "[n2 0] 2 2 0 0", "[n3 1] 2 2 1 0"]
    lines += ["[n2 0] 3 3 0 0", "[n3 1] 3 3 1 0", "[n1 2] 3 3 2 0"]
    check(out, lines, lines[:1])
    assert err.splitlines() == [
        "launchpad: failed: n1 was lost (its agent hung up); going on with n2, n3",
        "launchpad: n1 is back",
        "launchpad: starting all ranks again on n2, n3, n1",
    ]


def begin(launchpad: Launchpad, port: int, nodes: str, conf: str = "last_call_timeout=0.2") -> subprocess.Popen[bytes]:
    (launchpad.folder / "stays.py").write_text(STAYS)
    return launchpad.start("run", *c10d(port, rdzv_conf=conf, nnodes=nodes), "stays.py")


def test_nodes_join_and_leave_a_running_job(launchpad: Launchpad) -> None:
    port = free_port()
    head = begin(launchpad, port, "1:3")
    started(launchpad, 1)
    second = begin(launchpad, port, "1:3")
    started(launchpad, 3)
    third = begin(launchpad, port, "1:3")
    started(launchpad, 6)
    second.send_signal(signal.SIGKILL)
    started(launchpad, 8)
    third.send_signal(signal.SIGKILL)
    started(launchpad, 9)
    (launchpad.folder / "go").touch()
    assert [ends(job)[0] for job in (head, second, third)] == [0, -9, -9]
    ranks = sorted(path.name.partition("-")[0] for path in launchpad.folder.glob("[0-9]*-*"))
    assert ranks == ["0"] * 5 + ["1"] * 3 + ["2"]


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_torch_on_a_node_that_was_alone(launchpad: Launchpad) -> None:
    """It has an address where others find it, before there are any."""
    (launchpad.folder / "agrees.py").write_text(AGREES)
    port = free_port()
    line = [*c10d(port, rdzv_conf="last_call_timeout=0.2", nnodes="1:2"), "-n", 2, "agrees.py"]
    head = launchpad.start("run", *line)
    started(launchpad, 2)
    second = launchpad.start("run", *line)
    started(launchpad, 4)
    (launchpad.folder / "go").touch()
    for job in (head, second):
        code, out, err = ends(job)
        assert code == 0, err
        assert out.count("sum 4") == 2


# A rank that saves its state when it is asked to stop.
SAVES = """\
import os, signal, sys, time
def save(signum, frame):
    open(f"saved-{os.environ['GROUP_RANK']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
print("of", os.environ["WORLD_SIZE"], flush=True)
"""


def test_a_node_that_gets_term_leaves_and_the_job_goes_on(launchpad: Launchpad) -> None:
    """As when a preemptible machine is taken away: its ranks save their state, and the others go on without it."""
    (launchpad.folder / "on_term.py").write_text(SAVES)
    port = free_port()
    line = ["run", *c10d(port, rdzv_conf="last_call_timeout=0.2", nnodes="1:2"), "on_term.py"]
    head = launchpad.start(*line)
    started(launchpad, 1)
    other = launchpad.start(*line)
    started(launchpad, 3)
    other.send_signal(signal.SIGTERM)
    code, out, err = ends(other)
    assert (code, out) == (143, ""), err
    assert err == "launchpad: this node has left the job, which goes on without it\n"
    assert (launchpad.folder / "saved-1").exists()
    started(launchpad, 4)
    third = launchpad.start(*line)
    started(launchpad, 6)
    (launchpad.folder / "go").touch()
    assert ends(third)[:2] == (0, "[1] of 2\n")
    code, out, err = ends(head)
    assert (code, out) == (0, "[0] of 2\n"), err
    name = socket.gethostname()
    said = [line.removeprefix("launchpad: ").replace(name, "NODE") for line in err.splitlines()]
    assert said == [
        "NODE.2 has joined",
        "starting all ranks again on NODE, NODE.2",
        "NODE.2 leaves the job: its launchpad got SIGTERM",
        "starting all ranks again on NODE",
        "NODE.2 is back",
        "starting all ranks again on NODE, NODE.2",
    ]


def test_term_ends_a_job_that_can_not_go_on_without_the_node(launchpad: Launchpad) -> None:
    port = free_port()
    jobs = [begin(launchpad, port, "2:3") for _ in range(2)]
    started(launchpad, 2)
    head, other = jobs if leads(jobs[0], port) else reversed(jobs)
    other.send_signal(signal.SIGTERM)
    assert [ends(job)[0] for job in (head, other)] == [143, 143]


def test_a_node_may_wait_for_the_next_restart(launchpad: Launchpad) -> None:
    port = free_port()
    conf = "last_call_timeout=0.2,on_join=wait"
    head = begin(launchpad, port, "1:2", conf)
    started(launchpad, 1)
    second = begin(launchpad, port, "1:2", conf)
    said_until(head, "has joined")
    (launchpad.folder / "go").touch()
    assert ends(head)[:2] == (0, "[0] 1 1 0 0\n")
    assert ends(second)[:2] == (0, "")


def test_a_node_too_many_is_a_spare(launchpad: Launchpad) -> None:
    port = free_port()
    jobs = [begin(launchpad, port, "2") for _ in range(2)]
    started(launchpad, 2)
    spare = begin(launchpad, port, "2")
    said_until(spare, "the job has its 2 nodes: this one is a spare, for when one of them is lost\n")
    head, other = jobs if leads(jobs[0], port) else reversed(jobs)
    said_until(head, "has joined")
    other.send_signal(signal.SIGKILL)
    started(launchpad, 4)
    (launchpad.folder / "go").touch()
    code, out, err = ends(spare)
    assert (code, out) == (0, "[1] 2 2 1 0\n"), err
    assert [ends(job)[0] for job in (head, other)] == [0, -9]


def test_a_late_node_without_enough_gpus_does_not_end_the_job(launchpad: Launchpad) -> None:
    """What the plan of the nodes to come would say, is said before there is one."""
    (launchpad.folder / "stays.py").write_text(STAYS)
    port = free_port()
    line = ["run", *c10d(port, rdzv_conf="last_call_timeout=0.2", nnodes="1:2"), "--virtual-local-rank"]
    head = launchpad.start(*line, "stays.py")
    started(launchpad, 1)
    late = launchpad.start(*line, "-n", 2, "-x", "CUDA_VISIBLE_DEVICES=3", "stays.py")
    code, out, err = ends(late)
    assert (code, out) == (3, "")
    assert "local rank 1 has no GPU in CUDA_VISIBLE_DEVICES=3" in err
    said_until(head, "local rank 1 has no GPU in CUDA_VISIBLE_DEVICES=3")
    (launchpad.folder / "go").touch()
    assert ends(head)[:2] == (0, "[0] 1 1 0 0\n")


def test_a_late_node_that_is_stopped_before_it_takes_part(launchpad: Launchpad) -> None:
    """Its agent is still busy: it loads the module that its ranks need."""
    (launchpad.folder / "stays.py").write_text(STAYS)
    (launchpad.folder / "slow.py").write_text(
        "import os, time\nopen('loading', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    port = free_port()
    line = ["run", *c10d(port, rdzv_conf="last_call_timeout=0.2", nnodes="1:2")]
    head = launchpad.start(*line, "stays.py")
    started(launchpad, 1)
    late = launchpad.start(*line, "--preload", "slow", "stays.py")
    wait_until(lambda: (launchpad.folder / "loading").exists(), "the late node to be brought up")
    late.terminate()
    code, out, err = ends(late)
    assert (code, out) == (143, "")
    assert err.endswith("launchpad: this node has left the job\n")
    said_until(head, "can't join: its launchpad got SIGTERM")
    (launchpad.folder / "go").touch()
    assert ends(head)[:2] == (0, "[0] 1 1 0 0\n")


def test_a_lost_node_hears_that_it_is(launchpad: Launchpad) -> None:
    """Its launchpad was suspended for longer than the heartbeat timeout."""
    (launchpad.folder / "stays.py").write_text(STAYS)
    port = free_port()
    line = ["run", *c10d(port, rdzv_conf="last_call_timeout=0.2", nnodes="1:2"), "--heartbeat-timeout", "4"]
    head = launchpad.start(*line, "stays.py")
    started(launchpad, 1)
    other = launchpad.start(*line, "stays.py")
    started(launchpad, 3)
    other.send_signal(signal.SIGSTOP)
    started(launchpad, 4)
    other.send_signal(signal.SIGCONT)
    code, _, err = ends(other)
    assert (code, err.splitlines()[-1]) == (4, "launchpad: the job counts this node as lost: no heartbeat for 4 s")
    (launchpad.folder / "go").touch()
    assert ends(head)[0] == 0


def test_a_wrong_word_for_late_nodes(launchpad: Launchpad) -> None:
    done = launchpad.run("run", *c10d(free_port(), rdzv_conf="on_join=maybe"), "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "on_join must be restart (all ranks start again with the node that joined) or wait" in done.stderr


def test_static_nodes_are_always_as_many(launchpad: Launchpad) -> None:
    done = launchpad.run("run", *static(0, free_port(), nnodes="1:2"), "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nnodes 1:2: with a varying number of nodes, they meet by --rdzv-backend c10d" in done.stderr
