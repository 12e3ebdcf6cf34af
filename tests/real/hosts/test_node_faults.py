"""Faults on several hosts: whatever dies or falls silent, the head says what happened where, and nothing is left.

The hosts are those of tests/support/netns.py, so power cuts and network partitions behave as in a real cluster.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from launchpad.job.outcome import ranks_in_words
from tests.support.command import DEADLINE, PROGRAMS, wait_until
from tests.support.needs import needs_torch
from tests.support.netns import Network, needs_namespaces
from tests.support.node_faults import FAMILY, HOSTS, LATEST, RANKS, REDUCES, SILENCE, Head, Job, Start
from tests.support.node_faults import head as head
from tests.support.node_faults import network as network
from tests.support.node_faults import start as start

pytestmark = needs_namespaces

KINDS = ("obedient", "deaf")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How ranks and their children react to signals."""
    kind: str = request.param
    return kind


def started(start: Start, kind: str, hosts: int = HOSTS) -> Job:
    job = start(hosts, FAMILY, kind)
    job.wait_for_ranks()
    return job


# Two combinations instead of four: how a node gets lost is independent of how its ranks react to signals.
NODES = pytest.mark.parametrize(
    ("kind", "name"), [("obedient", "h1"), ("deaf", f"h{HOSTS}")], ids=["obedient, first", "deaf, last"]
)


def lose(job: Job, fault: str, name: str) -> str:
    """Cause the fault; returns the reason that the head should report."""
    match fault:
        case "partition":
            job.network.partition(name)
        case "power cut":
            job.network.power_off(name)
        case "agent stopped":
            os.kill(job.agent(name).pid, signal.SIGSTOP)
        case "sshd killed":
            job.network.kill_sshd(name)
            return "its agent hung up"
        case "guard killed":
            os.kill(job.guard(name).pid, signal.SIGKILL)
            return "its guard was killed"
        case "agent killed":
            os.kill(job.agent(name).pid, signal.SIGKILL)
            return "the agent was killed by signal 9"
    return f"no heartbeat for {SILENCE:g} s"


LOSSES = ("partition", "power cut", "agent stopped", "sshd killed", "guard killed", "agent killed")


@NODES
@pytest.mark.parametrize("fault", LOSSES)
def test_lost_node_ends_the_job(start: Start, kind: str, fault: str, name: str) -> None:
    job = started(start, kind)
    why = lose(job, fault, name)
    code, err = job.end()
    assert code == 4, err
    assert f"{name} was lost: {why}; it was running {job.ranks_of(name)}" in err
    assert f"stopped because of it: {job.ranks_but(name)}" in err
    assert err.count(" was lost") == 1
    job.wait_for_clean_hosts()


@pytest.mark.parametrize("fault", ["partition", "agent stopped", "sshd killed", "guard killed"])
def test_lost_node_that_is_reached_through_openssh_ends_the_job(start: Start, fault: str) -> None:
    job = start(HOSTS, "--ssh", "openssh", FAMILY, "deaf")
    job.wait_for_ranks()
    why = lose(job, fault, "h2")
    code, err = job.end()
    assert code == 4, err
    why = "ssh ended: .*" if fault == "sshd killed" else re.escape(why)
    assert re.search(rf"h2 was lost: {why}; it was running {job.ranks_of('h2')}", err), err
    assert err.count(" was lost") == 1
    job.wait_for_clean_hosts()


@NODES
@pytest.mark.parametrize(("end", "code"), [("exit", 7), ("kill", 137)])
def test_failed_rank_ends_the_job(start: Start, kind: str, end: str, code: int, name: str) -> None:
    job = started(start, kind)
    rank = job.names.index(name) * RANKS + 1
    if end == "exit":
        job.leave(rank, 7)
    else:
        os.kill(job.rank(rank).pid, signal.SIGKILL)
    how = "exit code 7" if end == "exit" else "killed by SIGKILL"
    others = ranks_in_words([one for one in range(RANKS * HOSTS) if one != rank])
    done, err = job.end()
    assert done == code, err
    assert f"rank {rank} on {name} failed first: {how}" in err
    assert f"stopped because of it: {others}" in err
    assert "was lost" not in err
    job.wait_for_clean_hosts()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_head_ends_the_job(start: Start, kind: str, signum: signal.Signals) -> None:
    job = started(start, kind)
    job.send(signum)
    code, err = job.end()
    assert code == 128 + signum, err
    assert f"sent {signum.name} to ranks 0-5" in err
    assert f"the job was stopped by {signum.name}" in err
    assert "was lost" not in err
    job.wait_for_clean_hosts()


