"""Roles on nodes that each join by a line of their own: who runs where, how they end, and what can't be combined."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
from pathlib import Path

import psutil
import pytest

from launchpad.job.offer import NodeOffer
from launchpad.protocol.commands import JoinMore
from launchpad.transport.join.client import HeadConnection, JoinRefused
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.joined import Job, c10d, ends, leads, said_until, static
from tests.support.needs import needs_torch
from tests.support.ports import free_port

FILE = """
[jobs.j.roles.serve]
target = "serve.py"
service = true
ports = ["hello"]
ready = "tcp:hello"

[jobs.j.roles.ask]
target = "ask.py"
nproc = 3
replicas = 2
after = "serve"
"""

SERVE = """\
import os, socket
listener = socket.create_server(("", int(os.environ["LAUNCHPAD_PORT_HELLO"])), reuse_port=True)
while True:
    taken, _ = listener.accept()
    taken.sendall(b"hello")
    taken.close()
"""

ASK = """\
import os, socket
host, _, port = os.environ["LAUNCHPAD_SERVE_HELLO"].rpartition(":")
said = socket.create_connection((host, int(port))).makefile().read()
print(said, *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LAUNCHPAD_REPLICA")))
"""


def write(launchpad: Launchpad, text: str = FILE, **programs: str) -> None:
    (launchpad.folder / "job.toml").write_text(text)
    for name, program in {"serve": SERVE, "ask": ASK, **programs}.items():
        (launchpad.folder / f"{name}.py").write_text(program)


def line(options: list[str]) -> tuple[object, ...]:
    return ("run", *options, "--config", "job.toml", "--job", "j")


def below(job: Job) -> list[int]:
    """The agents and ranks of this launchpad."""
    return [child.pid for child in psutil.Process(job.pid).children(recursive=True)]


def are_gone(pids: list[int]) -> None:
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "all to be gone")


def test_nodes_share_the_ranks_evenly_and_the_head_shows_them(launchpad: Launchpad) -> None:
    """Three on the first, two each on the others: the worlds of replicas are on two nodes each."""
    write(launchpad)
    port = free_port()
    jobs = [launchpad.start(*line(c10d(port, 3))) for _ in range(3)]
    ended = [ends(job) for job in jobs]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 3
    (out,) = [out for _, out, _ in ended if out]
    assert sorted(out.splitlines()) == [
        "[ask.0 0] hello 0 3 0 0",
        "[ask.0 1] hello 1 3 0 0",
        "[ask.0 2] hello 2 3 1 0",
        "[ask.1 0] hello 0 3 0 1",
        "[ask.1 1] hello 1 3 1 1",
        "[ask.1 2] hello 2 3 1 1",
    ]


def test_launchpad_join_says_how_many_ranks_it_takes_and_roles_which_node(launchpad: Launchpad, host: str) -> None:
    """With static's node ranks; the secret is in no command line."""
    write(launchpad, FILE.replace("service = true", f'service = true\nhosts = "{host}.2"'))
    secret = launchpad.folder / "secret"
    secret.write_bytes(b"not text: \x00\xff")
    port = free_port()
    options = ["--rdzv-secret-file", str(secret)]
    head = launchpad.start("run", *static(0, port), *options, "--config", "job.toml", "--job", "j")
    node = launchpad.start("join", f"127.0.0.1:{port}", "--slots", 5, *options)
    code, out, err = ends(head)
    assert (code, err) == (0, "")
    assert [text.split()[-2] for text in sorted(out.splitlines())] == ["0", "1", "1", "0", "0", "0"]
    assert ends(node) == (0, "", "")


@pytest.fixture
def host() -> str:
    return os.uname().nodename


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_world_over_two_nodes_is_a_process_group(launchpad: Launchpad) -> None:
    group = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(1)\n"
        "dist.all_reduce(ones)\nprint('sum', int(ones))\ndist.destroy_process_group()\n"
    )
    write(launchpad, '[jobs.j.roles.a]\ntarget = "group.py"\n[jobs.j.roles.b]\ntarget = "group.py"\nnproc = 3\n',
        group=group)  # fmt: skip
    port = free_port()
    ended = [ends(job) for job in [launchpad.start(*line(c10d(port))) for _ in range(2)]]
    assert [code for code, _, _ in ended] == [0, 0], ended
    out = "".join(out for _, out, _ in ended)
    assert sorted(out.splitlines()) == ["[a 0] sum 1", *(f"[b {rank}] sum 3" for rank in range(3))]


