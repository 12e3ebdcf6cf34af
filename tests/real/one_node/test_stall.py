"""--stall-timeout: programs that hang, and programs that only look like it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad.agent.host import procfs
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.needs import needs_mpich, needs_ptrace, needs_torch
from tests.support.run_mpi import compiled
from tests.support.terminal import Terminal


@pytest.mark.parametrize("words", [("sleep", "600"), ("sh", "-c", "sleep 600; true")], ids=["itself", "its child"])
def test_who_sleeps_for_a_given_time_is_known(words: tuple[str, ...]) -> None:
    with subprocess.Popen(words, start_new_session=True) as process:
        try:
            wait_until(lambda: bool(procfs.sleep(process.pid)), "it to sleep")
            assert procfs.sleep(process.pid) == procfs.sleep(process.pid)
            assert procfs.system_call(process.pid) in ("clock_nanosleep", "wait4", "")  # "": not shown, or not known
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as waits:
        wait_until(lambda: procfs.state(waits.pid) == "S", "it to wait")
        assert procfs.sleep(waits.pid) == ""


@contextlib.contextmanager
def serving(scratch: Path, source: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that begins to serve stacks as a rank does, and its connection to the agent, which we are."""
    path = str(scratch / "answers")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.bind(path)
        agent.listen()
        agent.settimeout(DEADLINE)
        rank = subprocess.Popen([sys.executable, "-c", source, path])
        try:
            with agent.accept()[0] as line:
                line.settimeout(DEADLINE)
                yield rank, line
        finally:
            rank.kill()
            rank.wait()


KEEPS_THE_LOCK = """
import ctypes, sys
from launchpad.rank import stack_server
sys.setswitchinterval(1000)
pause = ctypes.PyDLL(None).pause
stack_server.prepare(sys.argv[1], True)
pause()
"""


def test_a_rank_that_never_lets_go_of_the_interpreters_lock_can_be_asked(scratch: Path) -> None:
    with serving(scratch, KEEPS_THE_LOCK):
        pass  # it has connected


OUTLIVES_ITS_INTERPRETER = """
import ctypes, sys
from launchpad.rank import stack_server
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
stack_server.prepare(sys.argv[1], True)
"""


def test_no_thread_of_ours_outlives_the_interpreter(scratch: Path) -> None:
    with serving(scratch, OUTLIVES_ITS_INTERPRETER) as (rank, line):
        assert line.recv(1) == b""
        wait_until(lambda: procfs.system_call(rank.pid) in ("pause", ""), "the interpreter to be gone")
        wait_until(lambda: len(os.listdir(f"/proc/{rank.pid}/task")) == 1, "the thread to be gone")


# Real programs. The time-outs are short; a job that would end by itself has --timeout to end it otherwise.

PLAIN = [
    # how the ranks start, the words of the program, the exit code, what is said
    pytest.param((), ("lock",), 124, [r"ranks 0-1 are in take at .*hangs.py:\d+: mutex.acquire\(\)"], id="lock"),
    pytest.param(
        ("--preload", "json"),
        ("sleeping",),
        124,
        [r"rank 0 is in sleeping", r"rank 1 waits for a threading.Event"],
        id="s",
    ),
]


def hang(launchpad: Launchpad, *words: object) -> tuple[int, str]:
    # Each look takes longer on a busy machine, and of ranks that spin several are needed.
    done = launchpad.run("run", "-n", 2, *words, timeout=3 * DEADLINE)
    print(done.stderr)  # shown if the test fails: where the ranks were
    assert done.stdout.count("ready") == 2, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(("way", "words", "code", "says"), PLAIN)
def test_a_hang_ends_the_job(
    launchpad: Launchpad, way: tuple[str, ...], words: tuple[str, ...], code: int, says: list[str]
) -> None:
    ended, err = hang(launchpad, *way, "--stall-timeout", 1, "hangs.py", *words)
    assert ended == code
    assert all(re.search(one, err) for one in says), err
    assert re.search(r"the job was stopped: it hung, with no output or progress for \d+ s", err)