@pytest.mark.parametrize("way", ["open", "silent"])
def test_killed_head_leaves_nothing(start: Start, kind: str, way: str) -> None:
    """With "silent", the hosts get no sign of the head's death, as when its machine loses power."""
    job = started(start, kind)
    if way == "silent":
        for name in job.names:
            job.network.partition(name)
    job.send(signal.SIGKILL)
    assert job.end()[0] == -signal.SIGKILL
    job.wait_for_clean_hosts()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("network_is", ["open", "silent"])
def test_head_ended_while_a_host_is_being_set_up(start: Start, signum: signal.Signals, network_is: str) -> None:
    job = start(2, FAMILY, "deaf")
    wait_until(lambda: job.network.processes("h2"), "something to run on h2")
    if network_is == "silent":
        job.network.partition("h2")
    job.send(signum)
    code, err = job.end()
    assert code == (-9 if signum == signal.SIGKILL else 128 + signum), err
    wait_until(lambda: not job.ranks_on("h2"), "no rank to be on h2", show=lambda: job.ranks_on("h2"))
    job.network.heal("h2")  # an agent that has not had its Hello knows no heartbeat timeout
    job.wait_for_clean_hosts()


# A stopped job is not a fault.


def outlast_the_heartbeats() -> None:
    """Wait for twice the heartbeat timeout."""
    end = time.monotonic() + 2 * SILENCE
    wait_until(lambda: time.monotonic() > end, "time to pass")


def state(pid: int) -> str:
    """The process's state in /proc: T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("said", ["nothing", "much"])
def test_stopped_job_loses_no_node(start: Start, said: str) -> None:
    job = start(2, FAMILY, "obedient", *(["talks"] if said == "much" else []))
    job.wait_for_ranks()
    reader = threading.Thread(target=lambda: [None for _ in job.process.stdout])
    reader.start()
    ranks = [job.rank(number).pid for number in range(2 * RANKS)]
    for _ in range(3):
        job.send(signal.SIGTSTP)
        wait_until(lambda: state(job.process.pid) == "T", "the head to stop", show=lambda: state(job.process.pid))
        # A computing process stops when it is next scheduled.
        wait_until(lambda: {*map(state, ranks)} == {"T"}, "the ranks to stop", show=lambda: [*map(state, ranks)])
        outlast_the_heartbeats()
        job.send(signal.SIGCONT)
        wait_until(lambda: "T" not in map(state, ranks), "the ranks to go on")
    for number in range(2 * RANKS):
        job.leave(number, 0)
    reader.join(LATEST)
    code, err = job.end()
    assert code == 0, err
    assert "lost" not in err


def test_job_that_is_stopped_while_a_node_is_silent_ends(start: Start, kind: str) -> None:
    """That node will never report that its ranks are stopped; the other nodes' ranks must not stay stopped."""
    job = started(start, kind)
    job.network.partition("h2")
    job.send(signal.SIGTSTP)
    code, err = job.end()
    assert code == 4, err
    assert "h2 was lost: no heartbeat for 2 s; it was running ranks 2-3" in err
    job.wait_for_clean_hosts()


def test_head_stopped_while_the_hosts_are_being_set_up_loses_none(start: Start) -> None:
    job = start(2, FAMILY, "obedient")
    # Before that, SIGTSTP's default action would stop it, or do nothing in an orphaned process group.
    wait_until(lambda: handles(job.process.pid, signal.SIGTSTP), "the head to handle its signals")
    job.send(signal.SIGTSTP)
    wait_until(lambda: state(job.process.pid) == "T", "the head to stop")
    outlast_the_heartbeats()
    job.send(signal.SIGCONT)
    job.wait_for_ranks()
    job.send(signal.SIGTERM)
    code, err = job.end()
    assert code == 143, err
    assert "lost" not in err


def test_paused_reader_loses_no_node(start: Start) -> None:
    reader, writer = os.pipe()
    job = start(2, PROGRAMS / "flood.py", 200_000, stdout=writer)
    wait_until(lambda: not select.select([], [writer], [], 0)[1], "the pipe to be full")
    os.close(writer)
    outlast_the_heartbeats()
    with open(reader, "rb") as pipe:
        shown = pipe.read()
    assert shown.count(b"x") == 2 * RANKS * sum(number % 50 for number in range(200_000))
    code, err = job.end()
    assert (code, err) == (0, "")


