"""Launchpads that are started on each node, and find each other: c10d, static, `launchpad join`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launchpad import listeners
from launchpad.errors import NodeError
from launchpad.job.limits import Limits
from launchpad.job.offer import NodeOffer
from launchpad.job.spec import JobSpec, Target
from launchpad.job.world import Meeting
from launchpad.protocol.commands import HeadMoved, Ping
from launchpad.protocol.events import Pong
from launchpad.runner import joining
from launchpad.transport.join import client, proof, server
from launchpad.transport.join.client import HeadConnection, JoinRefused, LedElsewhere
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.joined import OFFER, SPEC, Door, Job, c10d, ends, leads, static
from tests.support.needs import needs_mpi, needs_torch
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("from_image")


def shown(text: str) -> dict[int, list[str]]:
    """What each rank printed, by its number."""
    return {int(rank): words.split() for rank, words in re.findall(r"^\[(\d+)\] (.*)$", text, re.M)}


SHOW = (
    "import os\nnames = 'GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR "
    "TORCHELASTIC_RUN_ID'\nprint(*(os.environ[name] for name in names.split()), 'LAUNCHPAD_SECRET' in os.environ)\n"
)


@pytest.fixture
def show(launchpad: Launchpad) -> str:
    (launchpad.folder / "show.py").write_text(SHOW)
    return "show.py"


# One world.


def test_the_same_line_on_every_node_makes_one_world(launchpad: Launchpad, show: str) -> None:
    """Nobody has a rank; each shows its own ranks, the head those from 0."""
    port = free_port()
    jobs = [launchpad.start("run", *c10d(port, 3), "-n", 2, show) for _ in range(3)]
    found: dict[int, list[str]] = {}
    for job in jobs:
        code, out, err = ends(job)
        assert (code, err) == (0, "")
        mine = shown(out)
        assert len(mine) == 2
        assert len({words[0] for words in mine.values()}) == 1  # of one node
        found |= mine
    assert found == {
        rank: [str(rank // 2), str(rank % 2), "2", "6", "3", "127.0.0.1", "j", "False"] for rank in range(6)
    }


def test_nodes_that_have_their_ranks(launchpad: Launchpad) -> None:
    """With unequal numbers of ranks, whoever comes first; MASTER_PORT is the one that was given."""
    (launchpad.folder / "show.py").write_text(SHOW.replace("MASTER_ADDR", "MASTER_PORT"))
    port = free_port()
    counts = {2: 1, 0: 2, 1: 3}
    jobs = [launchpad.start("run", *static(rank, port, 3), "-n", count, "show.py") for rank, count in counts.items()]
    found: dict[int, list[str]] = {}
    for job in jobs:
        code, out, err = ends(job)
        assert code == 0, err
        found |= shown(out)
    places = {0: (0, 0, 2), 1: (0, 1, 2), 2: (1, 0, 3), 3: (1, 1, 3), 4: (1, 2, 3), 5: (2, 0, 1)}
    assert {rank: words[:6] for rank, words in found.items()} == {
        rank: [*map(str, place), "6", "3", str(port)] for rank, place in places.items()
    }


def test_each_node_says_what_its_own_ranks_run(launchpad: Launchpad, tmp_path: Path) -> None:
    """The target, its arguments, variables and folder are the node's; restarts and time-outs the head's."""
    port = free_port()
    (tmp_path / "there").mkdir()
    (launchpad.folder / "a.py").write_text("import os\nprint('a', os.environ['MINE'], os.getcwd())\n")
    head = launchpad.start("run", *c10d(port), "-x", "MINE=1", "--timeout", 50, "a.py")
    words = ("-x", "MINE=2", "--wdir", tmp_path / "there", "--max-restarts", "3/1h", "--no-python", "sh", "-c")
    other = launchpad.start("run", *c10d(port, rdzv_conf="is_host=0"), *words, "echo b $MINE $PWD")
    assert ends(head) == (0, f"[0] a 1 {launchpad.folder}\n", "")
    code, out, err = ends(other)
    assert (code, out) == (0, f"[1] b 2 {tmp_path}/there\n")
    assert err == "launchpad: --max-restarts 3/1h has no effect on this node: the head's is 0\n"


def test_each_node_says_how_its_own_ranks_are_bound(launchpad: Launchpad) -> None:
    port = free_port()
    head = launchpad.start("run", *c10d(port), "--bind", "core", "--report-bindings", "true")
    other = launchpad.start("run", *c10d(port, rdzv_conf="is_host=0"), "-n", 2, "true")
    code, _, err = ends(head)
    assert code == 0
    first, *rest = err.splitlines()
    assert re.fullmatch(r"launchpad: rank 0 on \S+: CPUs? [\d,-]+, memory of .*", first)
    assert [line.partition(": ")[2] for line in rest] == [
        f"rank {n} on {socket.gethostname()}.2: not bound" for n in (1, 2)
    ]
    assert ends(other) == (0, "", "")


@needs_torch
def test_torch_comes_up_across_nodes(launchpad: Launchpad) -> None:
    example = Path(__file__).parents[3] / "examples" / "all_reduce.py"
    port = free_port()
    jobs = [launchpad.start("run", *c10d(port), "-n", count, example) for count in (2, 1)]
    for job in jobs:
        code, out, err = ends(job)
        assert code == 0, err
        assert "of 3: the sum of all ranks is [3.0, 3.0, 3.0]" in out


@needs_mpi
def test_an_mpi_world_across_nodes(launchpad: Launchpad) -> None:
    port = free_port()
    script = Path(__file__).parents[2] / "programs" / "mpi_does.py"
    jobs = [launchpad.start("run", *c10d(port), "--backend", "mpi", "-n", 2, script, "sum") for _ in range(2)]
    printed = []
    for job in jobs:
        code, out, err = ends(job)
        assert code == 0, err
        printed += re.findall(r"sum (\d 4 10)$", out, re.M)
    assert sorted(printed) == [f"{rank} 4 10" for rank in range(4)]


def test_a_machine_that_is_only_offered_runs_what_the_head_says(launchpad: Launchpad, show: str) -> None:
    """And its output is shown by the head."""
    port = free_port()
    head = launchpad.start("run", *c10d(port), "-n", 2, show)
    joined = launchpad.start("join", f"127.0.0.1:{port}", "--slots", 3, "--rdzv-id", "j")
    code, out, err = ends(head)
    assert (code, err) == (0, "")
    assert sorted(re.findall(r"^\[\S+ +(\d)\] ", out, re.M)) == list("01234")
    assert ends(joined) == (0, "", "")


def test_the_folder_is_copied_to_a_machine_that_is_only_offered(launchpad: Launchpad, show: str) -> None:
    (launchpad.folder / "beside.txt").write_text("it is here")
    (launchpad.folder / show).write_text("import os\nprint(open('beside.txt').read(), os.getcwd())\n")
    launchpad.environ["XDG_CACHE_HOME"] = str(launchpad.folder.parent / "cache")
    port = free_port()
    head = launchpad.start("run", *c10d(port), "--sync", show)
    joined = launchpad.start("join", f"127.0.0.1:{port}", "--rdzv-id", "j")
    code, out, err = ends(head)
    assert (code, err) == (0, "")
    folders = re.findall(r"it is here (\S+)$", out, re.M)
    assert len(folders) == 2
    assert str(launchpad.folder) in folders
    assert any(folder.startswith(launchpad.environ["XDG_CACHE_HOME"]) for folder in folders)
    assert ends(joined) == (0, "", "")


# The end.


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_every_launchpad_ends_with_the_jobs_code_and_says_why(launchpad: Launchpad, failing: int) -> None:
    port = free_port()
    how = ["wait"] * 3
    how[failing] = "7"
    jobs = [launchpad.start("run", *static(rank, port, 3), "exits.py", *how) for rank in range(3)]
    for job in jobs:
        code, _, err = ends(job)
        assert code == 7, err
        assert re.search(rf"^launchpad: rank {failing} on \S+ failed first: exit code 7", err, re.M)


def _ready(job: Job) -> None:
    assert job.stdout is not None
    assert b"waiting" in job.stdout.readline()


@pytest.mark.parametrize("killed", [0, 1], ids=["head", "node"])
def test_a_launchpad_that_is_killed_ends_the_others(launchpad: Launchpad, killed: int) -> None:
    port = free_port()
    jobs = [launchpad.start("run", *static(rank, port), "exits.py", "wait", "wait") for rank in range(2)]
    for job in jobs:
        _ready(job)
    jobs[killed].kill()
    code, _, err = ends(jobs[1 - killed])
    assert code == 4, err
    if killed:
        assert re.search(r"^launchpad: \S+ was lost", err, re.M), err
    else:
        assert f"the head of the job at 127.0.0.1:{port} is gone; the ranks here were stopped" in err
    jobs[killed].communicate(timeout=DEADLINE)


def _ends_of_both(launchpad: Launchpad, asked: int, signum: int) -> list[tuple[int, str, str]]:
    """How two launchpads of a job end of which one gets a signal."""
    port = free_port()
    jobs = [launchpad.start("run", *static(rank, port), "exits.py", "wait", "wait") for rank in range(2)]
    for job in jobs:
        _ready(job)
    jobs[asked].send_signal(signum)
    return [ends(job) for job in jobs]


@pytest.mark.parametrize("asked", [0, 1], ids=["head", "node"])
def test_ctrl_c_on_any_node_ends_the_job(launchpad: Launchpad, asked: int) -> None:
    for code, _, err in _ends_of_both(launchpad, asked, signal.SIGINT):
        assert code == 130
        assert "the job was stopped by SIGINT" in err


@pytest.mark.parametrize("asked", [0, 1], ids=["head", "node"])
def test_a_signal_that_a_launchpad_passed_on_is_told_to_be_its_own(launchpad: Launchpad, asked: int) -> None:
    for code, _, err in _ends_of_both(launchpad, asked, signal.SIGUSR1):
        assert code == 138
        assert "killed by SIGUSR1 (User defined signal 1), which launchpad was sent and passed on; the program" in err


def test_ranks_on_all_nodes_are_restarted(launchpad: Launchpad) -> None:
    (launchpad.folder / "once.py").write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt)\n"
        "sys.exit(int(os.environ['RANK'] == '3' and attempt == '0'))\n"
    )
    port = free_port()
    jobs = [launchpad.start("run", *c10d(port), "-n", 2, "--max-restarts", 1, "once.py") for _ in range(2)]
    printed = 0
    for job in jobs:
        code, out, err = ends(job)
        assert code == 0, err
        printed += out.count("attempt 1")
    assert printed == 4


def test_a_lost_node_may_join_again(launchpad: Launchpad) -> None:
    port = free_port()
    line = ("run", *c10d(port), "--max-restarts", 1, "again.py")
    (launchpad.folder / "again.py").write_text(
        "import os, time\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt, flush=True)\n"
        f"time.sleep(0 if attempt == '1' else {DEADLINE})\n"
    )
    head = launchpad.start(*line)
    lost = launchpad.start(*line)
    for job in (head, lost):
        assert job.stdout is not None
        assert b"attempt 0" in job.stdout.readline()
    first, second = (head, lost) if leads(head, port) else (lost, head)
    second.kill()
    second.communicate(timeout=DEADLINE)
    again = launchpad.start(*line)
    for job in (first, again):
        code, out, err = ends(job)
        assert code == 0, err
        assert "attempt 1" in out


def test_the_record_has_the_end_of_what_other_nodes_ranks_wrote(launchpad: Launchpad) -> None:
    (launchpad.folder / "writes.py").write_text(
        "import os, sys, time\nrank = int(os.environ['RANK'])\n"
        "print('x' * 200_000)\nprint('the end of', rank, flush=True)\n"
        "open(f'wrote{rank}', 'w').close()\n"
        f"deadline = time.monotonic() + {DEADLINE}\n"
        "while not os.path.exists(f'wrote{1 - rank}') and time.monotonic() < deadline: time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    port = free_port()
    jobs = [launchpad.start("run", *static(rank, port), "--log-dir", f"logs{rank}", "writes.py") for rank in range(2)]
    for rank, job in enumerate(jobs):
        code, out, _ = ends(job)
        assert code == 3
        assert f"[{rank}] the end of {rank}" in out
        assert f"the end of {1 - rank}" not in out
        (log,) = launchpad.folder.glob(f"logs{rank}/*/attempt_0/0/stdout.log")
        assert log.read_text().endswith(f"the end of {rank}\n")
        assert len(log.read_text()) > 200_000
    record = launchpad.run("logs", "--rank", "1")
    assert "the end of 1" in record.stdout
    assert 60_000 < len(record.stdout) < 70_000


# Who may join.


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"rdzv_id": "mine"}, {"rdzv_id": "other"}, "the job's secret differs; pass the same --rdzv-id"),
        ({}, {"nnodes": "3"}, "--nnodes differs: 2 on the head, 3 here"),
    ],
)
def test_a_launchpad_that_does_not_belong_is_not_let_in(
    launchpad: Launchpad, first: dict[str, str], second: dict[str, str], message: str
) -> None:
    port = free_port()
    head = launchpad.start("run", *static(0, port, **first), "exits.py", "0", "0")
    done = launchpad.run("run", *static(1, port, **second), "exits.py", "0", "0")
    assert done.returncode == 3
    assert message in done.stderr
    head.terminate()
    code, _, err = ends(head)
    assert code == 143
    assert f"a node at 127.0.0.1 can't join: {message}" in err


def test_a_refusal_that_nobody_reads_holds_up_no_node(launchpad: Launchpad) -> None:
    """The head's stderr is a pipe that is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    port = free_port()
    head = launchpad.start("run", *c10d(port, rdzv_conf="is_host=1"), "true", stderr=writer)
    done = launchpad.run("run", *c10d(port, rdzv_id="other", rdzv_conf="is_host=0"), "true")
    assert (done.returncode, "the job's secret differs" in done.stderr) == (3, True)
    done = launchpad.run("run", *c10d(port, rdzv_conf="is_host=0"), "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert head.wait(timeout=DEADLINE) == 0
    os.close(reader)
    os.close(writer)


def test_a_node_that_is_stopped_while_it_waits_leaves_its_place(launchpad: Launchpad) -> None:
    port = free_port()
    head = launchpad.start("run", *static(0, port, 3), "exits.py", "0", "0", "0")
    both = [launchpad.start("run", *static(1, port, 3), "exits.py", "0", "0", "0") for _ in range(2)]
    wait_until(lambda: any(job.poll() is not None for job in both), "one of them to be refused")
    (waits,) = (job for job in both if job.poll() is None)  # the other one has joined
    waits.terminate()
    assert ends(waits) == (143, "", "launchpad: stopped by SIGTERM before any rank was started\n")
    others = [launchpad.start("run", *static(rank, port, 3), "exits.py", "0", "0", "0") for rank in (1, 2)]
    assert [ends(job)[0] for job in (head, *others)] == [0, 0, 0]


def test_a_head_whose_name_has_no_address_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's own name may come into the DNS after the pod has started."""
    answers: list[list[str]] = [[], [], ["127.0.0.1"]]

    def resolve(host: str, port: int) -> list[str]:  # noqa: ARG001
        if not (found := answers.pop(0)):
            raise OSError(-2, "Name or service not known")
        return found

    monkeypatch.setattr(joining, "resolve", resolve)
    monkeypatch.setattr(joining, "RESOLVE_SECONDS", 0.0)
    assert joining.leads(Meeting("pod-0.train", 29400, 2), pytest.fail)
    assert answers == []
    answers[:] = [[]] * 3
    with pytest.raises(
        NodeError, match=r"^waiting for the head of the job at pod-0\.train:29400: pod-0\.train can't be"
    ):
        joining.leads(Meeting("pod-0.train", 29400, 2, join_seconds=0.0), pytest.fail)


@pytest.mark.parametrize("way", ["static", "c10d"])
def test_two_nodes_of_one_rank(launchpad: Launchpad, way: str) -> None:
    port = free_port()
    first, other = static(0, port, 3), static(1, port, 3)
    if way == "c10d":
        first, other = c10d(port, 3), c10d(port, 3, node_rank="1")
    head = launchpad.start("run", *first, "exits.py", "0", "0", "0")
    wait_until(lambda: listeners.holder(port), "the head")
    jobs = [launchpad.start("run", *other, "exits.py", "0", "0", "0") for _ in range(2)]
    wait_until(lambda: any(job.poll() is not None for job in jobs), "one of them to be refused")
    head.terminate()
    ended = sorted(map(ends, jobs))
    assert [code for code, _, _ in ended] == [3, 143]
    assert "--node-rank 1 has already joined: give each node its own" in ended[0][2]
    assert ends(head)[0] == 143


def test_node_ranks_order_the_nodes_of_c10d_but_for_the_first(launchpad: Launchpad) -> None:
    port = free_port()
    words = ("sh", "-c", "echo $GROUP_RANK $GIVEN")
    head = launchpad.start("run", *c10d(port, 3, node_rank="2"), "-x", "GIVEN=2", *words)
    assert head.stderr is not None
    said = b"launchpad: --node-rank 2: the node of --rdzv-endpoint, this one, has node rank 0 (c10d)\n"
    assert head.stderr.readline() == said
    others = [
        launchpad.start("run", *c10d(port, 3, node_rank=str(rank)), "-x", f"GIVEN={rank}", *words) for rank in (7, 5)
    ]
    assert {ends(job)[1] for job in (head, *others)} == {"[0] 0 2\n", "[1] 1 5\n", "[2] 2 7\n"}


def test_a_node_that_cannot_take_part_is_named_by_the_head(launchpad: Launchpad) -> None:
    port = free_port()
    head = launchpad.start("run", *static(0, port), "exits.py", "0", "0")
    done = launchpad.run("run", *static(1, port), "missing.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such script: missing.py" in done.stderr
    code, _, err = ends(head)
    assert code == 3
    assert f"launchpad: error: {socket.gethostname()} can't take part: no such script: missing.py" in err


def test_nodes_that_never_come_are_counted(launchpad: Launchpad) -> None:
    done = launchpad.run("run", *c10d(free_port(), 3, rdzv_conf="join_timeout=0.5"), "exits.py", "0")
    assert done.returncode == 3
    assert f"1 of 3 nodes have joined ({socket.gethostname()}) within 0.5 s" in done.stderr
    port = free_port()
    done = launchpad.run("run", *static(1, port, rdzv_conf="join_timeout=0.5"), "exits.py", "0")
    assert done.returncode == 3
    assert f"waiting for the head of the job at 127.0.0.1:{port}: Connection refused; gave up after 0.5" in done.stderr


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (b"220 mail.example.org ESMTP\r\n", "something other than a launchpad that waits for nodes answers there: it"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something other than a launchpad that waits for nodes answers there"),
    ],
)
def test_another_server_at_the_endpoint_is_recognised(launchpad: Launchpad, greeting: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        job = launchpad.start("run", *static(1, port), "exits.py", "0", "0")
        listener.settimeout(DEADLINE)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(greeting)
            code, _, err = ends(job)
    assert code == 3
    assert f"127.0.0.1:{port}: {message}" in err


def test_a_head_that_does_not_answer_is_told_with_a_reason(launchpad: Launchpad) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):  # what comes after them is dropped
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        done = launchpad.run("run", *static(1, port), "--rdzv-conf", "join_timeout=1", "exits.py", "0", "0")
    assert done.returncode == 3
    reason = "no answer; the host is down, or a firewall drops what is sent to it"
    assert f"waiting for the head of the job at 127.0.0.1:{port}: {reason}; gave up after 1 s" in done.stderr


def test_a_port_that_another_program_holds(launchpad: Launchpad) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launchpad.run("run", *static(0, port), "exits.py", "0")
    assert done.returncode == 2
    assert f"the nodes of this job meet at 127.0.0.1:{port}, and launchpad can't listen there (Address" in done.stderr
    assert f" already in use: pid {os.getpid()}, " in done.stderr


@pytest.mark.parametrize("way", ["file", "variable"])
def test_the_secret_comes_from_a_file_or_a_variable(launchpad: Launchpad, show: str, way: str) -> None:
    port = free_port()
    (launchpad.folder / "secret").write_text("a long one\n")
    options = {"rdzv_secret_file": "secret"} if way == "file" else {}
    if way == "variable":
        launchpad.environ["LAUNCHPAD_SECRET"] = "a long one"
    jobs = [launchpad.start("run", *c10d(port, **options), show) for _ in range(2)]
    for job in jobs:
        code, out, err = ends(job)
        assert (code, err) == (0, "")
        assert "a long one" not in out
        assert out.endswith(" False\n")  # ranks don't get it
    done = launchpad.run("run", *c10d(port, rdzv_secret_file="nowhere"), show)
    assert (done.returncode, done.stderr) == (
        2,
        "launchpad: error: --rdzv-secret-file nowhere: No such file or directory\n",
    )


def test_dry_run_of_one_node_of_several_says_so(launchpad: Launchpad) -> None:
    done = launchpad.run("run", *static(1, 29512), "--dry-run", "--json", "exits.py")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["nodes"]) == 1
    assert done.stderr == (
        "launchpad: RANK and WORLD_SIZE don't count the ranks of other nodes, whose number is not known here\n"
    )


