"""launchpad resume: a job whose launchpad was killed goes on under another one, as if nothing had happened."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launchpad.record import checkpoint
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.counting import COUNTS, Counting, asks, check, jobs_folder
from tests.support.joined import said_until, started
from tests.support.netns import Network, needs_namespaces
from tests.support.node_faults import Head, Job, Start
from tests.support.node_faults import head as head
from tests.support.node_faults import network as network
from tests.support.node_faults import start as start

pytestmark = needs_namespaces


class Killed:
    """A job whose launchpad was killed, and those that take it over."""

    def __init__(self, head: Head) -> None:
        self.head = head
        (self.name,) = os.listdir(jobs_folder(head))

    def resume(self, command: str = "resume", within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        argv = self.head.network.argv(*within, *Launchpad.argv(self.head, command, self.name))
        elsewhere = self.head.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        return subprocess.Popen(
            argv, env=self.head.environ, cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )

    def ends(self, *within: str) -> tuple[int, bytes, str]:
        """Take it over, and wait for its end."""
        process = self.resume(within=within)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err.decode()

    def logs(self) -> bytes:
        return asks(self.head, "logs", self.name).stdout.encode()

    def refused(self) -> str:
        done = asks(self.head, "resume", self.name)
        assert done.returncode == 2, done.stderr
        return done.stderr.removeprefix("launchpad: error: ").strip()


def kill_launchpad(head: Head, job: Job) -> Killed:
    job.send(signal.SIGKILL)
    job.process.communicate(timeout=DEADLINE)
    return Killed(head)


def kill(job: Counting) -> Killed:
    job.job.send(signal.SIGKILL)
    out, err = job.job.process.communicate(timeout=DEADLINE)
    job.out += out
    job.err += err.decode()
    return Killed(job.head)


@pytest.fixture
def counting(head: Head, start: Start) -> Callable[..., Counting]:
    return lambda *options: Counting(head, start, "--keep-running", "10m", *options)


def test_the_ranks_and_the_record_go_on(counting: Callable[..., Counting]) -> None:
    job = counting()
    pids = [job.ranks(name) for name in ("h1", "h2")]
    killed = kill(job)
    following = killed.resume()
    assert following.stdout is not None
    first = [following.stdout.readline() for _ in range(40)]
    assert [job.ranks(name) for name in ("h1", "h2")] == pids
    job.go()
    out, err = following.communicate(timeout=DEADLINE)
    assert following.returncode == 0, err
    assert f"took over job {killed.name} after ".encode() in err
    counted = check(killed.logs())
    shown = check_from(b"".join(first) + out)
    assert {rank: begin + number for rank, (begin, number) in shown.items()} == counted, "the end is shown"
    told = {rank: job.out.count(f" {rank}] line".encode()) for rank in counted}
    assert all(shown[rank][0] <= told[rank] for rank in counted), "from where the first one was cut off"
    assert not {"checkpoint", "held.json", "resumed"} & set(
        os.listdir(os.path.join(jobs_folder(job.head), killed.name))
    )


def check_from(out: bytes) -> dict[str, tuple[int, int]]:
    """As `check`, but the ranks are seen from somewhere on: of each, from which line, and how many."""
    found: dict[str, list[int]] = {}
    for line in out.splitlines():
        match = re.fullmatch(rb".*?(\d)\] line (\d+) \d+", line)
        assert match, line
        found.setdefault(match[1].decode(), []).append(int(match[2]))
    assert all(numbers == list(range(numbers[0], numbers[0] + len(numbers))) for numbers in found.values())
    return {rank: (numbers[0], len(numbers)) for rank, numbers in found.items()}


def test_what_fails_meanwhile_is_judged_afterwards(counting: Callable[..., Counting]) -> None:
    job = counting()
    killed = kill(job)
    job.go(1)
    wait_until(lambda: 1 not in job.ranks("h1"), "rank 1 to end")
    code, _, err = killed.ends()
    assert code == 7
    assert "rank 1 on h1 failed first: exit code 7" in err
    check(killed.logs())


def test_all_may_end_meanwhile(counting: Callable[..., Counting]) -> None:
    job = counting()
    killed = kill(job)
    job.go()
    wait_until(lambda: not job.ranks("h1") and not job.ranks("h2"), "the ranks to end")
    code, _, err = killed.ends()
    assert code == 0, err
    check(killed.logs())
    assert killed.refused() == f"job {killed.name} has ended, with exit code 0; there is nothing to resume"


def test_again_and_again(counting: Callable[..., Counting]) -> None:
    """Those that resume are killed too, wherever they are."""
    job = counting()
    killed = kill(job)
    for lines in (0, 1, 40, 200):
        following = killed.resume()
        assert following.stdout is not None
        for _ in range(lines):
            assert following.stdout.readline(), following.communicate()[1].decode()
        following.kill()
        following.communicate()
    job.go()
    code, _, err = killed.ends()
    assert code == 0, err
    check(killed.logs())


def test_one_of_two_wins(counting: Callable[..., Counting]) -> None:
    job = counting()
    killed = kill(job)
    both = [killed.resume() for _ in range(2)]
    wait_until(lambda: any(one.poll() is not None for one in both), "one to be refused")
    job.go()
    ends = [(one.communicate(timeout=DEADLINE)[1].decode(), one.returncode) for one in both]
    assert sorted(code for _, code in ends) == [0, 2], ends
    (told,) = [err for err, code in ends if code == 2]
    assert re.search(r"is being resumed by (process \d+ on |another launchpad)|has a launchpad, which goes on", told)
    check(killed.logs())


def test_attach_takes_over_a_detached_job(head: Head, start: Start) -> None:
    (head.folder / "counts.py").write_text(COUNTS)
    detached = start(2, "--detach", "--keep-running", "10m", "counts.py")
    out, _ = detached.process.communicate(timeout=DEADLINE)
    name = out.decode().strip()
    wait_until(lambda: "line 5 " in asks(head, "logs", name).stdout, "lines")
    (row,) = json.loads(asks(head, "jobs", "--json").stdout)
    os.kill(row["pid"], signal.SIGKILL)
    wait_until(lambda: "without launchpad since" in asks(head, "jobs").stdout, "its end")
    killed = Killed(head)
    attached = killed.resume("attach")
    assert attached.stdout is not None
    shown = b"".join(attached.stdout.readline() for _ in range(200))
    (head.folder / "go").touch()
    rest, err = attached.communicate(timeout=DEADLINE)
    assert attached.returncode == 0, err
    assert check(shown + rest) == check(killed.logs())


def test_after_a_reboot_the_clock_is_another(counting: Callable[..., Counting], tmp_path: Path) -> None:
    """What failed before is still the first failure, and the record has one clock."""
    job = counting("--max-restarts", 1)
    job.go(1)
    job.told("restarting all ranks")
    killed = kill(job)
    job.go(1)
    (tmp_path / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
    earlier = str(-int(time.monotonic() / 2))  # the kernel allows no time before it was started
    rebooted = (
        *("unshare", "--mount", "--time", "--monotonic", earlier, "--fork", "--kill-child", "sh", "-c"),
        f'mount --bind {tmp_path}/boot_id /proc/sys/kernel/random/boot_id && exec "$@"',
        "sh",
    )
    code, _, err = killed.ends(*rebooted)
    assert code == 7, err
    said = asks(job.head, "why", killed.name).stdout
    assert "rank 1 on h1 failed first: exit code 7" in said, said
    assert re.search(r"earlier.*rank 1 on h1, exit code 7 after [0-9.]+ s", said, re.DOTALL), said


def test_a_restart_goes_on(counting: Callable[..., Counting]) -> None:
    """It is under way when launchpad is killed."""
    job = counting("--max-restarts", 1)
    job.go(1)
    job.told("failed: rank 1 on h1, exit code 7")
    killed = kill(job)
    job.go()
    code, _, err = killed.ends()
    assert code == 0, err
    for attempt in (0, 1):
        check(asks(job.head, "logs", killed.name, "--attempt", attempt).stdout.encode())


def test_a_host_that_is_cut_off_comes_later(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    killed = kill(job)
    network.partition("h2")
    following = killed.resume()
    said_until(following, "lost contact with h2")
    network.heal("h2")
    said_until(following, "h2 is in contact again")
    job.go()
    _, err = following.communicate(timeout=DEADLINE)
    assert following.returncode == 0, err
    check(killed.logs())


def test_no_host_waits_for_another(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    killed = kill(job)
    network.stall_sshd("h2")
    following = killed.resume()
    assert following.stdout is not None
    first = [following.stdout.readline() for _ in range(200)]
    assert all(re.match(rb"h1 [01]\] ", line.lstrip(b"[")) for line in first), first
    network.go_on("h2")
    job.go()
    out, err = following.communicate(timeout=DEADLINE)
    assert following.returncode == 0, err
    assert b"contact" not in err, "it was being dialled all the time"
    assert check_from(b"".join(first) + out).keys() == check(killed.logs()).keys()


def test_a_host_that_was_started_again_is_lost(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    killed = kill(job)
    network.power_off("h1")
    network.power_on("h1")
    code, _, err = killed.ends()
    assert code == 4
    assert "h1 was lost: nothing of the job is left there" in err
    empty(network, "h1")


def empty(network: Network, *names: str) -> None:
    """Of what a power cut has left, until a guard of a later job comes by."""
    for name in names:
        for left in network.hosts[name].scratch.iterdir():
            shutil.rmtree(left)


def test_if_nothing_is_left_that_is_said(counting: Callable[..., Counting], network: Network) -> None:
    job = counting()
    killed = kill(job)
    for name in ("h1", "h2"):
        network.power_off(name)
        network.power_on(name)
    done = asks(job.head, "resume", killed.name)
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"launchpad: error: job {killed.name} can't be resumed: on h1, h2, nothing of the job is left there"
    ), done.stderr
    empty(network, "h1", "h2")


def test_what_can_not_be_resumed(head: Head, counting: Callable[..., Counting]) -> None:
    job = counting()
    (name,) = os.listdir(jobs_folder(head))
    refused = Killed(head).refused()
    assert refused == f"job {name} has a launchpad, which goes on with it; nothing needs to be resumed"
    killed = kill(job)
    path = Path(jobs_folder(head), name, "resumed")
    assert not path.exists()
    path.mkdir()
    assert killed.refused() == f"job {name} can't be resumed: {path}: Is a directory"
    path.rmdir()
    with path.open("w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for command in ("resume", "stop"):
            assert f"job {name} is being resumed by another launchpad" in asks(head, command, name).stderr
    path = Path(jobs_folder(head), name, "checkpoint")
    found = path.read_bytes()
    path.write_bytes(b"0.0.0\n" + found.partition(b"\n")[2])
    assert re.search(r"was started by launchpad 0\.0\.0, and this is .*; resume it with that one$", killed.refused())
    os.utime(path, (1e9, 1e9))
    assert killed.refused() == (
        f"job {name} can't be resumed: it was without launchpad for more than 10m, so its ranks have ended"
    )
    assert "no job is without its launchpad" in asks(head, "resume").stderr
    assert "; its ranks ended at about 2001" in asks(head, "jobs").stdout.replace("\n", " ")
    path.unlink()
    assert killed.refused().endswith(f"; `launchpad stop {name}` ends its ranks")
    assert asks(head, "stop", name).returncode == 0
    assert "it was not started with --keep-running, or its ranks were ended by" in killed.refused()


@pytest.mark.parametrize("command", ["stacks", "top", "jobs", "wait"])
def test_it_is_said_that_a_job_is_without_launchpad(counting: Callable[..., Counting], command: str) -> None:
    job = counting()
    killed = kill(job)
    done = asks(job.head, command, *([killed.name] if command != "jobs" else []))
    at = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d"  # with the date, unless it is today's
    said = rf"without launchpad since {at}; `launchpad resume {killed.name}` takes it over, or its ranks end at {at}"
    assert re.search(said, done.stdout + done.stderr), done
    assert asks(job.head, "stop").returncode == 0


def test_files_have_each_line_once(head: Head, start: Start) -> None:
    """However much is printed while it is killed, again and again: in --log-dir, in --events, and in the record.

    Relative paths are from where the job was started.
    """
    (head.folder / "floods.py").write_text(FLOODS)
    reports = ("--events", "events.jsonl", "--report", "report.html", "--junit", "junit.xml")
    job = start(
        *(2, "--keep-running", "10m", "--log-dir", "logs", "--tee", 3, *reports, "floods.py"),
        stdout=subprocess.DEVNULL,
        bufsize=0,
    )

    def filed() -> int:
        return sum(one.stat().st_size for one in head.folder.glob("logs/*/*/*/stdout.log"))

    wait_until(lambda: filed() > 1 << 20, "output")
    killed = kill_launchpad(head, job)
    for _ in range(2):
        following = killed.resume()
        assert following.stdout is not None
        before = filed()
        while filed() < before + (1 << 20):
            assert following.stdout.read(1 << 16)
        following.kill()
        following.communicate()
    (head.folder / "go").touch()
    code, _, err = killed.ends()
    assert code == 0, err[-2000:]
    assert (head.folder / "report.html").exists()
    assert (head.folder / "junit.xml").exists()
    assert os.listdir(head.folder / "elsewhere") == []
    for rank in range(4):
        (path,) = head.folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        numbers = [int(line.split()[0]) for line in path.read_bytes().splitlines()]
        assert numbers == list(range(len(numbers)))
    told: dict[int, list[str]] = {}
    for line in (head.folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "Output" and event["stream"] == 1:
            told.setdefault(event["rank"], []).append(event["text"])
    assert {rank: "".join(texts).encode() for rank, texts in told.items()} == {
        rank: next(head.folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")).read_bytes() for rank in range(4)
    }


FLOODS = """\
import os
number = 0
while not os.path.exists("go"):
    os.write(1, b"".join(b"%d %s\\n" % (number + one, b"x" * 100) for one in range(100)))
    number += 100