# The head's own machine as one of the hosts.


@pytest.mark.parametrize(
    ("fault", "code"),
    [("h1 silent", 4), ("own agent killed", 4), ("head killed", -9), ("interrupted", 130), ("rank 3 fails", 7)],
)
def test_own_machine_and_another(head: Head, fault: str, code: int, kind: str) -> None:
    job = Job(head, ["localhost", "h1"], FAMILY, kind)
    job.wait_for_ranks()
    words = []
    match fault:
        case "h1 silent":
            job.network.partition("h1")
            words = [
                "h1 was lost: no heartbeat for 2 s; it was running ranks 2-3",
                "because of it: ranks 0-1",
            ]
        case "own agent killed":
            psutil.Process(job.process.pid).children()[0].children()[0].kill()
            words = [
                "localhost was lost: the agent was killed by signal 9; it was running ranks 0-1",
                "of it: ranks 2-3",
            ]
        case "head killed":
            job.send(signal.SIGKILL)
        case "interrupted":
            job.send(signal.SIGINT)
            words = ["the job was stopped by SIGINT", "stopped because of it: ranks 0-3"]
        case "rank 3 fails":
            job.leave(3, 7)
            words = ["rank 3 on h1 failed first: exit code 7", "stopped because of it: ranks 0-2"]
    done, err = job.end()
    assert done == code, err
    assert all(one in err for one in words), err
    job.wait_for_clean_hosts()


# Faults that --inject makes.

RECOVERS = """
import os, signal
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "of rank", os.environ["RANK"], flush=True)
while attempt == "0":
    signal.pause()
"""
INJECTED = {
    "kill": ("SIGKILL to the agent on h2", "the agent was killed by signal 9"),
    "stop": ("SIGSTOP to the agent on h2", f"no heartbeat for {SILENCE:g} s"),
    "cut": ("the link to h2 cut", f"no heartbeat for {SILENCE:g} s"),
}


@pytest.mark.parametrize("what", INJECTED)
def test_a_job_recovers_from_an_injected_loss(start: Start, head: Head, what: str) -> None:
    (head.folder / "recovers.py").write_text(RECOVERS)
    fault, why = INJECTED[what]
    job = start(2, "--max-restarts", 1, "--inject", f"{what}:host=h2@1s", head.folder / "recovers.py")
    out, err = job.process.communicate(timeout=LATEST)
    assert job.process.returncode == 0, err.decode()
    ended = sorted(line.partition("] ")[2] for line in out.decode().splitlines() if "attempt 1" in line)
    assert ended == [f"attempt 1 of rank {rank}" for rank in range(4)]
    assert f"launchpad: injected: {fault}\n" in err.decode()
    assert f"launchpad: failed: h2 was lost ({why}, by --inject); restarting all ranks" in err.decode()
    job.wait_for_clean_hosts()


def test_an_injected_loss_is_told_in_the_verdict(start: Start, head: Head) -> None:
    (head.folder / "recovers.py").write_text(RECOVERS)
    job = start(2, "--inject", "cut:host=h2@1s", head.folder / "recovers.py")
    code, err = job.end()
    assert code == 4, err
    assert f"launchpad: h2 was lost: no heartbeat for {SILENCE:g} s; it was running ranks 2-3\n" in err
    assert "launchpad: injected: the link to h2 cut (" in err
    job.wait_for_clean_hosts()


# A network that fails between two hosts only: no heartbeat tells.

STALL = 6.0  # --stall-timeout
PAUSES = "import os, signal; print('up', os.environ['RANK'], flush=True); signal.pause()"
WAITS = ("--no-python", sys.executable, "-c", PAUSES)


def test_stalled_job_says_which_hosts_can_not_reach_each_other(start: Start, network: Network) -> None:
    job = start(HOSTS, "--stall-timeout", STALL, *WAITS)
    job.wait_for_ranks()
    network.cut("h2", "h3")
    code, err = job.end()
    assert code == 124, err
    assert "h2 and h3 can't reach each other" in err
    assert err.count("can't reach") == 1
    job.wait_for_clean_hosts()


