"""Nothing is ever left behind: whatever dies, in any order, no process, socket, shared memory or file stays."""

from __future__ import annotations

import fcntl
import os
import random
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launchpad.agent.ranks import shared_memory
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.ends import memory_limit as memory_limit

STRAYS = ("plain", "holds", "deaf", "session", "daemon")
VICTIMS = ("head", "guard", "agent", "rank", "head and agent")
TIME_WAIT = "06"  # a closed connection that only the kernel still remembers


def sockets_on(port: int) -> list[str]:
    """TCP sockets with this local or remote port in /proc/net/tcp, except those in TIME_WAIT."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    wanted = f":{port:04X}"
    return [" ".join(row) for row in rows if (row[1] + row[2]).find(wanted) >= 0 and row[3] != TIME_WAIT]


class Job:
    """A running job and its processes."""

    def __init__(self, launchpad: Launchpad, *args: object, **options: object) -> None:
        self.launchpad = launchpad
        self.process = launchpad.start("run", *args, **options)
        self.port = 0

    def guard(self) -> psutil.Process:
        """The guard, once it exists."""
        return self._only_child(psutil.Process(self.process.pid))

    def agent(self) -> psutil.Process:
        """The agent, once it exists."""
        return self._only_child(self.guard())

    def _only_child(self, parent: psutil.Process) -> psutil.Process:
        wait_until(parent.children, f"a child of {parent.pid}")
        (child,) = parent.children()
        return child

    def ranks(self, count: int) -> list[psutil.Process]:
        """The ranks, once there are `count` of them: the agent's children that lead a session."""
        agent = self.agent()

        def leaders() -> list[psutil.Process]:
            try:
                return [one for one in agent.children() if os.getsid(one.pid) == one.pid and one.ppid() == agent.pid]
            except (psutil.NoSuchProcess, ProcessLookupError):  # one has just exited: try again
                return []

        wait_until(lambda: len(leaders()) >= count, f"{count} ranks")
        return leaders()

    def read_ports(self, ranks: int) -> None:
        """Read until every rank has reported that it and its strays are up."""
        for _ in range(ranks):
            while b" port " not in (line := self.process.stdout.readline()):
                assert line, self.process.stderr.read()
        self.port = int(line.split()[-1])
        assert sockets_on(self.port)

    def kill(self, victim: str, ranks: int = 2) -> None:
        """Send SIGKILL to one of VICTIMS."""
        agent, guard = self.agent(), self.guard()
        match victim:
            case "head":
                self.process.kill()
            case "guard":
                guard.kill()
            case "agent":
                agent.kill()
            case "rank":
                self.ranks(ranks)[0].kill()
            case "head and agent":  # neither can react to the other's death, so the guard has to sweep
                self.process.send_signal(signal.SIGSTOP)
                agent.kill()
                self.process.kill()

    def end(self, victim: str) -> int:
        """The head's exit code. If the victim's death does not end the job, a SIGTERM does."""
        if victim == "guard":
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=DEADLINE)
        if "head" not in victim:
            assert not self.launchpad.survivors(), "a head that exits by itself leaves nothing, not even for a moment"
        return self.process.returncode


CODES = {"head": -9, "guard": 143, "agent": 4, "rank": 137, "head and agent": -9}


@pytest.fixture(autouse=True)
def nothing_left(launchpad: Launchpad) -> Iterator[list[Job]]:
    """After each test: no process, no socket on the jobs' ports, nothing in /dev/shm. (conftest checks files.)"""
    before = set(os.listdir("/dev/shm"))
    jobs: list[Job] = []
    yield jobs
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)
    for port in {job.port for job in jobs if job.port}:
        wait_until(lambda port=port: not sockets_on(port), "the sockets to close", show=lambda p=port: sockets_on(p))

    def left() -> list[str]:
        """What this test's programs have made, and what is launchpad's but of no guard that lives: others test too."""
        new = set(os.listdir("/dev/shm")) - before
        guards = {name: re.match(r"launchpad-\w+-(\d+)-", name) for name in new if name.startswith("launchpad")}
        return [
            *(name for name in new if name.startswith(launchpad.mark)),
            *(name for name, found in guards.items() if not (found and os.path.exists(f"/proc/{found[1]}"))),
        ]

    wait_until(lambda: not left(), "shared memory to be removed", show=left)