"""


def test_mpi_goes_on(head: Head, start: Start) -> None:
    """What the ranks have told launchpad, before and after, and the end of their world."""
    pytest.importorskip("mpi4py")
    (head.folder / "sums.py").write_text(SUMS)
    job = start(2, "--backend", "mpi", "--keep-running", "10m", "sums.py", bufsize=0)
    assert job.process.stdout is not None
    for _ in range(8):
        assert job.process.stdout.readline(), job.process.communicate()[1].decode()
    killed = kill_launchpad(head, job)
    (head.folder / "go").touch()
    code, _, err = killed.ends()
    assert code == 0, err
    assert killed.logs().count(b"the sum is 6") == 4


SUMS = """\
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
while not world.allreduce(os.path.exists("go"), MPI.LOR):
    os.write(1, b"still here\\n")
    time.sleep(0.05)
os.write(1, b"the sum is %d\\n" % world.allreduce(world.rank))
"""


@pytest.mark.parametrize("failure", ["file", "folder", "signal"])
def test_one_that_fails_ends_nothing(head: Head, start: Start, network: Network, failure: str) -> None:
    """Whatever it fails for, the next one goes on with the same ranks."""
    (head.folder / "events").mkdir()
    job = Counting(head, start, "--keep-running", "10m", "--events", "events/all.jsonl")
    (record,) = Path(jobs_folder(head)).iterdir()
    log = record / "attempt_0" / "0" / "stdout.log"
    wait_until(lambda: checkpoint.read(str(record)).sizes.get(str(log)), "a checkpoint with output")
    pids = [job.ranks(name) for name in ("h1", "h2")]
    killed = kill(job)
    if failure == "file":
        kept = log.read_bytes()
        log.write_bytes(b"")
        assert "is shorter than launchpad has left it" in killed.refused()
        log.write_bytes(kept)
    elif failure == "folder":
        (head.folder / "events").rename(head.folder / "away")
        assert "all.jsonl" in killed.refused()
        (head.folder / "away").rename(head.folder / "events")
    else:
        for name in ("h1", "h2"):
            network.stall_sshd(name)
        following = killed.resume()
        wait_until(lambda: sockets(following.pid) == 2, "it to dial")
        following.terminate()
        _, err = following.communicate(timeout=DEADLINE)
        assert f"stopped by SIGTERM; job {killed.name} still goes on without launchpad" in err.decode()
        for name in ("h1", "h2"):
            network.go_on(name)
    assert [job.ranks(name) for name in ("h1", "h2")] == pids
    job.go()
    code, _, err_ = killed.ends()
    assert code == 0, err_
    check(killed.logs())


def sockets(pid: int) -> int:
    """How many it has."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            found += os.readlink(path).startswith("socket:")
    return found


# Each attempt of each rank leaves a file; they end when the test says so.
STAYS = """\
import os, time
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
"""


@pytest.mark.parametrize("options", [("--spares", 1), ("--max-restarts", 2)])
def test_hosts_come_and_go(head: Head, start: Start, network: Network, options: Sequence[object]) -> None:
    """One is lost, the ranks start again, it comes back, and the job can be resumed after all that."""
    (head.folder / "stays.py").write_text(STAYS)
    spares = "--spares" in options
    job = start(3 if spares else 2, *options, "--keep-running", "10s", "stays.py", bufsize=0)
    started(head, 4)
    network.power_off("h2")
    if spares:
        started(head, 8)
        network.power_on("h2")
        said_until(job.process, "h2 is back")
    else:
        said_until(job.process, "h2 was lost")
        network.power_on("h2")
        started(head, 8)
    killed = kill_launchpad(head, job)
    (head.folder / "go").touch()
    code, _, err = killed.ends()
    assert code == 0, err
    empty(network, "h2")
