"""Which processes of a rank get a signal, and when: the rule by itself, then programs that save when asked to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping

import pytest

from launchpad.agent.host import processes
from launchpad.agent.host.processes import CLEANER, OTHER, PYTHON, SHELL, Process
from launchpad.agent.ranks.rank import Rank
from launchpad.agent.ranks.signals import Signals, receivers
from launchpad.protocol.events import RankExited
from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.needs import needs_torch

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
AGENT, MAIN = 1, 10
NO_INT = 1 << (INT - 1)

# A group, by pid: the parent, the kind, what it ignores.
DATA_LOADER = {MAIN: (AGENT, PYTHON), 11: (MAIN, PYTHON), 12: (MAIN, CLEANER), 13: (11, OTHER)}
SCRIPT = {MAIN: (AGENT, SHELL), 11: (MAIN, PYTHON), 12: (11, PYTHON), 13: (11, PYTHON)}
NESTED = {MAIN: (AGENT, SHELL), 11: (MAIN, SHELL), 12: (11, OTHER), 13: (12, PYTHON)}
BACKGROUND = {MAIN: (AGENT, SHELL), 11: (MAIN, PYTHON, NO_INT), 12: (MAIN, PYTHON)}
NOHUP = {MAIN: (AGENT, SHELL, NO_INT), 11: (MAIN, PYTHON, NO_INT)}
WRAPPED = {MAIN: (AGENT, OTHER), 11: (MAIN, PYTHON), 12: (11, PYTHON)}


def group(given: dict[int, tuple], *gone: int) -> dict[int, Process]:
    """A process group in which these are gone, and the agent the parent of those that they have left."""
    found = {pid: Process(*one, *[0] * (3 - len(one))) for pid, one in given.items() if pid not in gone}
    return {pid: one._replace(parent=AGENT if one.parent in gone else one.parent) for pid, one in found.items()}


@pytest.mark.parametrize(
    ("given", "signum", "got_by"),
    [
        (DATA_LOADER, TERM, {MAIN}),
        (DATA_LOADER, INT, {MAIN}),
        (DATA_LOADER, USR1, {MAIN}),
        (SCRIPT, TERM, {MAIN, 11}),
        (SCRIPT, INT, {MAIN, 11}),
        (NESTED, INT, {MAIN, 11, 12, 13}),
        (NESTED, TERM, {MAIN, 11, 12}),
        (BACKGROUND, TERM, {MAIN, 12}),
        (NOHUP, TERM, {MAIN, 11}),
        (WRAPPED, INT, {MAIN, 11}),
        (WRAPPED, TERM, {MAIN}),
        (WRAPPED, HUP, {MAIN}),
        ({}, TERM, {MAIN}),  # nothing had to be looked up
    ],
)
def test_who_gets_a_request(given: dict[int, tuple], signum: int, got_by: set[int]) -> None:
    assert receivers(MAIN, group(given), signum) == got_by


@pytest.mark.parametrize(
    ("given", "gone", "got_by"),
    [
        (DATA_LOADER, (MAIN,), {11}),  # no cleaner: it goes when it has cleaned up
        (DATA_LOADER, (MAIN, 11), {13}),
        (SCRIPT, (MAIN,), {11}),  # the workers of the program that the shell has left behind are still spared
        (SCRIPT, (MAIN, 11), {12, 13}),
        (BACKGROUND, (MAIN,), {11, 12}),
        (WRAPPED, (MAIN,), {11}),
        (WRAPPED, tuple(WRAPPED), set()),
    ],
)
def test_who_gets_it_when_the_main_process_is_gone(
    given: dict[int, tuple], gone: tuple[int, ...], got_by: set[int]
) -> None:
    assert receivers(None, group(given, *gone), TERM) == got_by


def test_a_process_that_becomes_deaf_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignored the signal, though it did not yet when the group was read: its rank counts as exited."""
    deaf = (
        "import signal, sys; sys.stdin.readline(); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); sys.stdin.readline()"
    )
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {deaf!r}]); time.sleep(600)"
    main = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    assert main.stdin
    assert main.stdout

    read = processes.groups

    def groups(leaders: Collection[int]) -> Mapping[int, Mapping[int, Process]]:
        found = read(leaders)
        main.stdin.write(b"\n")
        main.stdin.flush()
        assert main.stdout.readline() == b"deaf\n"
        return found

    exits: list[RankExited] = []
    ranks = {main.pid: Rank(0, main.pid, None)}
    signals = Signals(ranks, exits.append)
    wait_until(lambda: len(read([main.pid])[main.pid]) == 2, "the child")
    signals.send(TERM)
    main.wait(timeout=DEADLINE)
    del ranks[main.pid]
    signals.exited(main.pid, RankExited(0, 0, -TERM, 0, False))
    assert exits == []
    monkeypatch.setattr(processes, "groups", groups)
    signals.recheck()
    assert [one.rank for one in exits] == [0]
    main.communicate(timeout=DEADLINE)  # the end of its input ends it