@pytest.fixture
def start(launchpad: Launchpad, nothing_left: list[Job]) -> Callable[..., Job]:
    """Start `launchpad run ARGS`."""

    def start(*args: object, **options: object) -> Job:
        nothing_left.append(Job(launchpad, *args, **options))
        return nothing_left[-1]

    return start


Start = Callable[..., Job]


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left_after_a_kill(start: Start, victim: str, stray: str) -> None:
    job = start("-n", 2, "--grace", 1, "leaves.py", stray)
    job.read_ports(2)
    job.kill(victim)
    assert job.end(victim) == CODES[victim]


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("code", [0, 5])
def test_nothing_is_left_of_what_ranks_leave_behind(start: Start, stray: str, code: int) -> None:
    job = start("-n", 2, "--grace", 1, "leaves.py", stray, code, 0 if code == 0 else "-")
    out, err = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == code
    assert not job.launchpad.survivors()
    assert b" port " in out
    assert b" that ranks left behind" in err
    job.port = int(out.split(b" port ")[1].split()[0])


SWEEPS = """
import os, signal, subprocess
from launchpad.agent.host import processes
dying = [subprocess.Popen(["sleep", "600"]) for _ in range(20)]
deaf = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
for one in (*dying, deaf):
    one.terminate()
print(processes.sweep(processes.reap) == {deaf.pid: "sleep 600"})
"""


def test_process_dying_of_an_earlier_signal_does_not_count_as_left_behind() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SWEEPS], capture_output=True, text=True)
    assert done.stdout == "True\n", done


def test_random_kills_at_random_moments_leave_nothing(start: Start) -> None:
    seed = int(os.environ.get("KILLS_SEED", random.randrange(1 << 32)))
    print(f"KILLS_SEED={seed}")  # pytest shows it when the test fails
    rng = random.Random(seed)
    for turn in range(15):
        victim, stray, lines = rng.choice(VICTIMS), rng.choice(STRAYS), rng.choice([0, 0, 1, rng.randrange(200)])
        print(turn, victim, stray, lines)
        job = start("-n", 2, "--grace", 1, "leaves.py", stray)
        for _ in range(lines):
            assert job.process.stdout.readline()
        if victim == "guard" and lines == 0:  # before the ranks start, the job needs its guard
            job.ranks(2)
        job.kill(victim)
        code = job.end(victim)
        # An agent that dies before it has answered counts as failed to start: exit code 3.
        assert code == CODES[victim] or (victim == "agent" and lines == 0 and code == 3)
        show = job.launchpad.survivors
        wait_until(lambda show=show: not show(), "the sweep", show=show)


@pytest.mark.parametrize("victim", ["head", "agent", "head and agent"])
def test_killed_while_ranks_are_being_started(start: Start, victim: str) -> None:
    job = start("-n", 200, "sleep", 600)
    job.ranks(1)
    job.kill(victim)
    assert job.end(victim) == CODES[victim]


def test_head_killed_before_the_agent_exists(start: Start) -> None:
    job = start("-n", 2, "sleep", 600)
    job.guard()
    job.process.kill()
    assert job.end("head") == -9


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_while_output_floods_into_a_full_pipe(start: Start, victim: str) -> None:
    reader, writer = os.pipe()
    job = start("-n", 2, "--grace", 1, "leaves.py", "flood", stdout=writer)
    wait_until(lambda: not select.select([], [writer], [], 0)[1], "the pipe to be full")
    os.close(writer)
    job.kill(victim)
    if victim == "guard":
        job.process.send_signal(signal.SIGTERM)
    # A live head keeps the rest of the output for its reader; no other process waits with it.
    if victim == "agent":
        wait_until(lambda: len(job.launchpad.survivors()) <= 1, "the sweep", show=job.launchpad.survivors)
    while os.read(reader, 1 << 16):
        pass
    os.close(reader)
    assert job.end(victim) == CODES[victim]


