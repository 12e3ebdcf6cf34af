"""How jobs end: failures, signals, time-outs; who is blamed, the exit code, and what is left (nothing)."""

from __future__ import annotations

import re
import resource
import signal
import subprocess

import psutil
import pytest

from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.ends import memory_limit as memory_limit
from tests.support.needs import needs_torch


def test_all_ranks_well(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 3, "exits.py", 0, 0, 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("7", 7, "exit code 7"),
        ("255", 255, "exit code 255"),
        ("sig11", 139, "killed by SIGSEGV (Segmentation fault)"),
        ("sig9", 137, "killed by SIGKILL (Killed); the kernel's OOM-kill counters did not rise"),
        ("sig15", 143, "killed by SIGTERM (Terminated)"),
        ("sig41", 169, "killed by signal 41"),
    ],
)
def test_first_failure_gives_the_code_and_ends_the_others(
    launchpad: Launchpad, how: str, code: int, words: str
) -> None:
    done = launchpad.run("run", "-n", 4, "exits.py", "wait", "wait", how, "wait")
    assert done.returncode == code
    assert re.search(rf"launchpad: rank 2 failed first: {re.escape(words)}.* \(pid \d+, \d+\.\d\d s after", done.stderr)
    assert "launchpad: stopped because of it: ranks 0-1, 3\n" in done.stderr


def test_others_are_told_by_term_and_not_blamed(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 3, "obeys.py", "fail")
    assert done.returncode == 7
    assert {"[0] got SIGTERM", "[2] got SIGTERM"} <= set(done.stdout.splitlines())
    report = [line for line in done.stderr.splitlines() if line.startswith("launchpad:")]
    del report[-2:]  # where the record is
    assert report[0].startswith("launchpad: rank 1 failed first: exit code 7 (pid ")
    assert report[1:] == [
        "launchpad:     some words",
        "launchpad:     the last words",
        "launchpad:     It exited here:",
        f'launchpad:       File "{PROGRAMS}/obeys.py", line 17, in <module>',
        "launchpad:         sys.exit(7)",
        "launchpad: stopped because of it: ranks 0, 2",
    ]


def test_rank_that_ignores_term_is_killed_after_the_grace(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--grace", "2", "obeys.py", "fail", "ignore")
    assert done.returncode == 7
    assert "[0] got SIGTERM" in done.stdout
    assert "launchpad: rank 0 still running: sent SIGKILL" in done.stderr


def test_traceback_of_the_first_failed_rank_stands_in_the_report(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 3, "raises.py")
    assert done.returncode == 1
    report = done.stderr.partition(
        "launchpad: rank 0 failed first: ValueError: the learning rate is negative (exit code 1, pid "
    )[2]
    assert "launchpad:     Traceback (most recent call last):" in report
    assert "launchpad:     ValueError: the learning rate is negative" in report
    assert "stopped because of it: ranks 1-2" in report


def test_timeout(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--timeout", "0.5s", "exits.py", "wait", "wait")
    assert done.returncode == 124
    assert "launchpad: the job was stopped: it ran longer than --timeout 0.5 s" in done.stderr


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda s: str(s)
)
def test_stop_signals_reach_the_ranks(launchpad: Launchpad, signum: signal.Signals, code: int) -> None:
    if signum == signal.SIGHUP:
        process = launchpad.start("run", "-n", 2, "exits.py", "wait", "wait")
        ready = b"waiting"
    else:
        process = launchpad.start("run", "-n", 2, "obeys.py")
        ready = b"ready"
    for _ in range(2):
        assert ready in process.stdout.readline()
    process.send_signal(signum)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    if signum != signal.SIGHUP:
        assert out.decode().count(f"got {signum.name}") == 2
    assert f"launchpad: sent {signum.name} to ranks 0-1; they have 30 s" in err.decode()


def test_second_ctrl_c_kills_at_once(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "obeys.py", "ignore")
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    for _ in range(2):
        assert b"got SIGINT" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=DEADLINE) == 130


def test_user_signals_are_forwarded_and_end_nothing(launchpad: Launchpad) -> None:
    script = launchpad.folder / "usr.py"
    script.write_text(
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])\n"
        "print('ready', flush=True)\n"
        "for _ in range(2): print(signal.Signals(signal.sigwait([signal.SIGUSR1, signal.SIGUSR2])).name, flush=True)\n"
    )
    process = launchpad.start("run", script)
    assert process.stdout.readline() == b"[0] ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == b"[0] SIGUSR1\n"
    process.send_signal(signal.SIGUSR2)
    assert process.stdout.readline() == b"[0] SIGUSR2\n"
    assert process.wait(timeout=DEADLINE) == 0


def test_a_forwarded_signal_without_a_handler_is_told_to_be_ours(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--", "sh", "-c", "echo ready; exec sleep 600")
    assert {process.stdout.readline(), process.stdout.readline()} == {b"[0] ready\n", b"[1] ready\n"}
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, b"or rank " in err) == (138, False)
    assert b"SIGUSR1 (User defined signal 1), which launchpad was sent and passed on; the program has no handler" in err