@pytest.mark.parametrize("signum", [TERM, signal.SIGKILL])
def test_a_rank_that_exits_already_is_told_from_one_that_is_ended(signum: int) -> None:
    """That is looked at before the first signal; of the last one everybody dies."""
    gone, runs = (subprocess.Popen(argv, stdin=subprocess.PIPE, process_group=0) for argv in (["true"], ["cat"]))
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    exits: list[RankExited] = []
    signals = Signals({one.pid: Rank(rank, one.pid, None) for rank, one in enumerate((gone, runs))}, exits.append)
    signals.send(signum)
    os.waitid(os.P_PID, runs.pid, os.WEXITED | os.WNOWAIT)
    signals.send(signal.SIGKILL)
    for rank, one in enumerate((gone, runs)):
        one.communicate(timeout=DEADLINE)
        signals.exited(one.pid, RankExited(0, rank, one.returncode, 0, False))
    assert [one.exiting for one in exits] == [True, False]


# Real programs.

SAVES = f"{sys.executable} {PROGRAMS / 'saves.py'}"


def asked_to_stop(launchpad: Launchpad, signum: int, *words: object) -> tuple[int, list[str], str]:
    """The exit code of a run that gets this signal when its two ranks are ready; their last lines, sorted; notes."""
    process = launchpad.start("run", "-n", 2, *words)
    for word in (b"ready", b"saving"):
        seen = 0
        while seen < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            seen += word in line
        if word == b"ready":
            process.send_signal(signum)
    (launchpad.folder / "go").touch()
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, sorted(out.decode().splitlines()), err.decode()


@needs_torch
@pytest.mark.parametrize(
    ("signum", "workers"), [(INT, "fork"), (INT, "spawn"), (TERM, "fork")], ids=["INT-fork", "INT-spawn", "TERM-fork"]
)
@pytest.mark.usefixtures("from_image")
def test_a_program_saves_with_the_help_of_its_workers(launchpad: Launchpad, signum: int, workers: str) -> None:
    code, out, err = asked_to_stop(launchpad, signum, "saves_by_workers.py", workers)
    name = signal.Signals(signum).name
    assert (code, out) == (128 + signum, [f"[0] saved after {name}", f"[1] saved after {name}"]), err


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_workers_live_on_when_a_program_is_told_something_else(launchpad: Launchpad) -> None:
    code, out, err = asked_to_stop(launchpad, USR1, "saves_by_workers.py", "fork")
    assert (code, out) == (0, ["[0] saved after SIGUSR1", "[1] saved after SIGUSR1"]), err


# What a shell's script does, the signal, and what each rank writes after that.
SCRIPTS = {
    "dies of it and leaves its child": (f"{SAVES} orphan; echo after", TERM, ["saved after SIGTERM"]),
    "leaves one in the background": (f"{SAVES} orphan & wait", TERM, ["saved after SIGTERM"]),
    "has a trap": (
        f"trap 'echo trapped' TERM; {SAVES} .; echo after",
        TERM,
        ["after", "saved after SIGTERM", "trapped"],
    ),
    "passes it on": (
        f"trap 'kill $child; : > told.$RANK' TERM; {SAVES} told.$RANK & child=$!; wait $child; wait $child",
        TERM,
        ["saved after SIGTERM"],  # once
    ),
    "waits for its child": (f"{SAVES} .; echo after", INT, ["saved after SIGINT"]),
    "runs another shell": (f"sh -c '{SAVES} .; true'; true", INT, ["saved after SIGINT"]),
}


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shell_whose_child_saves(launchpad: Launchpad, name: str, shell: str) -> None:
    script, signum, says = SCRIPTS[name]
    code, out, err = asked_to_stop(launchpad, signum, "--no-python", shell, "-c", script)
    # After INT, bash goes on where its child has heeded it and left with 0, and dash doesn't.
    wrote = [line for line in out if line[4:] != "after" or "after" in says]
    assert (code, wrote) == (128 + signum, [f"[{rank}] {line}" for rank in (0, 1) for line in says]), err


@pytest.mark.parametrize(("signum", "until"), [(INT, "."), (TERM, "orphan")], ids=["INT", "TERM"])
def test_a_wrapper_whose_child_saves(launchpad: Launchpad, signum: int, until: str) -> None:
    """As uv run, or time: Perl's system() ignores INT meanwhile, and dies of TERM."""
    words = ("--no-python", "perl", "-e", "system(@ARGV)", sys.executable, PROGRAMS / "saves.py", until)
    name = signal.Signals(signum).name
    assert asked_to_stop(launchpad, signum, *words)[:2] == (
        128 + signum,
        [f"[0] saved after {name}", f"[1] saved after {name}"],
    )


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_what_a_program_leaves_behind_is_told_when_it_is_gone(launchpad: Launchpad, way: tuple[str, str]) -> None:
    script = launchpad.folder / "wraps.py"
    script.write_text(f"import subprocess\nsubprocess.Popen({SAVES.split()} + ['orphan']).wait()\n")
    code, out, err = asked_to_stop(launchpad, TERM, *way, script)
    assert (code, out) == (143, ["[0] saved after SIGTERM", "[1] saved after SIGTERM"]), err


