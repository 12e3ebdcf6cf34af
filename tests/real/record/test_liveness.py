"""Whether a recorded job still runs, with the lock on its record and without; what becomes of the record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping

import psutil
import pytest

from launchpad.protocol.events import JobPlanned
from launchpad.record import job_store
from launchpad.record.liveness import HeadProcess, Lock, State, judge, lives, own_process
from launchpad.record.usage import usage
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.records import store_of

HERE = HeadProcess("a", "boot 1", "pid:[1]", 5.0)

# As on a file system without locks.
NO_LOCKS = """
import errno, fcntl
def flock(fd, operation):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""


def planned(process: HeadProcess, pid: int = 7) -> JobPlanned:
    return JobPlanned(0, 0.0, "0a1b", pid, "", ["x"], "/", [], {}, 0.0, "", *process)


@pytest.mark.parametrize(
    ("lock", "process", "lives", "state"),
    [
        ("held", HERE, False, "running"),
        ("held", HeadProcess("b", "boot 2", "pid:[1]", 5.0), False, "running"),
        ("free", HERE, True, "over"),  # the process lives on, as a notebook does
        ("none", HERE, True, "running"),
        ("none", HERE, False, "over"),
        ("none", HERE._replace(host="renamed"), True, "running"),
        ("none", HERE._replace(pids="pid:[2]"), True, "unknown"),  # a container's
        ("free", HERE._replace(pids="pid:[2]"), True, "over"),
        ("none", HERE._replace(boot="boot 0"), True, "over"),  # the machine was started anew
        ("free", HERE._replace(boot="boot 0"), True, "over"),
        ("none", HeadProcess("b", "boot 2", "pid:[1]", 5.0), True, "unknown"),
        ("free", HeadProcess("b", "boot 2", "pid:[1]", 5.0), True, "unknown"),
        ("none", HeadProcess("", "", "", 0.0), True, "unknown"),  # recorded by an earlier launchpad
        ("free", HeadProcess("", "", "", 0.0), True, "over"),
    ],
)
def test_the_lock_tells_and_else_the_process(lock: Lock, process: HeadProcess, lives: bool, state: State) -> None:
    assert judge(lock, planned(process), False, HERE, lambda _: lives) == state
    assert judge(lock, planned(process), True, HERE, lambda _: lives) == ("running" if lock == "held" else "over")


def test_a_record_that_has_nothing_is_over() -> None:
    assert judge("none", None, False, HERE, lambda _: True) == "over"


def test_a_process_is_known_again_and_no_other_is_taken_for_it() -> None:
    process = own_process()
    assert lives(planned(process, os.getpid()))
    assert not lives(planned(process._replace(born=process.born - 10), os.getpid()))
    assert not lives(planned(process, 1))
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "a zombie")
        born = psutil.Process(child.pid).create_time() - psutil.boot_time()
        assert not lives(planned(process._replace(born=born), child.pid))
    assert not lives(planned(process._replace(born=born), child.pid))


@pytest.fixture
def job(launchpad: Launchpad) -> subprocess.Popen[bytes]:
    """One that runs, on a file system without locks."""
    (launchpad.folder / "sitecustomize.py").write_text(NO_LOCKS)
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    (launchpad.folder / "stays.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    process = launchpad.start("run", "-n", 2, "stays.py")
    assert process.stdout is not None
    for _ in range(2):
        assert b"up" in process.stdout.readline()
    return process


def rewrite(launchpad: Launchpad, **fields: object) -> None:
    """Change what the only record says of its launchpad."""
    (path,) = store_of(launchpad).glob("*/events.jsonl")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), **fields}) + "\n" + "".join(rest))


def row(launchpad: Launchpad) -> Mapping[str, object]:
    (found,) = json.loads(launchpad.run("jobs", "--json").stdout)
    assert isinstance(found, dict)
    return found


def test_without_locks_a_job_is_known_by_its_process(launchpad: Launchpad, job: subprocess.Popen[bytes]) -> None:
    assert launchpad.run("why").stdout.splitlines()[1] == "the job is running: ranks 0-1"
    found = row(launchpad)
    assert (found["kind"], found["pid"], found["here"]) == ("running", job.pid, True)
    assert isinstance(found["memory"], int)
    assert found["memory"] > 1 << 20
    following = launchpad.start("logs", "-f")
    assert following.stdout is not None
    assert {following.stdout.readline() for _ in range(2)} == {b"[0] up\n", b"[1] up\n"}
    job.kill()
    job.wait(timeout=DEADLINE)
    assert following.wait(timeout=DEADLINE) == 0
    assert row(launchpad)["kind"] == "cut off"
    assert row(launchpad)["memory"] is None
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)


