"""`--health`: what a node says of itself before each attempt, on hosts that are real SSH servers."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Launchpad, wait_until
from tests.support.gpus import FakeGpus
from tests.support.hosts import Hosts
from tests.support.joined import c10d, ends, leads, said_until, started
from tests.support.needs import needs_torch
from tests.support.ports import free_port
from tests.support.records import store_of
from tests.support.sshd import needs_sshd

# A host is sick while there is a file of its name.
CHECK = 'if test -e sick-$WHO; then echo looking; echo "GPU 3 of $WHO is off the bus" >&2; exit 3; fi'

SHOW = 'import os; print(os.environ["WHO"], os.environ["WORLD_SIZE"])'

# The rank on the second host fails, as long as it is allowed to.
FAILS = """\
import os, sys, time
who = os.environ["WHO"]
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
if who == "n2":
    open("sick-n2", "w").close()
    sys.exit(5)
print(who, os.environ["RANK"], flush=True)
"""

SUM = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(os.environ["WHO"], int(one), flush=True)
"""

LEFT_OUT = """\
launchpad: {0} is left out: its health check ended with exit code 3:
launchpad:   looking
launchpad:   GPU 3 of {0} is off the bus
"""


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    for name, text in (("check.sh", CHECK), ("show.py", SHOW), ("fails.py", FAILS), ("sum.py", SUM)):
        (launchpad.folder / name).write_text(text)
    cluster = Hosts(launchpad, tmp_path / "ssh")
    for number, host in enumerate(cluster.hosts, 1):
        host.environ["WHO"] = f"n{number}"
    with cluster:
        yield cluster


def ill(launchpad: Launchpad, *names: str) -> None:
    for name in names:
        (launchpad.folder / f"sick-{name}").touch()


@needs_sshd
@pytest.mark.parametrize(("sick", "used"), [("n1", ["n2", "n3"]), ("n2", ["n1", "n3"]), ("n3", ["n1", "n2"])])
def test_a_spare_takes_the_place_of_a_sick_host(launchpad: Launchpad, hosts: Hosts, sick: str, used: list[str]) -> None:
    """Also of the first one, where the others would have met; and a spare may be the sick one."""
    ill(launchpad, sick)
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "--spares", 1, "--health", "sh check.sh", "show.py")
    assert (done.returncode, done.stderr) == (0, LEFT_OUT.format(sick))
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == [f"{name} 2" for name in used]
    (events,) = store_of(launchpad).glob("*/events.jsonl")
    kinds = [json.loads(line) for line in events.read_text().splitlines()]
    (told,) = [event for event in kinds if event["event"] == "NodeUnwell"]
    assert told["reason"] == "ended with exit code 3"
    assert told["lines"] == ["looking", f"GPU 3 of {sick} is off the bus"]


@needs_sshd
@needs_torch
def test_torch_meets_elsewhere_and_a_smaller_size_will_do(launchpad: Launchpad, hosts: Hosts) -> None:
    ill(launchpad, "n1")
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "--nnodes", "2:3", "--health", "sh check.sh", "sum.py")
    assert (done.returncode, done.stderr) == (0, LEFT_OUT.format("n1"))
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == ["n2 2", "n3 2"]


@needs_sshd
def test_without_enough_others_nothing_is_started(launchpad: Launchpad, hosts: Hosts) -> None:
    ill(launchpad, "n2", "n3")
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "--spares", 1, "--health", "sh check.sh", "show.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "launchpad: error: 2 of 3 hosts can't take part, so nothing was started:",
        "  n2  its health check ended with exit code 3, and said:",
        "        looking",
        "        GPU 3 of n2 is off the bus",
        "  n3  its health check ended with exit code 3, and said:",
        "        looking",
        "        GPU 3 of n3 is off the bus",
    ]


@needs_sshd
def test_a_check_comes_with_the_folder(launchpad: Launchpad, hosts: Hosts) -> None:
    """It is in the copy."""
    (launchpad.folder / "check.sh").write_text("pwd; exit 4")
    done = hosts.run(launchpad, "-H", "n1,n2", "--sync", "--health", "sh check.sh", "show.py")
    assert done.returncode == 3
    assert "  n1  its health check ended with exit code 4, and said:\n        /" in done.stderr
    assert str(launchpad.folder) not in done.stderr


@needs_sshd
def test_a_dry_run_shows_who_is_left_out(launchpad: Launchpad, hosts: Hosts) -> None:
    ill(launchpad, "n2")
    words = ("--spares", 1, "--health", "sh check.sh", "--dry-run", "show.py")
    done = hosts.run(launchpad, "-H", "n1,n2,n3", *words)
    assert done.returncode == 0, done.stderr
    assert "health check on each node before each attempt: sh check.sh\n" in done.stdout
    assert "node 1: n2, left out: its health check ended with exit code 3: GPU 3 of n2 is off the bus\n" in done.stdout
    assert "node 2: n3, 1 of 2 ranks" in done.stdout