def test_ignored_hangup_stays_ignored(launchpad: Launchpad) -> None:
    """As under nohup: neither we nor the ranks die of SIGHUP."""
    script = launchpad.folder / "hup.py"
    script.write_text("import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True); input()")
    process = launchpad.start(
        "run", script, stdin=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert process.stdout.readline() == b"[0] True\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(b"\n", timeout=DEADLINE)
    assert process.returncode == 0


def test_strays_are_ended_and_named(launchpad: Launchpad) -> None:
    """Children in every disguise, all holding the rank's output, don't hold up the end."""
    done = launchpad.run("run", "--grace", "1s", "-n", 2, "strays.py")
    assert done.returncode == 0
    assert re.search(r"launchpad: killed \d+ processes that ranks left behind: \d+ ", done.stderr)
    assert "[0] leaving" in done.stdout


def agent_of(process: subprocess.Popen[bytes]) -> tuple[psutil.Process, psutil.Process]:
    """The guard and the agent of a running job."""
    (guard,) = psutil.Process(process.pid).children()
    (agent,) = guard.children()
    return guard, agent


@pytest.mark.parametrize("victim", ["head", "guard", "agent"])
def test_nothing_survives_the_death_of(launchpad: Launchpad, victim: str) -> None:
    process = launchpad.start("run", "-n", 2, "strays.py", "wait")
    seen = b""
    while seen.count(b"leaving") < 2 or seen.count(b"stray up") < 6:
        line = process.stdout.readline()
        assert line, (seen, process.stderr.read())
        seen += line
    guard, agent = agent_of(process)
    {"head": process, "guard": guard, "agent": agent}[victim].send_signal(signal.SIGKILL)
    if victim == "agent":
        assert process.wait(timeout=DEADLINE) == 4
        assert b"the agent was killed by signal 9" in process.stderr.read()
    elif victim == "guard":  # the job goes on; its end still leaves nothing
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE) == 143
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)


def test_agent_that_is_stopped_while_the_head_dies(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "exits.py", "wait", "wait")
    assert b"waiting" in process.stdout.readline()
    _, agent = agent_of(process)
    agent.suspend()
    process.kill()
    process.wait(timeout=DEADLINE)
    wait_until(lambda: not launchpad.survivors(), "the guard to act", show=launchpad.survivors)


def test_program_that_can_not_be_executed(launchpad: Launchpad) -> None:
    program = launchpad.folder / "no_shebang"
    program.write_bytes(b"\0\1\2")
    program.chmod(0o755)
    done = launchpad.run("run", "-n", 2, "./no_shebang")
    assert done.returncode == 2
    assert "could not be started: can't execute ./no_shebang: Exec format error" in done.stderr


@pytest.mark.parametrize("job", [["true"], ["true", ":", "true"], ["--config", "{}/job.toml", "--job", "j"]])
def test_working_folder_that_goes_away_is_no_traceback(launchpad: Launchpad, job: list[str]) -> None:
    gone = launchpad.folder / "gone"
    gone.mkdir()
    (launchpad.folder / "job.toml").write_text('[jobs.j.roles.a]\ntarget = ["true"]\n')
    words = " ".join(launchpad.argv("run", *(word.format(launchpad.folder) for word in job)))
    done = subprocess.run(
        ["sh", "-c", f"rmdir '{gone}'; {words}"], cwd=gone, env=launchpad.environ, capture_output=True, timeout=DEADLINE
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"launchpad: error: the current folder is gone")


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_torch_record_gives_the_traceback(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "recorded.py", timeout=120)
    assert done.returncode == 1
    report = done.stderr.partition("rank 1 failed first")[2]
    assert "launchpad:     KeyError: 'no such column'" in report
    assert "launchpad:       File " in report


def test_rank_killed_for_memory_is_told_so(launchpad: Launchpad, memory_limit: object) -> None:
    process = launchpad.start("run", "-n", 1, "eats_memory.py", preexec_fn=memory_limit)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 137
    assert b"killed by SIGKILL (Killed), by the kernel's OOM killer" in err


def test_ranks_find_a_clean_process(launchpad: Launchpad) -> None:
    """Own session and group, default signals, the caller's file limit; of ours two descriptors: crashes, stacks."""
    script = launchpad.folder / "clean.py"
    script.write_text(
        "import os, resource\n"
        "fds = [fd for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "masks = [int(l.split()[1], 16) for l in open('/proc/self/status') if l.startswith(('SigBlk', 'SigIgn'))]\n"
        "# glibc's posix_spawn leaves its two internal signals, 32 and 33, ignored\n"
        "print(os.getsid(0) == os.getpid() == os.getpgrp(), sorted(map(int, fds)),\n"
        "      resource.getrlimit(resource.RLIMIT_NOFILE)[0], [mask & ~(3 << 31) for mask in masks])\n"
    )
    soft = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process = launchpad.start(
        "run", "-n", 2, script, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    )
    out, _ = process.communicate(timeout=DEADLINE)
    masks = [0, sum(1 << (signum - 1) for signum in (signal.SIGPIPE, signal.SIGXFSZ))]  # as python sets them
    assert out.decode().splitlines()[0][4:] == f"True [0, 1, 2, 200, 250] {soft} {masks}"
    assert len({line[4:] for line in out.decode().splitlines()}) == 1