def test_the_first_to_fail_is_blamed_on_each_node(launchpad: Launchpad) -> None:
    write(launchpad, ask="import os, sys, time\nsys.exit(7 * (os.environ['RANK'] == '2')) or time.sleep(600)\n")
    port = free_port()
    ended = [ends(job) for job in [launchpad.start(*line(c10d(port))) for _ in range(2)]]
    for code, _, err in ended:
        assert code == 7
        assert "rank 2" in err
        assert "failed first: exit code 7" in err


RUNS = "import os, time\nopen('up-' + str(os.getpid()), 'w').close()\ntime.sleep(600)\n"


def up(launchpad: Launchpad, count: int) -> list[int]:
    """The ranks, once so many are up."""
    wait_until(lambda: len(list(launchpad.folder.glob("up-*"))) == count, f"{count} ranks")
    return [int(path.name[3:]) for path in launchpad.folder.glob("up-*")]


def head_and_node(launchpad: Launchpad, runs: str = RUNS) -> tuple[Job, Job]:
    """Of a job with two worlds on each of two nodes."""
    name = os.uname().nodename
    role = f'target = "runs.py"\nhosts = ["{name}", "{name}.2"]\n'
    write(launchpad, f"[jobs.j.roles.a]\n{role}[jobs.j.roles.b]\n{role}", runs=runs)
    port = free_port()
    return launchpad.start(*line(static(0, port))), launchpad.start(*line(static(1, port)))


@pytest.mark.parametrize("who", ["head", "node"])
def test_a_signal_to_either_ends_all(launchpad: Launchpad, who: str) -> None:
    head, node = head_and_node(launchpad)
    up(launchpad, 4)
    all_of_them = [*below(head), *below(node)]
    (head if who == "head" else node).send_signal(signal.SIGINT)
    assert [ends(job)[0] for job in (head, node)] == [130, 130]
    are_gone(all_of_them)


def test_a_signal_for_the_ranks_reaches_all_worlds_of_the_node(launchpad: Launchpad) -> None:
    got = "signal.signal(signal.SIGUSR1, lambda *_: open('got-' + os.environ['LAUNCHPAD_ROLE'], 'w').close())\n"
    head, node = head_and_node(launchpad, f"import os, signal\n{got}{RUNS}")
    up(launchpad, 4)
    node.send_signal(signal.SIGUSR1)
    wait_until(lambda: {path.name for path in launchpad.folder.glob("got-*")} == {"got-a", "got-b"}, "both to hear it")
    head.send_signal(signal.SIGTERM)
    assert [ends(job)[0] for job in (head, node)] == [143, 143]


def test_a_lost_node_ends_the_job(launchpad: Launchpad) -> None:
    head, node = head_and_node(launchpad)
    up(launchpad, 4)
    all_of_them = [*below(head), *below(node)]
    node.kill()
    code, _, err = ends(head)
    assert code == 4
    assert f"{os.uname().nodename}.2" in err
    node.communicate()
    are_gone(all_of_them)


def test_a_lost_head_ends_the_nodes(launchpad: Launchpad) -> None:
    head, node = head_and_node(launchpad)
    up(launchpad, 4)
    all_of_them = [*below(head), *below(node)]
    head.kill()
    code, out, err = ends(node)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "is gone; the ranks here were stopped" in err
    head.communicate()
    are_gone(all_of_them)


def test_a_node_says_that_an_agent_for_another_world_cannot_be_started(launchpad: Launchpad) -> None:
    name = os.uname().nodename
    role = f'target = "runs.py"\nhosts = ["{name}", "b"]\n'
    write(launchpad, f"[jobs.j.roles.a]\n{role}[jobs.j.roles.b]\n{role}", runs=RUNS)
    port = free_port()
    head = launchpad.start(*line(c10d(port)))
    wait_until(lambda: leads(head, port), "the head to listen")
    place, offer = ("127.0.0.1", port), NodeOffer("b", sys.executable, key="k")
    with contextlib.closing(HeadConnection(place, b"j", offer.as_json())) as node:
        heard: queue.Queue[object] = queue.Queue()
        node.begin(heard.put)
        assert heard.get(timeout=DEADLINE) == JoinMore(1)
        failed = offer._replace(beside="k", failed="this node's agent can't be started: No memory")
        with pytest.raises(JoinRefused, match="the head has been told"):
            HeadConnection(place, b"j", failed.as_json())
        code = 3
        assert heard.get(timeout=DEADLINE).code == code
        node.close()
    ended = ends(head)
    assert ended[0] == code
    assert "b: this node's agent can't be started: No memory" in ended[2]