@needs_sshd
def test_a_host_that_falls_sick_is_left_out_of_a_restart(launchpad: Launchpad, hosts: Hosts) -> None:
    words = ("--spares", 1, "--max-restarts", 1, "--health", "sh check.sh", "fails.py")
    job = hosts.begin(launchpad, "-H", "n1,n2,n3", *words)
    started(launchpad, 2)
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    assert {"n1 0", "n3 1"} <= {line.split("] ")[1] for line in out.splitlines()}
    assert LEFT_OUT.format("n2") in err


@needs_sshd
def test_the_quick_part_of_doctor_finds_a_broken_gpu(launchpad: Launchpad, hosts: Hosts) -> None:
    folder = launchpad.folder / "smi"
    folder.mkdir()
    with contextlib.closing(FakeGpus(folder)):  # it answers as one with a broken GPU does
        hosts.hosts[1].environ["PATH"] = f"{folder}:{launchpad.environ['PATH']}"
        hosts.hosts[1].stop()
        hosts.hosts[1].start()
        done = hosts.run(launchpad, "-H", "n1,n2,n3", "--spares", 1, "--health", "doctor", "show.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "launchpad: n2 is left out: its health check (launchpad doctor) has failed:",
        "launchpad:   its GPUs can't be asked: nvidia-smi: Unable to determine the device handle for GPU0000:07:00.0: "
        "Unknown Error",
    ]


@needs_sshd
def test_a_check_that_hangs_is_killed_with_its_children(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "check.sh").write_text("test $WHO = n1 || { setsid sleep 1000 & sleep 1000; }")
    words = ("--health", "sh check.sh", "--health-timeout", "5", "show.py")
    done = hosts.run(launchpad, "-H", "n1,n2", "--nnodes", "1:2", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "launchpad: n2 is left out: its health check did not end within 5 s, and was killed\n"


@needs_sshd
def test_a_host_without_the_command_is_healthy(launchpad: Launchpad, hosts: Hosts) -> None:
    done = hosts.run(launchpad, "-H", "n1,n2", "--health", "dcgmi-of-old diag", "show.py")
    assert done.returncode == 0
    assert done.stderr == (
        "launchpad: --health dcgmi-of-old diag: there is no such command on n1, n2, which counts as healthy\n"
    )


@needs_sshd
def test_a_host_whose_disk_fails_twice_gives_way_to_a_spare(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "reads.py").write_text(
        "import os\nwho = os.environ['WHO']\nif who == 'n2': raise OSError(5, 'Input/output error', '/data')\n"
        "open('there', 'a').close() if who == 'n3' else None\n"
        "import time\nwhile not os.path.exists('there'): time.sleep(0.01)\nprint(who)\n"
    )
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "--spares", 1, "--max-restarts", 3, "reads.py")
    assert done.returncode == 0, done.stderr
    assert (
        "launchpad: n2 has failed 2 times because of its own hardware (I/O errors): "
        "from now on it comes last, after all spares\n"
    ) in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[n1 0] n1", "[n3 1] n3"]


# On nodes that join, and on one.


def test_a_node_that_joins_is_checked_and_told(launchpad: Launchpad) -> None:
    (launchpad.folder / "check.sh").write_text(CHECK)
    (launchpad.folder / "show.py").write_text(SHOW)
    ill(launchpad, "b")
    port = free_port()
    line = ["run", *c10d(port, nnodes="1:2"), "--health", "sh check.sh", "show.py"]
    jobs = [launchpad.start(*line, env={**launchpad.environ, "WHO": "a"})]
    wait_until(lambda: leads(jobs[0], port), "the first one to lead the job")
    jobs.append(launchpad.start(*line, env={**launchpad.environ, "WHO": "b"}))
    ended = sorted(ends(job) for job in jobs)
    assert sorted(code for code, _, _ in ended) == [0, 4]
    said = "its health check ended with exit code 3"
    every = "".join(err for _, _, err in ended)
    assert f"is left out: {said}:\n" in every
    assert f"launchpad: the job counts this node as lost: {said}: GPU 3 of b is off the bus\n" in every
    assert [out for _, out, _ in ended if out] == ["[0] a 1\n"]


def test_one_machine_waits_until_it_is_healthy_again(launchpad: Launchpad) -> None:
    """It is left out before a restart; what became of it is in the verdict."""
    (launchpad.folder / "fails.py").write_text("import sys; open('sick-a', 'w'); sys.exit(5)")
    (launchpad.folder / "check.sh").write_text(CHECK)
    launchpad.environ["WHO"] = "a"
    job = launchpad.start("run", "--max-restarts", 1, "--health", "sh check.sh", "fails.py")
    said = said_until(job, "waiting up to 120 s for a replacement")
    assert "is left out: its health check ended with exit code 3:" in said
    job.send_signal(signal.SIGTERM)
    code, _, err = ends(job)
    assert code == 143, err
    assert "before that, rank 0 failed: exit code 5" in err
    again = launchpad.run("run", "--health", "sh check.sh", "true")
    assert again.returncode == 3
    assert again.stderr.startswith("launchpad: error: the only host can't take part, so nothing was started:\n")
    assert again.stderr.endswith(
        "exit code 3, and said:\n" + 8 * " " + "looking\n" + 8 * " " + "GPU 3 of a is off the bus\n"
    )