def test_stalled_job_whose_network_is_whole_says_nothing_of_it(start: Start) -> None:
    job = start(HOSTS, "--stall-timeout", STALL, *WAITS)
    code, err = job.end()
    assert code == 124, err
    assert "the job was stopped: it hung" in err
    assert "can't reach" not in err
    job.wait_for_clean_hosts()


# Guard and agent at once.


def test_what_a_killed_guard_and_agent_leave_is_removed_by_the_next_visit(start: Start, network: Network) -> None:
    job = started(start, "deaf")
    for name in ("h1", "h3"):
        both = (job.guard(name), job.agent(name))
        for one in both:  # neither must see the other die
            os.kill(one.pid, signal.SIGSTOP)
        for one in both:
            os.kill(one.pid, signal.SIGKILL)
    code, err = job.end()
    assert code == 4, err
    again = start(HOSTS, "--no-python", "true")
    assert again.end() == (0, "")
    again.wait_for_clean_hosts()
    assert [os.listdir(host.scratch) for host in network.hosts.values()] == [[]] * HOSTS


# torch.distributed.


@needs_torch
def test_gloo_over_two_hosts(start: Start) -> None:
    """The same ranks form two process groups, one after the other."""
    job = start(2, REDUCES)
    out, err = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == 0, err.decode()
    assert sums(out) == [f"rank {rank} turn {turn} sum 10 10.77.0.1" for rank in range(4) for turn in range(2)]


@needs_torch
def test_gloo_over_an_ipv6_network_that_ssh_does_not_use(start: Start, network: Network) -> None:
    """The hosts can't reach each other at the addresses that ssh uses."""
    for name in ("h1", "h2"):
        network.isolate(name)
    network.open_data_network()
    job = start(2, REDUCES)
    out, err = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == 0, err.decode()
    assert sums(out) == [f"rank {rank} turn {turn} sum 10 fd77::1" for rank in range(4) for turn in range(2)]


@needs_torch
@pytest.mark.parametrize(("fault", "name"), [("partition", "h1"), ("agent killed", "h2")])
def test_lost_node_is_the_cause_even_if_ranks_fail_because_of_it(start: Start, fault: str, name: str) -> None:
    """Ranks whose peers are gone raise exceptions, but the user needs to hear of the lost node."""
    job = start(2, REDUCES, "forever")
    job.wait_for_ranks()
    why = lose(job, fault, name)
    code, err = job.end()
    assert code == 4, err
    assert f"{name} was lost: {why}; it was running {job.ranks_of(name)}" in err
    job.wait_for_clean_hosts()


@needs_torch
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_rank_is_the_cause_even_if_others_fail_because_of_it(start: Start, rank: int) -> None:
    job = start(2, REDUCES, "forever")
    job.wait_for_ranks()
    os.kill(job.rank(rank).pid, signal.SIGKILL)
    code, err = job.end()
    assert code == 137, err
    assert f"rank {rank} on {job.names[rank // RANKS]} failed first: killed by SIGKILL" in err
    job.wait_for_clean_hosts()


def test_if_everything_stands_still_nobody_is_lost(start: Start, network: Network) -> None:
    """As when a virtual machine is paused. Nobody knows afterwards who was silent; they have 2 s to say so."""
    job = start(2, "--heartbeat-timeout", 8, FAMILY, "obedient")
    job.wait_for_ranks()
    everyone = [job.process.pid, *(one.pid for name in job.names for one in network.all_processes(name))]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 9, "more than the heartbeat timeout to pass")
    for pid in reversed(everyone):
        os.kill(pid, signal.SIGCONT)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 3, "what might be lost to be lost")
    assert job.process.poll() is None
    job.send(signal.SIGTERM)
    code, err = job.end()
    assert (code, "was lost" in err) == (143, False), err
    job.wait_for_clean_hosts()


def sums(out: bytes) -> list[str]:
    return sorted(line.partition("] ")[2] for line in out.decode().splitlines())


def test_hosts_that_can_not_reach_each_other_are_rejected(start: Start, network: Network) -> None:
    for name in ("h1", "h3"):
        network.isolate(name)
    job = start(3, FAMILY, "deaf")
    code, err = job.end()
    assert code == 3, err
    assert "1 of 3 hosts can't take part, so nothing was started:\n" in err
    assert "  h3  reaches h1 at none of its addresses\n" in err
    assert "h1 has the addresses 10.77.0.1; open one between the hosts" in err
