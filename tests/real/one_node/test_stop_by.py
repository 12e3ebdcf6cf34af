"""`launchpad.stop_by` in a rank: what it knows of the time limits, of the allocation, and of being stopped."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.joined import c10d, leads, static
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("from_image")


def lines(output: str) -> list[str]:
    return sorted(line.split("] ", 1)[1] for line in output.splitlines())


def test_without_a_limit_there_is_no_time(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "asks_time.py").stdout == "[0] left: None\n"


def test_the_timeout_and_the_grace_after_it(launchpad: Launchpad) -> None:
    job = launchpad.start("run", "--timeout", 1000, "--grace", 200, "-n", 2, "asks_time.py", "wait")
    assert job.stdout is not None
    first = [job.stdout.readline() for _ in range(2)]
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=DEADLINE)
    assert lines(b"".join([*first, out]).decode()) == ["asked to stop: 200"] * 2 + ["left: 1000"] * 2


def test_an_attempt_begins_without_what_the_end_of_the_last_one_said(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--max-restarts", 1, "--grace", 200, "-n", 2, "asks_time.py", "fail")
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout)[-4:] == ["left: None"] * 4
    assert "[1] asked to stop: 200" in done.stdout


def test_the_end_of_a_slurm_allocation_and_stop_before(launchpad: Launchpad) -> None:
    launchpad.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 3000)
    assert launchpad.run("run", "asks_time.py").stdout == "[0] left: 3000\n"
    assert launchpad.run("run", "--stop-before", 1000, "asks_time.py").stdout == "[0] left: 2000\n"
    assert launchpad.run("run", "--timeout", 500, "asks_time.py").stdout == "[0] left: 500\n"


@pytest.mark.parametrize(
    ("variable", "command", "answer"),
    [
        ("PBS_JOBID", "qstat", "    Resource_List.walltime = 01:00:00\n    stime = {begun}"),
        ("LSB_JOBID", "bjobs", "0:50 L"),
        ("FLUX_JOB_ID", "flux", "3000"),
    ],
)
def test_other_schedulers_are_asked(launchpad: Launchpad, variable: str, command: str, answer: str) -> None:
    program = launchpad.folder / "bin" / command
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<END\n{answer.format(begun=time.ctime(time.time() - 600))}\nEND\n")
    program.chmod(0o755)
    launchpad.environ |= {variable: "7", "PATH": f"{program.parent}:{launchpad.environ['PATH']}"}
    here = ("--hosts", "localhost")
    assert launchpad.run("run", *here, "asks_time.py").stdout == "[0] left: 3000\n"
    stopped = launchpad.run("run", *here, "--stop-before", "1h", "asks_time.py", "wait")
    assert stopped.returncode == 143
    program.write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    assert launchpad.run("run", *here, "asks_time.py").stdout == "[0] left: None\n"
    refused = launchpad.run("run", *here, "--stop-before", "1h", "asks_time.py")
    assert refused.returncode == 2
    assert refused.stderr.startswith("launchpad: error: --stop-before needs to know when the allocation ends, and ")
    assert refused.stderr.endswith(": no such job; use --timeout\n")


def test_a_job_in_a_rank_ends_with_the_rank(launchpad: Launchpad) -> None:
    inner = launchpad.argv("run", "asks_time.py")
    done = launchpad.run("run", "--timeout", 1000, "--no-python", *inner)
    assert "left: 1000\n" in done.stdout


def test_a_launcher_that_joins_has_its_own_allocation(launchpad: Launchpad) -> None:
    port = free_port()
    head = launchpad.start("run", *static(0, port), "asks_time.py")
    launchpad.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 3000)
    other = launchpad.run("run", *static(1, port), "asks_time.py")
    out, _ = head.communicate(timeout=DEADLINE)
    assert (lines(out.decode()), lines(other.stdout)) == (["left: None"], ["left: 3000"])


def test_a_node_that_has_to_go_gives_all_ranks_their_time(launchpad: Launchpad) -> None:
    """The job goes on without it, from an attempt that has no limit."""
    port = free_port()
    options = [*c10d(port, nnodes="1:2", grace="200", rdzv_conf="last_call_timeout=600"), "asks_time.py", "wait"]
    head, other = (launchpad.start("run", *options) for _ in range(2))
    for job in (head, other):
        assert job.stdout is not None
        assert b"left: None" in job.stdout.readline()
    if not leads(head, port):
        head, other = other, head
    other.send_signal(signal.SIGTERM)
    out, _ = other.communicate(timeout=DEADLINE)
    assert b"asked to stop: 200" in out
    assert head.stdout is not None
    assert b"asked to stop: 200" in head.stdout.readline()
    assert b"left: None" in head.stdout.readline()
    head.send_signal(signal.SIGTERM)
    head.communicate(timeout=DEADLINE)