@pytest.mark.parametrize("end", ["failure", "signal", "head"])
def test_stopped_rank_does_not_outlive_its_job(start: Start, end: str) -> None:
    job = start("-n", 2, "--grace", 0.3, "leaves.py", "plain")
    job.read_ports(2)
    first, second = job.ranks(2)
    first.suspend()
    wait_until(lambda: first.status() == psutil.STATUS_STOPPED, "the rank to stop")
    if end == "failure":
        second.kill()
    elif end == "signal":
        job.process.terminate()
    else:
        job.process.kill()
    assert job.end("head" if end == "head" else "") == {"failure": 137, "signal": 143, "head": -9}[end]


@pytest.mark.parametrize("shell", [[], ["bash", "-c", '"$@"; true', "bash"]], ids=["session leader", "under a shell"])
def test_terminal_that_closes_ends_the_job(launchpad: Launchpad, shell: list[str]) -> None:
    """SIGHUP, end-of-file on standard input and EIO on standard output, all at once."""
    master, terminal = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    argv = [*shell, *launchpad.argv("run", "-n", 2, "--grace", 1, "leaves.py", "daemon")]
    with subprocess.Popen(
        argv,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=take_terminal,
        cwd=launchpad.folder,
        env={**launchpad.environ, "TERM": "dumb"},
    ) as process:
        os.close(terminal)
        seen = b""
        while seen.count(b"] port ") < 2:
            assert select.select([master], [], [], DEADLINE)[0]
            seen += os.read(master, 1 << 16)
        os.close(master)
        code = process.wait(timeout=DEADLINE)
    assert code == (-signal.SIGHUP if shell else 128 + signal.SIGHUP)


@pytest.mark.usefixtures("memory_limit")
def test_out_of_memory_leaves_nothing(start: Start, request: pytest.FixtureRequest) -> None:
    job = start("-n", 2, "--grace", 1, "leaves.py", "hungry", preexec_fn=request.getfixturevalue("memory_limit"))
    assert b"by the kernel's OOM killer" in job.process.communicate(timeout=DEADLINE)[1]
    assert job.process.returncode == 137


@pytest.mark.parametrize("victim", ["head", "agent", "rank", "nobody", "nobody, as the terminal closed"])
def test_shared_memory_of_killed_ranks_is_removed(start: Start, victim: str) -> None:
    """Python's helper process removes it: the sweep must not kill the helper before that."""
    job = start("-n", 2, "--grace", 1, "shares.py")
    for _ in range(2):
        assert b"shared" in job.process.stdout.readline()
    if victim == "nobody":
        job.process.terminate()
    elif victim not in VICTIMS:
        job.process.send_signal(signal.SIGHUP)
    else:
        job.kill(victim)
    assert job.end(victim) == {**CODES, "nobody": 143}.get(victim, 129)


NAMES_ITS_PID = (
    "import mmap, os, time\nfrom multiprocessing import connection\n"
    "maps = []\n"  # as both do: a segment that nobody has mapped is what a test of MPI removes
    "for name in (f'torch_{os.getpid()}_1_0', f'mpich_shm_{os.getpid():x}_0'):\n"
    "    file = os.open(f'/dev/shm/{name}', os.O_RDWR | os.O_CREAT)\n"
    "    os.truncate(file, 1)\n    maps.append(mmap.mmap(file, 1))\n"
    "listener = connection.Listener(family='AF_UNIX')\n"
    "print('made', os.getpid(), listener.address, flush=True)\ntime.sleep(600)\n"
)


