"""--keep-running: ranks go on while their host has no contact with the head, which comes back by itself."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.counting import Counting, asks, jobs_folder
from tests.support.joined import said_until
from tests.support.netns import Network, needs_namespaces
from tests.support.node_faults import SILENCE, Head, Start
from tests.support.node_faults import head as head
from tests.support.node_faults import network as network
from tests.support.node_faults import start as start

pytestmark = needs_namespaces


@pytest.fixture
def counting(head: Head, start: Start) -> Callable[..., Counting]:
    return lambda seconds="60s": Counting(head, start, "--keep-running", seconds)


def test_a_host_that_was_cut_off_is_in_contact_again(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    network.partition("h1")
    job.told("lost contact with h1: its ranks go on for 1m, and launchpad tries to reach it")
    network.heal("h1")
    job.told("h1 is in contact again, after ")
    job.go()
    assert job.end() == 0


def test_roles_on_hosts_go_on_too(head: Head, start: Start, network: Network) -> None:
    """For longer than a host without contact would otherwise have."""
    (head.folder / "job.toml").write_text('[jobs.j.roles.a]\ntarget = "waits.py"\nnproc = 4\n')
    (head.folder / "waits.py").write_text(
        "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    job = start(2, "--keep-running", "60s", "--config", "job.toml", "--job", "j", bufsize=0)
    assert job.process.stdout is not None
    for _ in range(4):
        assert job.process.stdout.readline().endswith(b"up\n")
    network.partition("h1")
    said_until(job.process, "lost contact with h1")
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 2 * SILENCE, "the agent's patience to be over")
    network.heal("h1")
    said_until(job.process, "is in contact again, after ")
    (head.folder / "go").touch()
    code, err = job.end()
    assert code == 0, err


def test_it_need_not_be_the_same_sshd(counting: Callable[..., Counting], network: Network) -> None:
    """Both are away at once, twice."""
    job = counting()
    for _ in range(2):
        for name in ("h1", "h2"):
            network.kill_sshd(name)
        for name in ("h1", "h2"):
            job.told("lost contact with h")
            network.serve(name)
        for _ in range(2):
            job.told("is in contact again, after ")
    job.go()
    assert job.end() == 0


def test_what_fails_meanwhile_is_told_afterwards(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    network.partition("h1")
    job.told("lost contact with h1")
    job.go(1)
    wait_until(lambda: 1 not in job.ranks("h1"), "rank 1 to end")
    network.heal("h1")
    assert job.end() == 7
    assert "rank 1 on h1 failed first: exit code 7" in job.err


def test_a_host_that_was_started_again_is_lost_at_once(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    network.power_off("h1")
    job.told("lost contact with h1")
    network.power_on("h1")
    assert job.end() == 4
    assert "h1 was lost: nothing of the job is left there: its time without a head was over, or the host" in job.err
    for left in network.hosts["h1"].scratch.iterdir():  # by the power cut, until a guard of a later job comes by
        shutil.rmtree(left)


def test_after_its_time_a_host_is_lost_and_has_ended_its_ranks(
    counting: Callable[..., Counting], network: Network
) -> None:
    job = counting("3s")
    network.partition("h2")
    assert job.end() == 4
    assert "h2 was lost: no contact for 3 s: " in job.err
    job.job.wait_for_clean_hosts()  # though it is still cut off


def test_ranks_of_a_killed_head_go_on_until_their_time_is_over(counting: Callable[..., Counting]) -> None:
    job = counting("10s")
    job.job.send(signal.SIGKILL)
    job.job.process.communicate(timeout=DEADLINE)
    assert [sorted(job.ranks(name)) for name in ("h1", "h2")] == [[0, 1], [2, 3]]
    job.job.wait_for_clean_hosts()


def test_launchpad_stop_ends_them_earlier(counting: Callable[..., Counting], head: Head) -> None:
    job = counting("10m")
    job.job.send(signal.SIGKILL)
    job.job.process.communicate(timeout=DEADLINE)
    (name,) = os.listdir(jobs_folder(head))
    waited = asks(head, "wait", name)
    assert waited.returncode == 4
    assert "it is without launchpad since " in waited.stderr, waited.stderr
    assert f"; `launchpad resume {name}` takes it over, or its ranks end at " in waited.stderr
    stop = asks(head, "stop")
    assert (stop.returncode, stop.stderr) == (
        0,
        f"the launchpad of job {name} is gone; ended its ranks on h1, h2\n",
    )
    job.job.wait_for_clean_hosts()
    again = asks(head, "stop", name)
    assert again.returncode == 2
    assert "you have no running job" in again.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_stopped_leaves_nothing(counting: Callable[..., Counting], signum: int) -> None:
    job = counting("10m")
    job.job.send(signum)
    assert job.end() == 128 + signum


def test_a_job_that_is_stopped_while_a_host_is_away_ends_it_too(
    counting: Callable[..., Counting], network: Network
) -> None:
    """The host gets the signal once it is in contact again."""
    job = counting("10m")
    network.partition("h2")
    job.told("lost contact with h2")
    job.job.send(signal.SIGTERM)
    network.heal("h2")
    assert job.end() == 128 + signal.SIGTERM


def test_a_rank_that_prints_much_waits_when_too_much_is_kept(head: Head, start: Start, network: Network) -> None:
    """It goes on afterwards, and nothing is missing: more than the host keeps, which the head reads as it comes."""
    (head.folder / "floods.py").write_text(
        "import os, time\n"
        "print('up', os.environ['RANK'], flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "for number in range(100_000): print(number, 'x' * 500)\n"
        "open(f\"done-{os.environ['RANK']}\", 'w').close()\n"
    )
    with (head.folder / "out").open("wb") as out:
        job = start(2, "--keep-running", "60s", "floods.py", stdout=out, bufsize=0)
    up = [f"up {rank}".encode() for rank in range(4)]
    wait_until(lambda: all(one in (head.folder / "out").read_bytes() for one in up), "the ranks to be up")
    network.partition("h2")
    said_until(job.process, "lost contact with h2")
    (head.folder / "go").touch()
    wait_until(lambda: all((head.folder / f"done-{rank}").exists() for rank in (0, 1)), "those on h1 to end")
    assert not (head.folder / "done-2").exists(), "50 MB are more than a stream's share"
    network.heal("h2")
    _, err = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == 0, err
    expected = [b"up", *(b"%d" % number for number in range(100_000))]
    said: dict[bytes, list[bytes]] = {b"%d" % rank: [] for rank in range(4)}
    for line in (head.folder / "out").read_bytes().splitlines():
        prefix, _, text = line.partition(b"] ")
        said[prefix.rpartition(b" ")[2]].append(text.partition(b" ")[0])
    assert all(lines == expected for lines in said.values())


def test_refused_where_there_is_no_ssh(launchpad: Launchpad) -> None:
    run = launchpad.run("run", "-H", "h1", "--enter", "env", "--keep-running", "1h", "true")
    assert run.returncode == 2
    assert run.stderr.endswith("--enter's command ends with it; leave it out\n")


def test_a_host_that_ends_what_a_login_leaves_is_refused(start: Start, network: Network) -> None:
    """Before the ranks start: the other host has nothing left then, either."""
    config = network.hosts["h2"].config
    before = config.read_text()
    config.write_text(f"{before}ForceCommand {sys.executable} {PROGRAMS / 'sweeping_shell.py'}\n")
    try:
        network.kill_sshd("h2")
        network.serve("h2")
        code, err = start(2, "--keep-running", "1h", "true").end()
        assert code == 3
        assert "h2  session: all that a login leaves there is ended with it" in err
        assert start(2, "true").end() == (0, "")
    finally:
        config.write_text(before)