def test_an_endless_loop_is_no_stall(launchpad: Launchpad) -> None:
    code, err = hang(launchpad, "--stall-timeout", 0.4, "--timeout", 3, "hangs.py", "loop")
    assert code == 124
    assert "it ran longer than --timeout 3 s" in err
    assert re.search(r"rank 1 is in loop at .*hangs.py:\d+: while RANK:", err), err


@pytest.mark.parametrize("words", [("slow", 2, "."), ("child", 2), ("fed", 2)], ids=["slow", "child", "fed"])
def test_who_computes_or_receives_quietly_has_not_stalled(launchpad: Launchpad, words: tuple[object, ...]) -> None:
    assert hang(launchpad, "--stall-timeout", 0.6, "hangs.py", *words) == (0, "")


TOGETHER = {
    "operation": (
        "rank 1 waits in all_gather at",
        r"collective 4 is not the same on all ranks: rank 1 has entered all_gather",
    ),
    "missing": ("rank 1 is in read_batch at", r"rank 1 has not entered collective 4, all_reduce of 3x5 float32 at"),
    "receive": ("ranks 0-1 wait in recv at",),
    "training": ("rank 1 is in read_batch at", r"rank 1 has not entered collective \d+, all_reduce of 12 float32 at"),
}


def _together(launchpad: Launchpad, kind: str, *way: object) -> str:
    backend = "mpi" if "mpi" in way else "gloo"
    code, err = hang(launchpad, *way, "--stall-timeout", 1.5, "hangs_together.py", kind, backend)
    assert code == 124
    assert all(re.search(one, err) for one in TOGETHER[kind]), err
    return err


@needs_torch
@pytest.mark.usefixtures("from_image")
@pytest.mark.parametrize("kind", TOGETHER)
def test_ranks_that_do_not_meet_in_gloo(launchpad: Launchpad, kind: str) -> None:
    _together(launchpad, kind, *(("--start-method", "exec") if kind == "missing" else ()))


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_ranks_that_wait_in_the_store_for_one_that_has_returned(launchpad: Launchpad) -> None:
    code, err = hang(launchpad, "--no-advice", "hangs_together.py", "left", "gloo")
    assert code == 124
    assert re.search(r"rank 1 is in left at .*hangs_together.py:\d+: .*\.wait\(\[\"ready\"\]\)", err), err
    assert "the job was stopped: rank 1 waits in torch's store for a key that no rank can set\n" in err
    assert "rank 0 had exited with code 0 before that\n" in err


# The command, in a hurry to say what it says after a minute.
HURRIED = """
import launchpad.job.limits as limits
limits.IDLE_SECONDS = 1.0
from launchpad.cli.entry import main
main()
"""


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_person_is_told_where_the_ranks_of_a_quiet_job_are(launchpad: Launchpad) -> None:
    argv = launchpad.argv("run", "-n", 2, "hangs_together.py", "missing", "gloo")
    words = [sys.executable, "-c", HURRIED, *argv[argv.index("run") :]]
    terminal = Terminal(words, launchpad, {}, columns=1000)
    try:
        terminal.expect(r"no output or progress for 1 s: rank 1 is in read_batch at ")
        terminal.expect(
            r"; rank 0 waits in all_reduce at .*; launchpad stacks shows more, and --stall-timeout SECONDS "
        )
        assert terminal.process.poll() is None
    finally:
        terminal.type("\x03")
        terminal.end()


@needs_torch
@pytest.mark.usefixtures("from_image")
@needs_mpich
@pytest.mark.parametrize("kind", ["missing", "receive", "training"])
def test_ranks_that_do_not_meet_in_mpi(launchpad: Launchpad, kind: str) -> None:
    _together(launchpad, kind, "--backend", "mpi")


def test_a_rank_whose_interpreter_is_gone_is_left_alone(launchpad: Launchpad) -> None:
    """As in MPI_Finalize, which mpi4py calls then, and which waits for the others."""
    (launchpad.folder / "end.py").write_text(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "print('ready')\n"
        "if os.environ['RANK'] == '0': ctypes.pythonapi.Py_AtExit(ctypes.cast(libc.pause, ctypes.c_void_p))\n"
        "else: libc.pause()\n"
    )
    code, err = hang(launchpad, "--start-method", "exec", "--stall-timeout", 1, "end.py")
    assert code == 124, err
    assert re.search(r"rank 0 is sleeping in .*the interpreter is exiting", err), err
    assert "end.py:5 in <module>" in err, err