def test_of_another_hosts_job_nobody_here_can_tell(launchpad: Launchpad, job: subprocess.Popen[bytes]) -> None:
    """Its record is this machine's, under another name."""
    rewrite(launchpad, host="node7", boot="another")
    assert (row(launchpad)["how"], row(launchpad)["here"]) == ("unknown, on node7", False)
    assert "  unknown, on node7   " in launchpad.run("jobs").stdout
    why = launchpad.run("why")
    assert f"launchpad, process {job.pid} on node7" in why.stdout
    assert json.loads(launchpad.run("why", "--json").stdout)["kind"] == "unknown"
    (name,) = os.listdir(store_of(launchpad))
    sockets = launchpad.state / "launchpad" / "running"
    wait_until(lambda: sockets.exists() and os.listdir(sockets), "the job's socket")
    os.rename(sockets, sockets.with_name("away"))
    stacks = launchpad.run("stacks", name[:4])
    os.rename(sockets.with_name("away"), sockets)
    assert stacks.returncode == 2
    assert stacks.stderr.endswith(f"; job {name} was started on node7: run launchpad stacks there\n")
    job.terminate()
    assert job.wait(timeout=DEADLINE) == 128 + signal.SIGTERM
    # Its own end is in the record, which then everybody can tell.
    assert row(launchpad)["kind"] == "signal"
    assert launchpad.run("stacks").stderr.startswith(
        f"launchpad: error: you have no running job on {os.uname().nodename}; "
    )


def test_a_machine_that_was_started_anew_runs_no_job(launchpad: Launchpad, job: subprocess.Popen[bytes]) -> None:
    rewrite(launchpad, boot="the one before")
    assert row(launchpad)["kind"] == "cut off"
    job.terminate()
    assert job.wait(timeout=DEADLINE) == 128 + signal.SIGTERM


def test_records_of_an_earlier_launchpad_are_read(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "true").returncode == 0
    (path,) = store_of(launchpad).glob("*/events.jsonl")
    first, *rest = path.read_text().splitlines(keepends=True)
    kept = {name: value for name, value in json.loads(first).items() if name not in HeadProcess._fields}
    path.write_text(json.dumps(kept) + "\n" + "".join(rest))
    assert (row(launchpad)["kind"], row(launchpad)["host"]) == ("none", "")


def test_what_may_still_run_is_kept(launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four records, when none is to be kept."""
    process = own_process()
    seats = {
        "here": process,
        "reused": process._replace(born=process.born - 10),
        "elsewhere": HeadProcess("node7", "another", "pid:[1]", 1.0),
        "anew": process._replace(boot="the one before"),
    }
    for name, one in seats.items():
        folder = store_of(launchpad) / name
        folder.mkdir(parents=True)
        said = {"event": "JobPlanned", **planned(one, os.getpid())._asdict()}
        (folder / "events.jsonl").write_text(json.dumps(said) + "\n")
    monkeypatch.setattr(job_store, "MOST_JOBS", 0)
    monkeypatch.setattr(job_store, "SLACK", 0)

    def flock(fd: int, operation: int) -> None:
        raise OSError(f"no locks: {fd} {operation}")

    monkeypatch.setattr("fcntl.flock", flock)
    job_store.prune(launchpad.environ, by_size=False)
    assert set(os.listdir(store_of(launchpad))) == {"here", "elsewhere"}


def test_what_a_job_takes_is_that_of_its_ranks_too(launchpad: Launchpad) -> None:
    """A rank that has filled 64 MiB, and computes until it is told to stop."""
    (launchpad.folder / "busy.py").write_text(
        "import os\nx = bytearray(b'1') * (64 << 20)\nprint('up', flush=True)\n"
        "while not os.path.exists('stop'): sum(range(10000))\n"
    )
    process = launchpad.start("run", "busy.py")
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] up\n"
    busy, gone = usage([process.pid, 2**22 + 1])
    assert busy.memory > 64 << 20
    assert gone == (0, 0)
    wait_until(lambda: usage([process.pid])[0].processors > 0, "the rank to compute")
    (launchpad.folder / "stop").touch()
    assert process.wait(timeout=DEADLINE) == 0