# The door, from inside.


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    for link, _ in door.joining._nodes:
        link.abandon()
    door.joining.leave()


def test_who_comes_once_the_job_is_known_to_be_led_elsewhere_is_sent_there() -> None:
    """Whoever has come before is told by the head, which is about to follow the other one."""
    door = Door()
    first = door.join(OFFER._replace(key="a"))
    door.joining.told(("127.0.0.1", 29999), 2)
    with pytest.raises(LedElsewhere) as raised:
        door.join(OFFER._replace(key="b"))
    assert raised.value.place == ("127.0.0.1", 29999)
    assert door.joining.follow() is not None
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    first.begin(heard.put)
    assert heard.get(timeout=DEADLINE) == HeadMoved("127.0.0.1", 29999)
    first.close()
    door.joining.leave()


def test_frames_go_both_ways(door: Door) -> None:
    node = door.join()
    ((link, offer),) = door.joining.wait()
    assert offer == OFFER
    commands: list[object] = []
    heard, answered = threading.Event(), threading.Event()
    events: list[object] = []
    node.begin(lambda command: (commands.append(command), heard.set()))
    link.deliver(lambda event: (events.append(event), answered.set()))
    link.send(Ping(7))
    assert heard.wait(DEADLINE)
    node.send(Pong(1, 7))
    assert answered.wait(DEADLINE)
    assert (commands, events) == ([Ping(7)], [Pong(1, 7)])
    answered.clear()
    node.close()
    assert link.gone.wait(DEADLINE)
    assert events[-1] is None