@needs_mpich
def test_mpi4py_alone(launchpad: Launchpad) -> None:
    code, err = hang(launchpad, "--backend", "mpi", "--stall-timeout", 1, "hangs_in_mpi.py", "receive")
    assert code == 124
    assert re.search(r"ranks 0-1 wait in recv at .*hangs_in_mpi.py:13", err), err


@needs_mpich
def test_a_rank_that_waits_in_mpi_finalize_is_named(launchpad: Launchpad) -> None:
    code, err = hang(launchpad, "--backend", "mpi", "--stall-timeout", 1, "hangs_in_mpi.py", "leave")
    assert code == 124
    assert re.search(r"rank 1 is at the end of the program, in MPI_Finalize \(.*\n.* rank 0 waits in recv at ", err), (
        err
    )


@needs_mpich
@pytest.mark.usefixtures("from_image")
def test_mpi4py_with_the_interpreters_lock_kept(launchpad: Launchpad, tmp_path: Path) -> None:
    # What a rank imports is not compiled yet: it takes our thread there long, and the program may be in MPI before.
    slow = ("-x", f"PYTHONPYCACHEPREFIX={tmp_path / 'cache'}", "-x", "PYTHONDONTWRITEBYTECODE=1")
    way = ("--backend", "mpi", "--start-method", "exec", *slow, "--stall-timeout", 1, "--timeout", 30)
    code, err = hang(launchpad, *way, "hangs_in_mpi.py", "reduce")
    assert code == 124
    assert re.search(r"rank 0 waits in recv at .*\n.* rank 1 waits in allreduce at ", err), err


IN_C = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static double end;
static volatile long steps;
static void compute(void) {
    for (int n = 0; n < 1000000; n++)
        steps++;
}
int main(int argc, char **argv) {
    int rank, other;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    puts("ready");
    fflush(stdout);
    if (argc < 2)
        MPI_Recv(&other, 1, MPI_INT, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (end = MPI_Wtime() + atof(argv[1]); rank == 0 && MPI_Wtime() < end;)
        compute();
    MPI_Barrier(MPI_COMM_WORLD);
    for (int more = 1; more; MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD), steps++)
        more = MPI_Wtime() < end + atof(argv[1]);
    return MPI_Finalize();
}
"""


@pytest.fixture
def in_c(launchpad: Launchpad) -> str:
    """A program in C: without an argument, its ranks wait for each other for ever."""
    return compiled(launchpad, "waits", IN_C)


@needs_mpich
@needs_ptrace
def test_ranks_in_c_that_spin_in_mpi(launchpad: Launchpad, in_c: str) -> None:
    code, err = hang(launchpad, "--backend", "mpi", "--stall-timeout", 1, in_c)
    assert code == 124
    assert "ranks 0-1 are spinning in libmpi.so.12 (no stacks: " in err, err
    assert re.search(r"the job was stopped: it hung, with no output or progress for \d+ s", err)


@needs_mpich
def test_ranks_in_c_that_compute_or_meet_again_and_again_are_healthy(launchpad: Launchpad, in_c: str) -> None:
    assert hang(launchpad, "--backend", "mpi", "--stall-timeout", 0.4, in_c, 2) == (0, "")


@needs_mpich
def test_a_loop_of_collectives_that_says_nothing_is_healthy(launchpad: Launchpad) -> None:
    assert hang(launchpad, "--backend", "mpi", "--stall-timeout", 0.6, "hangs_in_mpi.py", "healthy", 2) == (0, "")


@needs_torch
@pytest.mark.usefixtures("from_image")
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=needs_mpich)])
def test_a_loop_of_torchs_collectives_is_healthy(launchpad: Launchpad, backend: str) -> None:
    words = ("--backend", backend, "--no-advice", "--stall-timeout", 0.6, "hangs_together.py", "healthy", backend, 2)
    assert hang(launchpad, *words) == (0, "")


def test_bad_times_and_places_are_refused(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--stall-timeout", 0, "x.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--stall-timeout: '0' is too short" in done.stderr
