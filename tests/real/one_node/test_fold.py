"""Folded lines of real jobs: where lines are folded, and where not."""

from __future__ import annotations

import re
import signal

import pytest

from tests.support.command import Launchpad
from tests.support.fold import ROUNDS, TOGETHER, by_rank
from tests.support.readers import memory_of, wait_until_blocked
from tests.support.terminal import Start
from tests.support.terminal import terminal as terminal

# The command.


def test_a_traceback_that_is_equal_on_all_ranks_is_one(launchpad: Launchpad) -> None:
    """Of several at least one: a busy machine may hold up a rank for more than 50 ms."""
    (launchpad.folder / "fails.py").write_text(
        f"import traceback\ndef f(n): return f(n - 1) if n else 1 / 0\n{TOGETHER}"
        "    try: f(3)\n    except ZeroDivisionError: traceback.print_exc()\n"
    )
    plain = by_rank(launchpad.run("run", "fails.py").stderr.encode())[0]
    for path in launchpad.folder.glob("here*"):
        path.unlink()
    shown = launchpad.run("run", "-n", 3, "--fold", "equal", "fails.py").stderr
    assert all(lines == (plain if rank < 3 else []) for rank, lines in by_rank(shown.encode()).items())
    one = b"".join(b"[0-2] %s\n" % line for line in plain[: len(plain) // ROUNDS])
    assert one.startswith(b"[0-2] Traceback (most recent call last):\n")
    assert one in shown.encode()


def test_lines_are_folded_where_it_is_asked_for_and_nowhere_else(launchpad: Launchpad) -> None:
    script = 'echo ready; test $RANK != 2 || echo own; echo "loss 0.7$RANK" >&2'
    plain = launchpad.run("run", "-n", 5, "sh", "-c", script)
    assert sorted(plain.stdout.splitlines()) == sorted([*(f"[{rank}] ready" for rank in range(5)), "[2] own"])
    for choice in ("equal", "numbers"):
        done = launchpad.run("run", "-n", 5, "--fold", choice, "sh", "-c", script)
        assert done.returncode == 0
        found = by_rank(done.stdout.encode())
        assert found[2] == [b"ready", b"own"]
        assert all(found[rank] == [b"ready"] for rank in (0, 1, 3, 4))
        assert all(len(lines) == (rank < 5) for rank, lines in by_rank(done.stderr.encode()).items())
        if choice == "equal":
            assert sorted(done.stderr.splitlines()) == [f"[{rank}] loss 0.7{rank}" for rank in range(5)]


@pytest.mark.parametrize(("ranks", "words", "folds"), [(4, (), True), (3, (), False), (4, ("--fold", "never"), False)])
def test_on_a_terminal_lines_are_folded_from_four_ranks_on(
    launchpad: Launchpad, terminal: Start, ranks: int, words: tuple[str, ...], folds: bool
) -> None:
    (launchpad.folder / "says.py").write_text(f"{TOGETHER}    print('ready', flush=True)\n")
    one = terminal("run", "-n", ranks, *words, "says.py")
    shown = one.rest().replace("\r\n", "\n")
    assert one.end() == 0
    assert ("\x1b[0;1m[" in shown) == folds
    found = by_rank(re.sub(r"\x1b\[[0-9;]*m", "", shown).encode())
    assert all(lines == [b"ready"] * (ROUNDS if rank < ranks else 0) for rank, lines in found.items())


def test_a_flood_is_shown_whole(launchpad: Launchpad) -> None:
    want = launchpad.run("run", "-n", 4, "flood.py", 20_000, "both")
    done = launchpad.run("run", "-n", 4, "--fold", "equal", "flood.py", 20_000, "both")
    assert done.returncode == 0
    for plain, folded in ((want.stdout, done.stdout), (want.stderr, done.stderr)):
        assert by_rank(plain.encode()) == by_rank(folded.encode())


def test_a_paused_reader_holds_up_ranks_whose_lines_are_folded(launchpad: Launchpad) -> None:
    """Memory stays bounded, and the job can still be ended."""
    process = launchpad.start("run", "-n", 2, "--fold", "equal", "sh", "-c", "echo up >&2; exec yes words")
    assert process.stderr.readline() in (b"[0-1] up\n", b"[0] up\n", b"[1] up\n")
    wait_until_blocked(process, "yes")
    assert memory_of(process) < 100 << 20
    process.send_signal(signal.SIGINT)
    while b"sent SIGINT to ranks 0-1" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_attach_folds_by_the_times_at_which_lines_were_written(launchpad: Launchpad) -> None:
    """What was written together is one line, however late it is looked at; what was not isn't."""
    (launchpad.folder / "turns.py").write_text(
        f"import glob\n{TOGETHER}    print('together', flush=True)\n"
        "record = os.environ['XDG_STATE_HOME'] + '/launchpad/jobs/*/console.1.jsonl'\n"
        "while rank and 'apart' not in ''.join(open(path).read() for path in glob.glob(record)): time.sleep(0.01)\n"
        "if rank: time.sleep(0.3)\nprint('apart', flush=True)\n"
    )
    job = launchpad.run("run", "--detach", "-n", 2, "turns.py").stdout.strip()
    assert launchpad.run("wait", job).returncode == 0
    done = launchpad.run("attach", "--fold", "equal", job)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["[0] apart", "[1] apart"]
    assert "[0-1] together" in lines
    assert all(found[:-1] == [b"together"] * ROUNDS for found in by_rank(done.stdout.encode()).values() if found)
    assert launchpad.run("attach", job).stdout.count("[0] together\n") == ROUNDS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--detach",), "--fold says how output is shown, and --detach shows none; give it to launchpad attach"),
        (("--events", "-"), "--fold says how output is shown, and --events - shows none; leave one of them out"),
    ],
)
def test_folding_is_refused_where_nothing_is_shown(launchpad: Launchpad, words: tuple[str, ...], why: str) -> None:
    done = launchpad.run("run", "--fold", "equal", *words, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {why}\n" in done.stderr