def test_what_a_node_says_about_the_whole_job_has_no_effect() -> None:
    offer = NodeOffer.from_json(json.loads(json.dumps(OFFER.as_json())))
    assert offer.differences(SPEC) == []
    assert offer.differences(JobSpec(Target("program", "true"), limits=Limits(restart="always"))) == [
        "--max-restarts 3/1h has no effect on this node: the head's is 0",
        "--progress ckpt/* has no effect on this node: the head's is not given",
    ]


def test_a_node_too_many_is_a_spare_or_refused(door: Door) -> None:
    nodes = [door.join(), door.join()]
    assert [node.notes for node in nodes] == [
        [],
        ["the job has its 2 nodes: this one is a spare, for when one of them is lost"],
    ]
    for node in nodes:
        node.close()
    static = Door(static=True)
    node = static.join()
    with pytest.raises(JoinRefused, match="all 2 nodes of the job have joined already"):
        static.join()
    node.close()
    static.joining.leave()


def test_another_version_is_refused(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    node = door.join()
    monkeypatch.setattr(client, "__version__", "0.0.1")
    with pytest.raises(JoinRefused, match=r"it runs launchpad 0\.0\.1, and the head \S+; install the same version"):
        door.join()
    node.close()


def test_who_has_proven_nothing_controls_no_terminal(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "__version__", "\x1b]52;c;AAAA\x07\n::error::")
    with pytest.raises(JoinRefused) as refused:
        door.join()
    assert str(refused.value).isprintable()


def test_who_is_in_the_middle_cannot_pass_the_proof_on(door: Door) -> None:
    """Its certificate is another one, so each side's proof is wrong for the other."""
    context, _ = proof.head_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)

        def between() -> None:
            plain = listener.accept()[0]
            with (
                context.wrap_socket(plain, server_side=True) as outer,
                proof.node_context().wrap_socket(socket.create_connection(door.address)) as inner,
            ):
                for _ in range(2):
                    inner.sendall(outer.recv(1 << 16))
                    outer.sendall(inner.recv(1 << 16))

        thread = threading.Thread(target=between)
        thread.start()
        with pytest.raises(JoinRefused, match="the job's secret differs"):
            HeadConnection(listener.getsockname(), b"s", OFFER.as_json())
        thread.join(DEADLINE)
    wait_until(lambda: door.said, "the refusal to be told")
    (said,) = door.said
    assert said.startswith("a node at 127.0.0.1 can't join: the job's secret differs; pass the same --rdzv-id")
    assert said.endswith("(if it is the same, somebody is intercepting the connection)")


