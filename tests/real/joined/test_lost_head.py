"""The launchpad that leads the job is lost: the others wait for one that is started again at the endpoint."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from xml.etree import ElementTree

import psutil
import pytest

from launchpad.job.offer import NodeOffer
from launchpad.job.succession import Lead, Peer, Roster
from launchpad.runner.joining import _all_back, _in_order
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.gpus import FakeGpus
from tests.support.joined import Job, c10d, ends, leads, said_until, started
from tests.support.ports import free_port

# Each attempt of each rank leaves a file; they end when the test says so. Rank 1 may fail once, after rank 0 has begun.
STAYS = """\
import glob, os, sys, time
gpus = filter(None, [os.environ.get("CUDA_VISIBLE_DEVICES")])
print("node", os.environ["GROUP_RANK"], "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], *gpus, flush=True)
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
if os.environ["RANK"] == "1" and os.path.exists("fail"):
    while not glob.glob("0-*"): time.sleep(0.01)
    os.remove("fail")
    sys.exit(7)
while not os.path.exists("go"): time.sleep(0.01)
"""


def begin(
    launchpad: Launchpad, port: int, nodes: str, *more: object, seconds: float = DEADLINE, last_call: float = 0.2
) -> Job:
    (launchpad.folder / "stays.py").write_text(STAYS)
    conf = f"last_call_timeout={last_call:g},join_timeout={seconds:g}"
    return launchpad.start("run", *c10d(port, rdzv_conf=conf, nnodes=nodes), *more, "stays.py")


def is_alive(process: psutil.Process) -> bool:
    """And no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def lose_head(launchpad: Launchpad, port: int, nodes: str, *more: object, **how: float) -> tuple[Job, Job]:
    """A job of two nodes whose head is killed. Returns the head, and the other one."""
    starts = 4 if (launchpad.folder / "fail").exists() else 2
    jobs = [begin(launchpad, port, nodes, *more, **how) for _ in range(2)]
    started(launchpad, starts)
    head, other = jobs if leads(jobs[0], port) else jobs[::-1]
    head.kill()
    head.communicate(timeout=DEADLINE)
    return head, other


@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_the_job_goes_on_under_a_head_that_is_started_again(launchpad: Launchpad, nodes: str) -> None:
    """The restart that a rank has used up stays used up, and losing the head takes no other one."""
    (launchpad.folder / "fail").touch()
    port = free_port()
    _, other = lose_head(launchpad, port, nodes, "--max-restarts", 2, last_call=DEADLINE)
    gone = f"the head of the job at 127.0.0.1:{port} is gone"
    said_until(other, f"{gone}; the ranks here were stopped; waiting for launchpad")
    again = begin(launchpad, port, nodes, "--max-restarts", 2, last_call=DEADLINE)
    started(launchpad, 6)
    (launchpad.folder / "go").touch()
    code, out, err = ends(again)
    assert code == 0, err
    assert "node 0 restarts 1" in out
    assert "launchpad: going on with the job of" in err
    assert "whose head was lost" in err
    code, out, err = ends(other)
    assert code == 0, err
    assert out.splitlines()[-1] == "[1] node 1 restarts 1"


@pytest.mark.parametrize("dies", [False, True])
def test_nodes_wait_for_one_that_comes_back_after_the_head(launchpad: Launchpad, dies: bool) -> None:
    """For longer than an agent waits for a silent head; and one whose agent has died meanwhile gets another one."""
    port = free_port()
    jobs = [begin(launchpad, port, "3", "--max-restarts", 1, "--heartbeat-timeout", 1) for _ in range(3)]
    started(launchpad, 3)
    head = next(job for job in jobs if leads(job, port))
    other, stays = (job for job in jobs if job is not head)
    for job in (head, other):
        job.kill()
        job.communicate(timeout=DEADLINE)
    again = begin(launchpad, port, "3", "--max-restarts", 1, "--heartbeat-timeout", 1)
    said_until(again, "2 of 3 nodes have joined")
    for agent in psutil.Process(stays.pid).children() if dies else ():
        agent.kill()
    third = begin(launchpad, port, "3", "--max-restarts", 1, "--heartbeat-timeout", 1)
    started(launchpad, 6)
    (launchpad.folder / "go").touch()
    for job in (again, stays, third):
        code, _, err = ends(job)
        assert code == 0, err


def test_a_machine_that_is_only_offered_waits_too(launchpad: Launchpad) -> None:
    port = free_port()
    head = begin(launchpad, port, "2", "--max-restarts", 1)
    offered = launchpad.start("join", f"127.0.0.1:{port}", "--rdzv-id", "j")
    started(launchpad, 2)
    head.kill()
    head.communicate(timeout=DEADLINE)
    said_until(offered, "waiting for launchpad to be started there again")
    again = begin(launchpad, port, "2", "--max-restarts", 1)
    started(launchpad, 4)
    (launchpad.folder / "go").touch()
    assert [ends(job)[0] for job in (again, offered)] == [0, 0]


def test_another_node_leads_and_the_one_that_was_lost_joins_it(launchpad: Launchpad) -> None:
    """Three heads, one after the other; whoever stays keeps its place among the others."""
    port = free_port()
    first = begin(launchpad, port, "2:3", last_call=DEADLINE)
    wait_until(lambda: leads(first, port), "the first one to listen")
    jobs = [first, *(begin(launchpad, port, "2:3", last_call=DEADLINE) for _ in range(2))]
    started(launchpad, 3)
    first.kill()
    first.communicate(timeout=DEADLINE)
    started(launchpad, 3 + 2)
    again = begin(launchpad, port, "2:3", last_call=DEADLINE)
    started(launchpad, 3 + 2 + 3)
    lines = {}
    for job in jobs[1:]:
        assert job.stdout is not None
        lines[job] = [job.stdout.readline().decode() for _ in range(3)]
    second, third = sorted(lines, key=lines.__getitem__)
    assert lines[second] == [f"[{number}] node {number} restarts 0\n" for number in (1, 0, 0)]
    assert lines[third] == [f"[{number}] node {number} restarts 0\n" for number in (2, 1, 1)]
    second.kill()
    assert b"launchpad: leading the job from here, with" in second.communicate(timeout=DEADLINE)[1]
    started(launchpad, 3 + 2 + 3 + 2)
    (launchpad.folder / "go").touch()
    code, out, err = ends(third)
    assert code == 0, err
    assert out == "[0] node 0 restarts 0\n"
    code, out, err = ends(again)
    assert code == 0, err
    assert err.startswith("launchpad: the job is led from 127.0.0.1:")
    assert out.splitlines() == ["[2] node 2 restarts 0", "[1] node 1 restarts 0"]


@pytest.mark.parametrize("size", ["1:2", "2:3"])
def test_a_head_that_gets_term_leaves_the_job(launchpad: Launchpad, size: str) -> None:
    """Its machine is taken away: the others go on, and it joins them when it comes back."""
    port, most = free_port(), int(size[-1])
    first = begin(launchpad, port, size, last_call=DEADLINE)
    wait_until(lambda: leads(first, port), "the first one to listen")
    others = [begin(launchpad, port, size, last_call=DEADLINE) for _ in range(most - 1)]
    started(launchpad, most)
    first.send_signal(signal.SIGTERM)
    code, out, err = ends(first)
    assert code == 128 + signal.SIGTERM, err
    assert "launchpad: this node has left the job, which goes on without it" in err
    assert out == "[0] node 0 restarts 0\n"
    started(launchpad, most + most - 1)
    again = begin(launchpad, port, size, last_call=DEADLINE)
    started(launchpad, most + most - 1 + most)
    (launchpad.folder / "go").touch()
    for job in others:
        code, _, err = ends(job)
        assert code == 0, err
        assert "has left the job, which it led; it goes on without it" in err
    code, out, err = ends(again)
    assert (code, out) == (0, f"[{most - 1}] node {most - 1} restarts 0\n"), err


def test_a_head_that_is_told_to_leave_while_it_is_stopped(launchpad: Launchpad) -> None:
    """It finds out that others lead, and leaves all the same."""
    port = free_port()
    first = begin(launchpad, port, "2:3", "--heartbeat-timeout", 1, last_call=DEADLINE)
    wait_until(lambda: leads(first, port), "the first one to listen")
    others = [begin(launchpad, port, "2:3", "--heartbeat-timeout", 1, last_call=DEADLINE) for _ in range(2)]
    started(launchpad, 3)
    first.send_signal(signal.SIGSTOP)
    started(launchpad, 3 + 2)
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    code, _, err = ends(first)
    assert code == 128 + signal.SIGTERM, err
    (launchpad.folder / "go").touch()
    assert [ends(job)[0] for job in others] == [0, 0]


def test_a_head_that_was_stopped_and_finds_nobody_left_to_leave(launchpad: Launchpad) -> None:
    """All have lost each other by the time that it reads TERM: it looks for no next head."""
    port = free_port()
    jobs = [begin(launchpad, port, "2:3", "--heartbeat-timeout", 1, last_call=DEADLINE) for _ in range(3)]
    started(launchpad, 3)
    first = next(job for job in jobs if leads(job, port))
    others = [job for job in jobs if job is not first]
    below = psutil.Process(first.pid).children(recursive=True)
    for job in (*others, first):
        job.send_signal(signal.SIGSTOP)
    wait_until(lambda: not any(is_alive(one) for one in below), "what runs under the head to end without it")
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    for job in others:
        job.kill()
    code, _, err = ends(first)
    assert code == 128 + signal.SIGTERM, err
    assert [ends(job)[0] for job in others] == [-signal.SIGKILL] * 2


def test_a_node_whose_head_never_hears_that_it_leaves(launchpad: Launchpad) -> None:
    """It leaves when it loses the head."""
    port = free_port()
    first = begin(launchpad, port, "1:3", "--heartbeat-timeout", 1, last_call=DEADLINE)
    wait_until(lambda: leads(first, port), "the first one to listen")
    second, third = (begin(launchpad, port, "1:3", "--heartbeat-timeout", 1, last_call=DEADLINE) for _ in range(2))
    started(launchpad, 3)
    first.send_signal(signal.SIGSTOP)
    third.send_signal(signal.SIGTERM)
    code, _, err = ends(third)
    assert code == 128 + signal.SIGTERM, err
    assert err.endswith("launchpad: stopped by SIGTERM; the job has no head\n")
    first.kill()
    second.send_signal(signal.SIGTERM)
    assert [ends(job)[0] for job in (first, second)] == [-signal.SIGKILL, 128 + signal.SIGTERM]


@pytest.mark.parametrize("how", ["ctrl-c", "stop", "term"])
def test_who_leads_can_end_the_job_for_all(launchpad: Launchpad, how: str) -> None:
    """By Ctrl-C or `launchpad stop`; by TERM if the others are too few."""
    port, size = free_port(), "2" if how == "term" else "1:2"
    jobs = [begin(launchpad, port, size, last_call=DEADLINE) for _ in range(2)]
    started(launchpad, 2)
    head = next(job for job in jobs if leads(job, port))
    if how == "stop":
        wait_until(lambda: launchpad.run("stop").returncode == 0, "the job to listen to commands")
    else:
        head.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
    expected = 128 + (signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
    assert [ends(job)[0] for job in jobs] == [expected, expected]
    assert len(list(launchpad.folder.glob("[0-9]*-*"))) == 2


def test_all_reports_go_on_under_the_next_head(launchpad: Launchpad) -> None:
    """The nodes share a folder."""
    reports = (
        "--junit",
        "all.xml",
        "--events",
        "events",
        "--report",
        "all.html",
        "--notify",
        "echo $LAUNCHPAD_JOB >> told",
    )
    port = free_port()
    first = begin(launchpad, port, "2:3", *reports, last_call=DEADLINE)
    wait_until(lambda: leads(first, port), "the first one to listen")
    others = [begin(launchpad, port, "2:3", *reports, last_call=DEADLINE) for _ in range(2)]
    started(launchpad, 3)
    first.kill()
    first.communicate(timeout=DEADLINE)
    started(launchpad, 3 + 2)
    (launchpad.folder / "go").touch()
    assert [ends(job)[0] for job in others] == [0, 0]
    events = [json.loads(line) for line in (launchpad.folder / "events").read_text().splitlines()]
    (before, after), (lost,), _ = ([one for one in events if one["event"] == kind] for kind in KINDS)
    assert lost["name"] == before["host"]
    assert lost["job"] == before["job"]
    assert before["wall"] < lost["lost"] < after["wall"]
    assert (launchpad.folder / "told").read_text() == f"{after['job']}\n"
    suite = ElementTree.parse(launchpad.folder / "all.xml").getroot()
    assert len(list(suite.iter("testcase"))) == 2
    assert after["job"] in (launchpad.folder / "all.html").read_text()
    why = launchpad.run("why", after["job"]).stdout
    assert re.search(rf"^led by {lost['name']} until \d\d:\d\d:\d\d: launchpad why {before['job']}, there$", why, re.M)


KINDS = ("JobPlanned", "HeadLost", "JobOver")


def test_the_job_is_found_at_another_place_than_the_endpoint(launchpad: Launchpad) -> None:
    port, place = free_port(), free_port()
    where = f"127.0.0.1:{port},127.0.0.1:{place}"
    conf = f"last_call_timeout={DEADLINE:g},join_timeout={DEADLINE:g}"
    (launchpad.folder / "stays.py").write_text(STAYS)

    def start(more: str = "") -> Job:
        words = c10d(port, rdzv_endpoint=where, rdzv_conf=conf + more, nnodes="2:3")
        return launchpad.start("run", *words, "stays.py")

    first = start()
    wait_until(lambda: leads(first, port), "the first one to listen")
    others = [start(), start()]
    started(launchpad, 3)
    first.kill()
    first.communicate(timeout=DEADLINE)
    started(launchpad, 3 + 2)
    others.append(start(",is_host=false"))
    started(launchpad, 3 + 2 + 3)
    (launchpad.folder / "go").touch()
    assert [ends(job)[0] for job in others] == [0, 0, 0]


def test_gpus_stay_with_their_nodes(launchpad: Launchpad) -> None:
    """The agents have leased them already when the next head asks for them."""
    folder = launchpad.folder / "smi"
    folder.mkdir()
    launchpad.environ["PATH"] = f"{folder}:{launchpad.environ['PATH']}"
    launchpad.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with contextlib.closing(FakeGpus(folder)) as gpus:
        port = free_port()
        first = begin(launchpad, port, "2:3", "--gpus", "0,", last_call=DEADLINE)
        wait_until(lambda: leads(first, port), "the first one to listen")
        more = [begin(launchpad, port, "2:3", "--gpus", gpu, last_call=DEADLINE) for gpu in ("1,", "2,")]
        started(launchpad, 3)
        first.kill()
        first.communicate(timeout=DEADLINE)
        started(launchpad, 3 + 2)
        (launchpad.folder / "go").touch()
        for job, uuid in zip(more, gpus.uuids[1:3], strict=True):
            code, out, err = ends(job)
            assert code == 0, err
            assert [line.split()[-1] for line in out.splitlines()] == [uuid, uuid], "under both heads"


def test_nobody_waits_longer_than_the_join_timeout(launchpad: Launchpad) -> None:
    port = free_port()
    head = begin(launchpad, port, "1:2")
    wait_until(lambda: leads(head, port), "it to listen")
    other = begin(launchpad, port, "1:2", seconds=4)
    started(launchpad, 2)
    head.kill()
    head.communicate(timeout=DEADLINE)
    err = other.communicate(timeout=DEADLINE)[1].decode()
    assert other.returncode == 4, err
    assert err.endswith(f"at 127.0.0.1:{port}: Connection refused; gave up after 4 s\n")


def test_a_launchpad_that_waits_can_be_stopped(launchpad: Launchpad) -> None:
    _, other = lose_head(launchpad, free_port(), "1:2")
    said_until(other, "waiting for launchpad to be started there again")
    other.send_signal(signal.SIGINT)
    code, _, err = ends(other)
    assert (code, err) == (130, "launchpad: stopped by SIGINT; the job has no head\n")


def test_a_job_that_a_lost_node_ends_is_ended_by_a_lost_head(launchpad: Launchpad) -> None:
    port = free_port()
    _, other = lose_head(launchpad, port, "2")
    code, _, err = ends(other)
    assert code == 4, err
    assert err.endswith(f"the head of the job at 127.0.0.1:{port} is gone; the ranks here were stopped\n")


# Values.


def nodes(*keys: str, of: str) -> list[tuple[str, NodeOffer]]:
    """Nodes that come in this order, from a head that is lost."""
    roster = Roster(1, 3, of[0], tuple(Peer(key, key) for key in of), 1)
    return [(key, NodeOffer(key, "python3", "1:4", key=key, rosters=(roster,) if key in of else ())) for key in keys]


def test_nodes_that_come_back_keep_their_order() -> None:
    here = nodes("new", "d", "b", "c", of="abcd")
    lead = Lead(here[1][1].rosters, 2, frozenset("bcd"))
    ordered = _in_order(here, 6, lead)  # type: ignore[arg-type]
    assert [key for key, _ in ordered] == ["b", "c", "d", "new"]  # type: ignore[comparison-overlap]


def test_when_all_are_back_nobody_else_is_waited_for() -> None:
    assert _all_back(nodes("d", "c", "b", of="abcd"))  # type: ignore[arg-type]
    assert not _all_back(nodes("d", "b", "new", of="abcd"))  # type: ignore[arg-type]
