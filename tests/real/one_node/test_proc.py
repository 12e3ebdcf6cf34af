"""Where /proc lacks files, hides processes, or is not mounted: what it would tell is not known, and nothing fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad import linux
from launchpad.agent.host import procfs
from launchpad.errors import UsageError
from launchpad.head import node_facts, stall
from launchpad.protocol.events import NodeFacts
from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.mounts import run_with_mounts, with_mounts
from tests.support.stacks import dumps

WITHOUT = "mount -t tmpfs none {}"
NO_PROC = WITHOUT.format("/proc")
NOTE = (
    "launchpad: /proc is not mounted here, or shows another PID namespace: processes that ranks leave behind can't be"
)

# Processes of other users are not to be seen, and root is not to see them either.
HIDDEN = "mount -t proc -o hidepid=2,gid=65533 proc /proc\n"
HIDDEN += 'set -- setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace "$@"'
STAYS = "echo up; sleep 600 & wait"
OTHER_USER = ("setpriv", "--reuid", "65534", "--clear-groups", "sh", "-c")


@pytest.mark.parametrize(
    "missing", ["/proc/sys/kernel", "/proc/sys", "/proc/sys/kernel; mount --bind /dev/null /proc/vmstat"]
)
@pytest.mark.parametrize("way", [(), ("--preload", "json")], ids=["executed", "forked"])
def test_a_job_runs_without_the_kernels_settings(launchpad: Launchpad, missing: str, way: tuple[str, ...]) -> None:
    done = run_with_mounts(launchpad, WITHOUT.format(missing), "run", "-n", 2, *way, "exits.py", 0, 7)
    assert done.returncode == 7
    assert done.stderr.startswith("launchpad: rank 1 failed first: exit code 7")


def test_a_job_runs_without_proc(launchpad: Launchpad) -> None:
    done = run_with_mounts(launchpad, NO_PROC, "run", "-n", 2, "exits.py", 0, 7)
    assert done.returncode == 7
    note, first, *_ = done.stderr.splitlines()
    assert note.startswith(NOTE)
    assert first.startswith("launchpad: rank 1 failed first: exit code 7")


def test_ranks_are_executed_where_forking_can_not_be_judged(launchpad: Launchpad) -> None:
    done = run_with_mounts(launchpad, NO_PROC, "run", "-n", 2, "--preload", "json", "exits.py", 0, 0)
    assert done.returncode == 0
    assert [line.partition(", ")[0] for line in done.stderr.splitlines()] == [
        NOTE.partition(", ")[0],
        "launchpad: ranks can't be forked",
    ]


def test_no_rank_outlives_a_head_without_proc(launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*with_mounts(launchpad, NO_PROC), *launchpad.argv("run", "-n", 2, "sh", "-c", STAYS)]
    monkeypatch.setattr(launchpad, "argv", lambda: command)
    process = launchpad.start()
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().endswith(b"] up\n")
    process.kill()
    wait_until(lambda: not launchpad.survivors(), "the ranks and their children to end", show=launchpad.survivors)


def test_under_another_pid_namespaces_proc_nobody_is_taken_for_a_rank(launchpad: Launchpad) -> None:
    """The numbers that it shows are those of others here, or of nobody."""
    with_mounts(launchpad, "true")
    argv = ["unshare", "--pid", "--fork", *launchpad.argv("run", "sh", "-c", "sleep 600 > /dev/null 2>&1 &")]
    done = subprocess.run(
        argv,
        env=launchpad.environ,
        cwd=launchpad.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(NOTE.encode())
    assert done.stderr.count(b"\n") == 1


def test_no_machine_is_known_by_its_namespaces_alone(launchpad: Launchpad) -> None:
    """Their numbers are the same on every machine."""
    code = "from launchpad.agent.host import probe; print(repr(probe.machine()))"
    argv = [*with_mounts(launchpad, WITHOUT.format("/proc/sys/kernel")), sys.executable, "-c", code]
    assert subprocess.check_output(argv, text=True, timeout=DEADLINE) == "''\n"
    unknown = NodeFacts(0, "python", "3.11.7", "", "", [], "", [])
    node_facts.check_machines(["a", "b"], [unknown, unknown])
    with pytest.raises(UsageError, match="a and b are one machine"):
        node_facts.check_machines(["a", "b"], [unknown._replace(machine="m")] * 2)


def test_a_rank_that_is_hidden_is_neither_dead_nor_stuck(launchpad: Launchpad) -> None:
    works = "timeout 4 sh -c 'while :; do :; done'; exit 7"
    done = run_with_mounts(launchpad, HIDDEN, "run", "--stall-timeout", 1, *OTHER_USER, works)
    assert done.returncode == 7, done.stderr
    done = run_with_mounts(launchpad, HIDDEN, "run", "--timeout", 1, *OTHER_USER, "sleep 600")
    assert done.returncode == 124
    assert "rank 0 is in an unknown state (/proc is hidden)" in done.stderr


def test_a_process_that_is_hidden_is_not_dying(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(_: object) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(linux, "stat", hidden)
    monkeypatch.setattr(procfs, "status", lambda _: {})
    assert procfs.state(os.getpid()) == ""
    assert not procfs.is_dying(os.getpid())


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_a_process_lives_on_without_its_main_thread(tmp_path: Path, how: str) -> None:
    argv = [sys.executable, str(PROGRAMS / "without_main_thread.py"), how]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=tmp_path)
    wait_until((tmp_path / "alone").exists, "the main thread to exit")
    assert procfs.state(process.pid) == "X"
    assert not procfs.is_dying(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.is_dying(process.pid)
    process.wait(DEADLINE)
    assert procfs.is_dying(process.pid)


def test_what_is_not_known_of_a_rank_is_no_stall() -> None:
    idle = dumps(0, [["/w/train.py", 41, "main", "compute()"]])
    assert stall.is_stuck(idle, idle, 10.0)
    for unknown in (idle._replace(cpu=-1.0), idle._replace(moved=-1)):
        assert not stall.is_stuck(unknown, unknown, 10.0)


def test_without_counters_nobody_is_said_to_have_sent_the_signal(launchpad: Launchpad) -> None:
    mounts = WITHOUT.format("/sys/fs/cgroup") + "; mount --bind /dev/null /proc/vmstat"
    done = run_with_mounts(launchpad, mounts, "run", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137
    assert "rank 0 failed first: killed by SIGKILL" in done.stderr
    assert "memory" not in done.stderr