def test_an_impostor_head_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    real = server.proof
    monkeypatch.setattr(server, "proof", lambda *given: real(*given) if given[1] == "node" else "made up")
    with pytest.raises(JoinRefused, match="what listens there doesn't know the job's secret"):
        door.join()
    door.joining.leave()


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01", os.urandom(1 << 16)],
    ids=["silence", "http", "a drip of TLS", "noise"],
)
def test_a_stranger_delays_nobody_and_is_dropped(door: Door, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_SECONDS", 5.0)
    strangers = [socket.create_connection(door.address) for _ in range(20)]
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.sendall(words)
    node = door.join()
    assert len(door.joining.wait()) == 1
    for stranger in strangers:
        stranger.settimeout(DEADLINE)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 16):
                pass
        stranger.close()
    node.close()


def test_nodes_that_come_all_at_once_do_not_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_GREETING", 3)
    monkeypatch.setattr(server, "FAIR_SECONDS", DEADLINE)
    door = Door(nodes=21)
    with ThreadPoolExecutor(20) as pool:
        nodes = list(pool.map(lambda _: door.join(OFFER._replace(nnodes="21")), range(20)))
    assert len(door.joining.wait()) == 20
    for node in nodes:
        node.close()
    door.joining.leave()


def test_many_strangers_who_say_nothing_make_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_GREETING", 3)
    monkeypatch.setattr(server, "FAIR_SECONDS", 0.1)
    strangers = [socket.create_connection(door.address) for _ in range(20)]
    node = door.join()
    assert len(door.joining.wait()) == 1
    for stranger in strangers:
        stranger.close()
    node.close()


