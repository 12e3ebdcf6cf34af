"""On a terminal: colours, prompts, progress bars, the debugger with line editing, Ctrl-C, background jobs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.command import Launchpad, wait_until
from tests.support.kept import uses
from tests.support.terminal import COLUMNS, WIDE_BAR, Start, states_of_wide_bar
from tests.support.terminal import terminal as terminal


@pytest.fixture(autouse=True, params=["cold", "image"])
def _start(request: pytest.FixtureRequest, launchpad: Launchpad) -> Iterator[None]:
    """The job's processes are new ones, or forks of a kept image."""
    if request.param == "cold":
        yield
        return
    request.getfixturevalue("from_image")
    before = uses(launchpad)
    yield
    assert uses(launchpad) > before


def test_prefixes_are_coloured_by_rank(terminal: Start) -> None:
    one = terminal("run", "-n", 2, "echo", "x")
    text = one.rest()
    colours = re.findall(r"\x1b\[0;(\d+)m\[([01])\]\x1b\[0m x\r\n", text)
    assert sorted(rank for _, rank in colours) == ["0", "1"]
    assert len({colour for colour, _ in colours}) == 2
    assert one.end() == 0


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_plain_where_colour_is_not_wanted(terminal: Start, environ: dict[str, str]) -> None:
    one = terminal("run", "echo", "x", **environ)
    assert one.rest() == "[0] x\r\n"


def test_own_messages_are_told_apart(terminal: Start) -> None:
    one = terminal("run", "exits.py", "7")
    assert re.search(r"\x1b\[0;1;31mlaunchpad:\x1b\[0m rank 0 failed first: exit code 7", one.rest())
    assert one.end() == 7


def test_prompt_and_answer(terminal: Start) -> None:
    one = terminal("run", "-n", 2, "prompt.py", NO_COLOR="1")
    one.expect(re.escape("[0] name? "))
    one.type("Ada\n")
    one.expect("hello Ada")
    assert one.end() == 0


def test_breakpoint_with_line_editing(terminal: Start) -> None:
    """Ctrl-A goes to the start of the line: that is readline, which wants terminals on both sides."""
    one = terminal("run", "-n", 2, "debugged.py", NO_COLOR="1")
    one.expect(re.escape("(Pdb) "))
    one.type("secret + 1\x01p \n")
    one.expect("42")
    one.expect(re.escape("(Pdb) "))
    one.type("continue\n")
    one.expect(re.escape("[0] done 41") + "|done 41")
    assert one.end() == 0


def test_ctrl_c_reaches_the_ranks(terminal: Start) -> None:
    one = terminal("run", "-n", 2, "obeys.py", NO_COLOR="1")
    one.expect("ready")
    one.expect("ready")
    one.type("\x03")
    one.expect("launchpad: sent SIGINT to ranks 0-1")
    text = one.rest()
    assert text.count("got SIGINT") == 2
    assert "launchpad: the job was stopped by SIGINT" in text
    assert one.end() == 130


def test_bar_is_redrawn_in_place(terminal: Start) -> None:
    one = terminal("run", "bar.py", NO_COLOR="1")
    text = one.rest()
    assert text.count("\n") == 1
    assert [state[:9] for state in text.split("\r\x1b[K")][-1] == "[0] 100%|"


def test_wide_bar_is_cut_to_the_terminal(terminal: Start, launchpad: Launchpad) -> None:
    one = terminal("run", "--no-python", "python3", "-c", WIDE_BAR, NO_COLOR="1")
    states = states_of_wide_bar(one, launchpad.folder)
    assert states[1].rstrip() == "[0] " + "b" * (COLUMNS - 5)


def test_background_job_leaves_the_terminals_input_alone(terminal: Start) -> None:
    one = terminal("run", "prompt.py", shell="set -m; {} & wait $!; echo code $?; read line; echo shell got $line")
    one.expect("EOFError")
    one.expect("code 1")
    one.type("words\n")
    one.expect("shell got words")
    assert one.end() == 0


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(terminal: Start, launchpad: Launchpad) -> None:
    """No clock of the job's goes on meanwhile: its --timeout is shorter than the pause."""
    (launchpad.folder / "t.py").write_text(
        "import os, time\n"
        "print('pid', os.getpid(), flush=True)\n"
        "while not os.path.exists('go on'): time.sleep(0.01)\n"
        "print('went on', flush=True)\n"
    )
    one = terminal(
        "run", "--timeout", "10", "t.py", NO_COLOR="1", shell="set -m; {}; echo stopped $?; read x; fg; echo code $?"
    )
    pid = int(one.expect(r"\[0\] pid (\d+)\r").group(1))
    one.type("\x1a")
    one.expect("stopped 147")  # 128 + SIGSTOP
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the rank to stand still")
    start = time.monotonic()
    wait_until(lambda: time.monotonic() - start > 10.2, "more than the job's time to pass")
    one.type("\n")
    wait_until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED, "the rank to be continued")
    (launchpad.folder / "go on").touch()
    one.expect("went on")
    one.expect("code 0")
    assert one.end() == 0


def test_ctrl_backslash_ends_nothing(terminal: Start) -> None:
    one = terminal("run", "prompt.py", NO_COLOR="1")
    one.expect("name")
    one.type("\x1c")
    one.expect("launchpad: where the ranks are:")
    one.type("Ada\n")
    one.expect("hello Ada")
    assert one.end() == 0


def test_terminal_that_closes_ends_the_job(terminal: Start, launchpad: Launchpad) -> None:
    one = terminal("run", "-n", 2, "strays.py", "wait")
    one.expect("leaving")
    one.hang_up()
    wait_until(lambda: not launchpad.survivors(), "everything to be gone", show=launchpad.survivors)


def test_terminal_is_left_as_it_was_when_a_rank_is_ended_at_a_prompt(terminal: Start) -> None:
    """readline turns off echo and line mode for its prompt; the rank that would turn them on again is killed."""
    shell = "stty -a | grep -o '.icanon\\|.echo '; {}; stty -a | grep -o '.icanon\\|.echo '; echo checked"
    one = terminal("run", "-n", 2, "--grace", "0.2", "ended_at_prompt.py", NO_COLOR="1", shell=shell)
    before = one.expect(r"(.icanon)\r\n(.echo )").groups()
    one.expect(re.escape("(Pdb) "))
    one.expect("rank 1 failed first: exit code 9")
    assert one.expect(r"(.icanon)\r\n(.echo )").groups() == before == (" icanon", " echo ")
    one.expect("checked")
    assert one.end() == 0