@pytest.mark.parametrize("victim", ["head", "agent", "rank", "nobody"])
def test_what_a_killed_rank_has_named_after_its_pid_is_removed(start: Start, launchpad: Launchpad, victim: str) -> None:
    """As torch and MPICH do; and multiprocessing's folders, which name nobody."""
    if os.stat("/proc/self/ns/pid").st_ino != shared_memory._FIRST_NAMESPACE:
        pytest.skip("needs the first pid namespace: elsewhere nothing is removed")
    (launchpad.folder / "names.py").write_text(NAMES_ITS_PID)
    job = start("-n", 2, "--grace", 1, "names.py")
    left = []
    for _ in range(2):
        *_, pid, address = job.process.stdout.readline().decode().split()
        left += [f"/dev/shm/torch_{pid}_1_0", f"/dev/shm/mpich_shm_{int(pid):x}_0", os.path.dirname(address)]
    assert all(map(os.path.exists, left))
    job.process.terminate() if victim == "nobody" else job.kill(victim)
    job.end(victim)
    wait_until(lambda: not any(map(os.path.exists, left)), "what they have made to be removed", show=lambda: left)


@pytest.mark.parametrize("python", ["python", f"{'long-name/' * 12}python"])
def test_pythons_helper_does_not_count_as_left_behind(start: Start, launchpad: Launchpad, python: str) -> None:
    """Every program that uses multiprocessing has one, and it exits by itself, so there is no message about it."""
    interpreter = launchpad.folder / python
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    interpreter.symlink_to(sys.executable)
    job = start("-n", 2, "--python", interpreter, "shares.py", "tidy")
    _, err = job.process.communicate(timeout=DEADLINE)
    assert (job.process.returncode, err) == (0, b"")


# Ranks that stop what looks after them.

STOPS = """
import os, signal, sys, time
def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
agent = os.getppid()
of = {"agent": agent, "guard": parent(agent), "forkserver": 0}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            if parent(pid) == agent and "forkserver/__main__" in file.read():
                of["forkserver"] = int(pid)
    except OSError:
        pass
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for victim in sys.argv[2:] if first else []:
    os.kill(of[victim], getattr(signal, sys.argv[1]))
print("done", flush=True)
if "forkserver" in sys.argv:
    sys.exit(3 * first)
time.sleep(600)
"""


def test_a_rank_that_stops_its_agent_loses_it(launchpad: Launchpad) -> None:
    (launchpad.folder / "stops.py").write_text(STOPS)
    done = launchpad.run("run", "stops.py", "SIGSTOP", "agent")
    assert done.returncode == 4, done.stderr
    assert (
        "launchpad: the job's node was lost: the agent was stopped by another process's SIGSTOP, and not continued "
        "within 5 s; its ranks were killed\n"
    ) in done.stderr


@pytest.mark.parametrize("victims", [("guard",), ("agent", "guard")])
def test_a_job_whose_guard_a_rank_has_stopped_leaves_nothing(launchpad: Launchpad, victims: tuple[str, ...]) -> None:
    (launchpad.folder / "stops.py").write_text(STOPS)
    job = Job(launchpad, "stops.py", "SIGSTOP", *victims)
    guard = job.guard()
    wait_until(lambda: guard.status() == psutil.STATUS_STOPPED, "the guard to be stopped")
    if "agent" in victims:
        job.process.kill()
    else:
        job.process.terminate()
    job.process.communicate(timeout=DEADLINE)
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)


@pytest.mark.parametrize("signum", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_ends_the_forkserver_does_not_hold_up_the_restart(launchpad: Launchpad, signum: str) -> None:
    (launchpad.folder / "stops.py").write_text(STOPS)
    done = launchpad.run("run", "--preload", "json", "--max-restarts", 1, "stops.py", signum, "forkserver")
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