def test_a_further_offer_of_a_job_that_is_over_joins_no_other_one(launchpad: Launchpad) -> None:
    write(launchpad)
    port = free_port()
    head = launchpad.start(*line(c10d(port)))
    wait_until(lambda: leads(head, port), "the head to listen")
    with pytest.raises(JoinRefused, match="have joined already"):
        HeadConnection(("127.0.0.1", port), b"j", NodeOffer("b", "python3", key="k", beside="k").as_json())
    head.send_signal(signal.SIGTERM)
    assert ends(head)[0] == 143


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=a"], "--nnodes 2:3: with roles, the number of nodes"),
        (["--nnodes=2", "--rdzv-endpoint=a", "--hosts=a"], "--nnodes 2 is for nodes that join, and --hosts for hosts"),
        (["--nnodes=2", "--rdzv-endpoint=a", "--dry-run"], "--dry-run can't be combined with nodes that join (--nnode"),
        (["--nnodes=2", "--rdzv-endpoint=a", "--detach"], "--detach can't be combined with nodes that join (--nnodes)"),
        (["--nnodes=2"], "where do the nodes meet?"),
        (["--nnodes=2", "--rdzv-endpoint=a", "--exclude=b"], "is for nodes that join, and --exclude for hosts"),
        (["--node-rank=1", "--rdzv-endpoint=a"], "--node-rank 1: with one node the only node rank is 0"),
        (["--master-port=9"], "--master-addr or --master-port can't be combined with roles"),
        (["--health=true"], "--health can't be combined with roles"),
    ],
)
def test_what_cannot_be_combined(launchpad: Launchpad, options: list[str], why: str) -> None:
    write(launchpad)
    done = launchpad.run(*line(options))
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


@pytest.mark.parametrize(
    ("setting", "slots", "why"),
    [
        ('hosts = "elsewhere"', 1, "jobs.j.roles.serve, hosts: elsewhere is none of the job's nodes, which are"),
        ("", "auto", ".2: --slots auto: in a job with roles, give a number"),
    ],
)
def test_nodes_are_told_why_the_job_cannot_start(launchpad: Launchpad, setting: str, slots: object, why: str) -> None:
    write(launchpad, FILE.replace("service = true", f"service = true\n{setting}"))
    port = free_port()
    head = launchpad.start(*line(c10d(port)))
    node = launchpad.start("join", f"127.0.0.1:{port}", "--slots", slots, "--rdzv-id", "j")
    ended = [ends(job) for job in (head, node)]
    assert [code for code, _, _ in ended] == [2 if setting else 3] * 2
    assert all(why in err for _, _, err in ended)


def test_one_node_needs_no_other(launchpad: Launchpad) -> None:
    write(launchpad, '[jobs.j.roles.a]\ntarget = "ask.py"\n', ask="print('here')\n")
    done = launchpad.run(*line(c10d(free_port(), 1)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[a 0] here\n", "")


def test_a_job_without_roles_refuses_a_node_that_has_them(launchpad: Launchpad) -> None:
    write(launchpad, ask="print('here')\n")
    port = free_port()
    head = launchpad.start("run", *c10d(port), "ask.py")
    wait_until(lambda: leads(head, port), "the head to listen")
    node = launchpad.start(*line(c10d(port)), "--junit=j.xml")
    _, _, err = ends(node)
    assert "the job has no roles; run the head's line here too, or launchpad join" in err
    head.send_signal(signal.SIGTERM)
    assert ends(head)[0] == 143


def test_where_another_job_is_led_from_elsewhere_roles_do_not_start(launchpad: Launchpad) -> None:
    """Its head says so at the endpoint, at which it looks for its own nodes."""
    write(launchpad)
    port = free_port()
    head = launchpad.start(*line(c10d(port)))
    wait_until(lambda: leads(head, port), "the head to listen")
    HeadConnection(("127.0.0.1", port), b"j", None, tell={"led": ["::1", 9], "term": 3}).close()
    code, out, err = ends(head)
    assert (code, out) == (3, "")
    assert "the job is led from [::1]:9: it is another one, without roles" in err


def test_a_node_without_ranks_waits_for_the_end_and_another_job_is_refused(launchpad: Launchpad) -> None:
    write(launchpad, '[jobs.j.roles.a]\ntarget = "ask.py"\n', ask="print('here')\n")
    port = free_port()
    head = launchpad.start(*line(c10d(port)))
    wait_until(lambda: leads(head, port), "the head to listen")
    other = launchpad.start("run", *c10d(port), "ask.py")
    assert "the job has roles; run the head's line here too, or launchpad join" in ends(other)[2]
    assert "can't join: the job has roles" in said_until(head, "can't join")
    node = launchpad.start("join", f"127.0.0.1:{port}", "--rdzv-id", "j")
    code, out, err = ends(head)
    assert (code, out) == (0, "[a 0] here\n")
    assert f"no ranks run on {os.uname().nodename}.2: the other nodes have slots for all of them" in err
    assert ends(node) == (0, "", "")