FULL_OF_FILES = """
import contextlib, os, resource, selectors, socket, sys
from tests.support.command import wait_until
from tests.support.joined import Door
most = int(sys.argv[1])
door = Door()
# Open as many files as are allowed, but for those that connections to the door need at our end.
strangers = [socket.socket() for _ in range(20)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
held = []
with contextlib.suppress(OSError):
    while len(held) < 64:
        held.append(os.open(os.devnull, os.O_RDONLY))
for stranger in strangers:
    stranger.connect(door.address)
listens = lambda: door.joining._server._listener.fileno() in door.joining._server.reactor._strange
if most == 64:
    wait_until(lambda: not listens(), "the door to pause")
else:
    wait_until(lambda: len(door.joining._server._greeting) == len(strangers), "all to be let in")
for fd in held:
    os.close(fd)
for stranger in strangers:
    stranger.close()
node = door.join()
assert len(door.joining.wait()) == 1
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
node.close()
os._exit(0)
"""


@pytest.mark.parametrize(("most", "limit"), [(64, 64), (128, 128)])
def test_more_connections_than_files_may_be_open(most: int, limit: int) -> None:
    """The limit is raised where that is allowed; else the door pauses, and goes on when there is room again."""
    argv = [sys.executable, "-c", FULL_OF_FILES, str(most)]
    root = Path(__file__).parents[3]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE, cwd=root)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{limit}\n", "")


def test_nonsense_after_the_proof_ends_only_that_connection(door: Door) -> None:
    with proof.node_context().wrap_socket(socket.create_connection(door.address)) as peer:
        peer.sendall(b'{"launchpad": "x"}\n')
        peer.settimeout(DEADLINE)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert peer.recv(100) == b""
    node = door.join()
    ((link, _),) = door.joining.wait()
    ended = threading.Event()
    events: list[object] = []
    link.deliver(lambda event: (events.append(event), ended.set() if event is None else None))
    node._connection.send(b"\0\0\0\0junk")
    assert ended.wait(DEADLINE)
    assert isinstance(events[0], Exception)
    assert "not a frame" in str(events[0])
    node.close()
