"""`launchpad top`: what each rank does and uses, as JSON, as text, on a screen with keys; samples in the record."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad.agent.host import gpus
from launchpad.agent.host.process_trees import ProcessTrees
from launchpad.diagnosis import activity
from launchpad.diagnosis.activity import (
    ENDED,
    LOST,
    PROMPT,
    RUNNING,
    STARTING,
    WAITING,
    JobLook,
    RankLook,
)
from launchpad.diagnosis.history import History
from launchpad.head.samples import MOST_FIGURES, Samples
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.protocol.events import (
    STDOUT,
    JobPlanned,
    Output,
    RankExited,
    RankStarted,
    Restarted,
    Sampled,
    SampleRequested,
    SamplesTaken,
)
from tests.support.command import Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.hubs import FakeJob, FakeNodes
from tests.support.needs import needs_torch
from tests.support.sshd import needs_sshd
from tests.support.terminal import Start, Terminal
from tests.support.terminal import terminal as terminal

# Values.


def job(second: float, ranks: list[RankLook]) -> JobLook:
    hosts = [[name, ""] for name in dict.fromkeys(rank.host for rank in ranks)]
    return JobLook("4f2a91c3", ["t.py"], int(second * 1e9), 0, RUNNING, 0, 0, 0, hosts, [], ranks)


def test_what_is_known_of_a_job() -> None:
    history = History([JobPlanned(0, 0.0, "4f2a91c3", 1, "", ["t.py"], "/", [["a", [0, 1]], ["b", [2]]], {}, 0.0, "")])

    def look(*samples: Sampled, at_prompt: int = -1, lost: dict[int, str] | None = None) -> list[RankLook]:
        taken = SamplesTaken(9, [1], list(samples), ["c"])
        found = activity.look_at(history, taken, {0: 7}, at_prompt, lost or {})
        assert found.joining == ["c"]
        return list(activity.rank_looks(JobLook(*json.loads(json.dumps(found)))).values())

    assert [rank.state for rank in look()] == [STARTING] * 3
    for rank in range(3):
        history.on(RankStarted(1, rank, 100 + rank))
    history.on(Output(2, 0, STDOUT, b"step 1\n"))
    history.on(RankExited(5, 1, -9, 0, False))
    sample = Sampled(
        *(8, 1, [[0, "S", 1.5, 4096, 2, 10, 20], [1, "R", 9.0, 1, 1, 1, 1]], [[0, "barrier", 3, 1.5]]),
        [["GPU-1", 97, 100, 200, {"0": 60}]],
    )
    first, second, third = look(sample, lost={1: "lost: no heartbeat"})
    assert (first.host, first.pid, first.state, first.operation, first.number) == ("a", 100, WAITING, "barrier", 3)
    assert (first.cpu, first.memory, first.threads, first.read, first.written) == (1.5, 4096, 2, 10, 20)
    assert (first.lines, first.last_line, list(first.gpus)) == (7, "step 1", [["GPU-1", 97, 60, 200]])
    assert (second.state, second.code, second.cpu) == (ENDED, -9, -1)
    assert (third.host, third.state) == ("b", LOST)
    assert look(sample, at_prompt=0)[0].state == PROMPT
    history.on(Restarted(9, 1, 3, 1, -9, -1))
    assert [rank.state for rank in look()] == [STARTING] * 3


def plan_of(nodes: int) -> Plan:
    """A rank on each."""
    plans = (NodePlan(one, "", "/", {}, (RankPlan(one, 0, (), {}),), {}) for one in range(nodes))
    return Plan("", tuple(plans))


def test_samples_are_taken_when_somebody_asks_or_when_it_is_time() -> None:
    job = FakeJob(FakeNodes(0, 1), plan_of(2))
    sent, told = job.nodes.sent, job.told
    samples = Samples(job.hub, 10.0, lambda: ["c"])
    assert samples.deadline == 10.0
    samples.tick(job.at(9.0, 0, 1))
    assert sent == []
    samples.tick(job.at(10.0, 0, 1))
    assert [(one.number, one.asks) for one in sent] == [(1, False)]
    samples.on(0, Sampled(5, 1, [[0, "R", 1.0, 1, 1, 1, 1], [1, "R", 1.0, 1, 1, 1, 1]], [], []))
    assert [row[0] for row in told.pop().ranks] == [0]  # rank 1 is another node's
    samples.on(-1, SampleRequested(6, 7))
    samples.on(-1, SampleRequested(6, 8))
    assert [(one.number, one.asks) for one in sent[1:]] == [(2, True)]
    samples.on(1, Sampled(7, 2, [], [], []))
    samples.tick(job.at(10.5, 0, 1))
    assert told == []
    job.nodes.open.discard(0)  # lost: nobody waits for it
    samples.tick(job.at(10.5, 0, 1))
    assert [(one.askers, len(one.samples), one.joining) for one in told] == [([7, 8], 1, ["c"])]
    samples.tick(job.at(20.0))  # nothing runs
    assert len(sent) == 2
    # A long job is sampled less and less often.
    samples.tick(job.at(30.0, 0))
    samples.on(0, Sampled(8, 3, [[0, "R", 1.0, 1, 1, 1, 1]] * MOST_FIGURES, [], []))
    samples.tick(job.at(40.0, 0))
    assert samples.deadline == 60.0


def test_without_a_period_no_sample_is_taken() -> None:
    job = FakeJob(FakeNodes(0, 1), plan_of(2))
    samples = Samples(job.hub, 0.0, list)
    assert samples.deadline is None
    samples.tick(job.at(1e9, 0, 1))
    assert job.nodes.sent == []


# Real processes.


@contextlib.contextmanager
def family(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process with a thread and a child, which have used CPU, memory and files, and rest now."""
    program = (
        "import os, sys, threading, time\n"
        "held = b'x' * (50 << 20)\n"
        "while time.process_time() < 0.3: pass\n"
        "open('file', 'wb').write(held[:1 << 20]); open('file', 'rb').read()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "os.fork()\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        one = psutil.Process(process.pid)
        (child,) = one.children()
        wait_until(lambda: {one.status(), child.status()} == {psutil.STATUS_SLEEPING}, "both to sleep")
        yield one
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_figures_are_those_of_psutil(tmp_path: Path) -> None:
    with family(tmp_path) as one:
        tree = [one, *one.children(recursive=True)]
        assert len(tree) == 2
        trees = ProcessTrees()
        found = trees.read([one.pid])[one.pid]
        cpu = sum(sum(process.cpu_times()[:4]) for process in tree)
        moved = [process.io_counters() for process in tree]
        assert found.cpu == pytest.approx(cpu, abs=0.05)
        assert found.memory == pytest.approx(sum(process.memory_info().rss for process in tree), rel=0.02)
        assert found.threads == sum(process.num_threads() for process in tree) == 3
        assert (found.read, found.written) == (sum(io.read_chars for io in moved), sum(io.write_chars for io in moved))
        assert found.written >= 1 << 20
        assert found.state == "S"
        assert set(trees.root_of) == {process.pid for process in tree}
        # The same the next time, when the other processes of the machine are not looked at.
        assert trees.read([one.pid])[one.pid] == found
    assert trees.read([one.pid]) == {}


FAKE_NVML = r"""
#include <string.h>
#include <stdlib.h>
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } info;
static int handle;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &handle; return index; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) { strncpy(uuid, "GPU-0a", length); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned int *rates) { rates[0] = 97; rates[1] = 40; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *m) { m[0] = 80; m[1] = 30; m[2] = 50; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *why) { *why = 0x44; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, info *infos) {
    infos[0].pid = 4711; infos[0].used = 20;
    infos[1].pid = 4712; infos[1].used = ~0ULL;
    *count = 2;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvml.c").write_text(FAKE_NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True, timeout=60)
    monkeypatch.setattr(gpus, "_LIBRARY", str(library))
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        reader = gpus.GpuReader(wake)
        reader.begin()
        wait_until(lambda: not reader.busy, "the driver to answer")
        assert reader.gpus == [
            gpus.Gpu("GPU-0a", 97, 50, 80, {4711: 20, 4712: -1}, slowed=True)
        ]  # the second belongs to others
    finally:
        os.close(wake)


# Real jobs.


def asked(launchpad: Launchpad, *words: str) -> dict[str, Any]:
    done = launchpad.run("top", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def begun(launchpad: Launchpad, *words: object, ready: int) -> subprocess.Popen[bytes]:
    """A job, when so many lines were printed and it can be asked."""
    process = launchpad.start("run", *words)
    assert process.stdout is not None
    for _ in range(ready):
        assert b"ready" in process.stdout.readline()
    wait_until(lambda: launchpad.sockets, "the job to take questions")
    return process


def ended(launchpad: Launchpad, process: subprocess.Popen[bytes]) -> None:
    (launchpad.folder / "go").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_the_figures_tell_ranks_apart(launchpad: Launchpad) -> None:
    process = begun(launchpad, "-n", 4, "uneven.py", "go", ready=4)
    found: dict[str, Any] = {}

    def is_told() -> bool:
        found.update(asked(launchpad))
        ranks = found["ranks"]
        waits = [rank["waits"] for rank in ranks[2:] if rank["waits"]]
        has_waited = len(waits) == 2 and all((one["seconds"] or 0) > 1 for one in waits)
        return has_waited and ranks[1]["cpu"] > 0.05 + max(ranks[rank]["cpu"] for rank in (0, 2, 3))

    wait_until(is_told, "the ranks to be told apart", show=lambda: found)
    assert (found["state"], found["attempt"], found["words"][-1]) == ("running", 0, "go")
    ranks = found["ranks"]
    assert [rank["state"] for rank in ranks] == ["running", "running", "waiting", "waiting"]
    assert {rank["waits"]["operation"] for rank in ranks[2:]} == {"all_reduce"}
    assert len({rank["waits"]["number"] for rank in ranks[2:]}) == 1
    assert ranks[0]["memory"] > max(rank["memory"] for rank in ranks[1:]) + (200 << 20)
    assert [rank["last_line"] for rank in ranks] == [f"ready {rank}" for rank in range(4)]
    assert all(rank["threads"] >= 1 and rank["read"] > 0 and rank["written"] > 0 for rank in ranks)
    for rank in ranks:
        assert psutil.Process(rank["pid"]).is_running()
    shown: list[str] = []

    def is_shown(*words: str) -> bool:  # a rank that does not answer in time is said to be running
        done = launchpad.run("top", *words)
        assert (done.returncode, done.stderr) == (0, "")
        shown[:] = [done.stdout]
        return done.stdout.count("waiting in all_reduce") == 2

    for words in (["--once"], []):  # it is not on a terminal
        wait_until(lambda words=words: is_shown(*words), "both waiting ranks", show=lambda: shown)  # type: ignore[misc]
        assert re.search(r"^ +0 +running .* ready 0$", shown[0], re.M), shown
        assert re.search(r"^ +3 +waiting in all_reduce #\d+ for \d+ s .* ready 3$", shown[0], re.M), shown
    ended(launchpad, process)


@pytest.mark.usefixtures("from_image")
def test_the_processes_below_a_rank_are_told(launchpad: Launchpad) -> None:
    (launchpad.folder / "child.py").write_text(
        "import os, subprocess, time\n"
        "if os.fork() == 0:\n    time.sleep(1000)\n"
        "subprocess.Popen(['sleep', '1001'])\nprint('ready', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        "os._exit(0)\n"
    )
    process = begun(launchpad, "child.py", ready=1)
    found: list[dict[str, Any]] = []

    def are_told() -> bool:
        # Not by their pids, which start over at some time.
        found[:] = sorted(asked(launchpad)["ranks"][0]["children"], key=lambda one: str(one["command"]))
        return len(found) == 2 and found[1]["command"] == "sleep 1001" and found[0]["cpu"] is not None

    wait_until(are_told, "both processes", show=lambda: found)
    assert [(one["command"], one["state"]) for one in found] == [("", "asleep"), ("sleep 1001", "asleep")]
    assert all(psutil.Process(one["pid"]).is_running() and one["memory"] > 0 for one in found)
    lines = launchpad.run("top", "--once").stdout.splitlines()[-2:]
    for one, end in zip(found, ("", ".* sleep 1001$"), strict=True):
        assert any(re.match(rf" +└ +{one['pid']} asleep{end}", line) for line in lines), lines
    (launchpad.folder / "go").touch()
    process.communicate(timeout=60)


@needs_sshd
@pytest.mark.usefixtures("from_image")
def test_ranks_on_other_hosts_have_the_same_figures(launchpad: Launchpad, tmp_path: Path) -> None:
    with Hosts(launchpad, tmp_path / "hosts") as hosts:
        go = launchpad.folder / "go"
        words = ("--ssh-config", hosts.ssh_config, "--hosts", "n1,n2", "held_up.py", go)
        process = begun(launchpad, *words, ready=2)
        found: dict[str, Any] = {}

        def is_measured() -> bool:
            found.update(asked(launchpad))
            return all((rank["memory"] or 0) > 1 << 20 and rank["cpu"] is not None for rank in found["ranks"])

        wait_until(is_measured, "both ranks to be measured", show=lambda: found)
        assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, "n1"), (1, "n2")]
        assert re.search(r"^n1 +1 +\d+% .*\n^n2 +1 +\d+% ", launchpad.run("top", "--once").stdout, re.M)
        ended(launchpad, process)


def test_where_no_job_runs_it_says_so(launchpad: Launchpad) -> None:
    for words in ((), ("--once",), ("--json",), ("0123",)):
        done = launchpad.run("top", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "you have no running job" in done.stderr
    assert launchpad.run("run", "true").returncode == 0
    assert launchpad.run("top").returncode == 2


def samples(launchpad: Launchpad) -> list[dict[str, Any]]:
    found = "".join(path.read_text() for path in launchpad.state.glob("launchpad/jobs/*/samples.jsonl"))
    return [json.loads(line) for line in found.splitlines(keepends=True) if line.endswith("\n")]


def test_the_record_has_samples(launchpad: Launchpad) -> None:
    process = begun(launchpad, "-n", 2, "--sample", "0.1", "held_up.py", "go", ready=2)
    wait_until(lambda: len(samples(launchpad)) >= 3, "samples in the record")
    ended(launchpad, process)
    first, last = samples(launchpad)[0], samples(launchpad)[-1]
    assert set(last) == {"time", "ranks", "gpus"}
    assert [row[0] for row in first["ranks"]] == [0, 1]
    assert first["time"] < last["time"]
    for _, _, cpu, memory, threads, read, written in last["ranks"]:
        assert min(cpu, read, written) >= 0
        assert memory > 1 << 20
        assert threads == 1
    (events,) = launchpad.state.glob("launchpad/jobs/*/events.jsonl")
    assert "Sampled" not in events.read_text()
    assert launchpad.run("why").returncode == 0


def test_without_samples_the_record_has_none(launchpad: Launchpad) -> None:
    process = begun(launchpad, "-n", 2, "--sample", "0", "held_up.py", "go", ready=2)
    assert len(asked(launchpad)["ranks"]) == 2
    ended(launchpad, process)
    assert samples(launchpad) == []


# On a terminal.


def resize(screen: Terminal, rows: int, columns: int) -> None:
    fcntl.ioctl(screen.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def watched(terminal: Start) -> Terminal:
    """`launchpad top` on a terminal that is wide enough."""
    screen = terminal("top")
    resize(screen, 24, 110)
    screen.expect(r"\x1b\[\?1049h")
    return screen


@pytest.mark.usefixtures("from_image")
def test_keys_on_the_screen(launchpad: Launchpad, terminal: Start) -> None:
    process = begun(launchpad, "-n", 3, "held_up.py", "go", ready=3)
    screen = watched(terminal)
    screen.expect(r"job [0-9a-f]{8}")
    screen.expect(r"3 ranks: 3 running")
    screen.expect(r"q quit")
    screen.type("/1\r")  # only rank 1
    screen.expect(r"filter: 1 ")
    screen.type("\r")
    screen.expect(r"rank 1 on .*: its output")
    screen.expect(r"ready")
    screen.type("\x1b")
    screen.expect(r"filter: 1 ")
    screen.type("s")
    screen.expect(r"read_batch at .*held_up.py")
    screen.type("\x1b")
    screen.type("\x1b")
    screen.expect(r"Enter output")
    screen.type("o")
    screen.expect(r"order: CPU")
    resize(screen, 5, 30)
    screen.expect(r"the terminal is too small")
    resize(screen, 24, 100)
    screen.expect(r"order: CPU")
    screen.type("e")
    screen.expect(r"end job [0-9a-f]{8}\?")
    screen.type("n")
    screen.expect(r"order: CPU")
    screen.type("q")
    assert screen.rest().endswith("\x1b[?25h\x1b[?1049l")
    assert screen.process.wait(timeout=60) == 0
    ended(launchpad, process)


@pytest.mark.usefixtures("from_image")
def test_the_end_of_the_job_is_told(launchpad: Launchpad, terminal: Start) -> None:
    process = begun(launchpad, "-n", 3, "held_up.py", "go", ready=3)
    screen = watched(terminal)
    screen.expect(r"3 running")
    ended(launchpad, process)
    screen.expect(r"\x1b\[\?1049l")
    assert re.search(r"job [0-9a-f]{8} has ended, exit code 0", screen.rest())
    assert screen.process.wait(timeout=60) == 0


def test_who_says_yes_ends_the_job(launchpad: Launchpad, terminal: Start) -> None:
    process = begun(launchpad, "sh", "-c", "echo ready; exec sleep 600", ready=1)
    screen = watched(terminal)
    screen.expect(r"1 running")
    screen.type("e")
    screen.expect(r"end job [0-9a-f]{8}\?")
    screen.type("y")
    screen.expect(r"\x1b\[\?1049l")
    assert re.search(r"has ended, exit code 143", screen.rest())
    assert screen.process.wait(timeout=60) == 0
    process.communicate(timeout=60)
    assert process.returncode == 143