@pytest.mark.parametrize("signum", [INT, TERM], ids=["INT", "TERM"])
@pytest.mark.parametrize("until", [".", "orphan"], ids=["a program", "a shell that dies of it"])
def test_a_program_is_asked_by_its_own_signal(launchpad: Launchpad, until: str, signum: int) -> None:
    """The same rules hold for it as for TERM: a child whose shell has died of it may save too."""
    words = ["saves.py", until] if until == "." else ["--no-python", "sh", "-c", f"{SAVES} {until}; true"]
    code, out, err = asked_to_stop(launchpad, signum, "--stop-signal", "USR1", *words)
    assert (code, out) == (128 + signum, ["[0] saved after SIGUSR1", "[1] saved after SIGUSR1"]), err
    again = "; Ctrl-C kills them at once" if signum == INT else ""
    assert f"launchpad: sent SIGUSR1 to ranks 0-1; they have 30 s to exit{again}\n" in err


def test_a_program_may_save_when_its_time_is_up(launchpad: Launchpad) -> None:
    (launchpad.folder / "go").touch()
    done = launchpad.run("run", "-n", 2, "--timeout", 5, "--grace", DEADLINE, "--stop-signal", 10, "saves.py", ".")
    assert done.returncode == 124
    assert sorted(line[4:] for line in done.stdout.splitlines() if "saved" in line) == ["saved after SIGUSR1"] * 2
    assert f"launchpad: sent SIGUSR1 to ranks 0-1; they have {DEADLINE:g} s to exit\n" in done.stderr


def test_the_second_ctrl_c_kills_a_program_that_saves(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--stop-signal", "USR1", "saves.py", ".")
    for word in (b"ready", b"saving"):
        for _ in range(2):
            assert word in process.stdout.readline()
        process.send_signal(INT)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, b"saved" in out) == (130, False), err
    assert b"launchpad: ranks 0-1 still running: sent SIGKILL" in err


def test_what_a_rank_leaves_behind_has_its_grace_and_no_more(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--grace", "0.3", "--no-python", "sh", "-c", f"{SAVES} orphan; true")
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    process.send_signal(TERM)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, b"saved" in out) == (143, False)
    assert b"launchpad: ranks 0-1 still running: sent SIGKILL" in err


def test_after_a_failure_too(launchpad: Launchpad) -> None:
    """The other rank's shell dies of TERM; its child saves within the grace."""
    script = f"test $RANK = 0 || {{ read x < fail; exit 7; }}; {SAVES} orphan; true"
    subprocess.run(["mkfifo", launchpad.folder / "fail"], check=True)
    process = launchpad.start("run", "-n", 2, "--grace", DEADLINE, "--no-python", "sh", "-c", script)
    assert process.stdout.readline() == b"[0] ready\n"
    (launchpad.folder / "fail").write_text("\n")
    assert process.stdout.readline() == b"[0] saving\n"
    (launchpad.folder / "go").touch()
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (7, b"[0] saved after SIGTERM\n"), err


def test_who_ignores_everything_is_killed_at_the_end_of_the_ladder(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--grace", "0.2", "family.py", "deaf")
    for _ in range(2):
        assert b"up" in process.stdout.readline()
    process.send_signal(INT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    sent = re.findall(r"SIG[A-Z]+", err.decode())
    assert sent[:3] == ["SIGINT", "SIGTERM", "SIGKILL"]


def test_a_deaf_process_left_behind_does_not_hold_up_the_end(launchpad: Launchpad) -> None:
    """It has its own way to be ended: the grace, which the test would run into, is not for it."""
    process = launchpad.start("run", "-n", 2, "--grace", 10 * DEADLINE, "leaves.py", "deaf")
    seen = b""
    while seen.count(b" port ") < 2:
        line = process.stdout.readline()
        assert line, (seen, process.stderr.read())
        seen += line
    process.send_signal(TERM)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert b"launchpad: killed 2 processes that ranks left behind" in err
    wait_until(lambda: not launchpad.survivors(), "the sweep", show=launchpad.survivors)


EARLY = """
import os, signal, sys
from launchpad.agent.host import processes
from launchpad.agent.ranks import rank

heed = processes.heed_signals

def late():
    os.kill(os.getpid(), signal.SIGINT)
    heed()

processes.heed_signals = late
processes.outlive_signals()
null = os.open(os.devnull, os.O_RDWR)
started = rank.start(0, ["true"], dict(os.environ), "/", null, rank.open_outlets([]), (64, 64))
status = os.waitpid(started.pid, 0)[1]
os.kill(os.getpid(), signal.SIGINT)
print(os.waitstatus_to_exitcode(status))
"""


def test_a_signal_to_a_rank_that_has_not_executed_its_program_is_heeded() -> None:
    """It still has the handlers of the agent, which outlives such signals."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout == f"{-signal.SIGINT}\n"
