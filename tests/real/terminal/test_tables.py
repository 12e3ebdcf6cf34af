"""Tables on a terminal, and the same as plain lines in a pipe: launchpad jobs, smoke."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.support.command import Launchpad
from tests.support.terminal import Terminal

ESCAPE = "\x1b["
RULE = "─"


def on_terminal(launchpad: Launchpad, *words: object, environ: Mapping[str, str], columns: int) -> tuple[str, int]:
    """What the command shows, with ends of lines as in a pipe, and its exit code."""
    one = Terminal(launchpad.argv(*words), launchpad, environ, columns)
    text = one.rest().replace("\r\n", "\n")
    return text, one.end()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def jobs(launchpad: Launchpad) -> Launchpad:
    """One has gone well and has a long command line, one has failed and has an odd one."""
    assert launchpad.run("run", "-n", 2, "echo", "word " * 20).returncode == 0
    assert launchpad.run("run", "sh", "-c", "exit 7", "a\nb", "\x1b[31m\udcff").returncode == 7
    return launchpad


def test_jobs_are_a_table_on_a_terminal(jobs: Launchpad) -> None:
    text, code = on_terminal(jobs, "jobs", environ={}, columns=220)
    assert code == 0
    assert ESCAPE in text
    head, rule, failed, well = plain(text).splitlines()
    assert head.split() == ["job", "started", "lasted", "ranks", "outcome", "command"]
    assert set(rule) == {RULE}
    assert re.search(r" 1  rank 0, exit code 7 after [0-9.]+ s  \S*sh -c exit 7 a\\nb \\x1b\[31m\\udcff *$", failed)
    assert re.search(r" 2  succeeded  +\S*echo (word ){16}", well)


def test_in_a_pipe_they_are_lines_of_any_length(jobs: Launchpad) -> None:
    text = jobs.run("jobs").stdout
    assert not set(text) & {"\x1b", RULE, "\r"}
    failed, well = text.splitlines()
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"\w{{8}}  {date}    +[0-9.]+ s      1 ranks  rank 0, exit code 7 after [0-9.]+ s  \S+sh -c exit 7 a\\nb .*",
        failed,
    )
    assert re.fullmatch(rf"\w{{8}}  {date}    +[0-9.]+ s      2 ranks  succeeded {{21}}\S+echo (word ){{16}}.*", well)
    assert len(well) > 150


def test_a_dumb_terminal_is_a_pipe_and_no_colour_leaves_the_table(jobs: Launchpad) -> None:
    assert on_terminal(jobs, "jobs", environ={"TERM": "dumb"}, columns=80) == (jobs.run("jobs").stdout, 0)
    text, _ = on_terminal(jobs, "jobs", environ={"NO_COLOR": "1"}, columns=80)
    assert RULE in text
    assert ESCAPE not in text
    assert max(map(len, text.splitlines())) <= 80


def test_smoke_ends_with_a_table(launchpad: Launchpad) -> None:
    (launchpad.folder / "jobs.toml").write_text(
        '[jobs.good]\ntarget = "true"\n[jobs.bad]\ntarget = ["sh", "-c", "exit 5"]\n'
    )
    text, code = on_terminal(launchpad, "smoke", "jobs.toml", environ={}, columns=60)
    assert code == 5
    head, rule, good, bad = plain(text).splitlines()[-4:]
    assert head.split() == ["job", "time", "outcome"]
    assert set(rule) == {RULE}
    assert re.fullmatch(r"good +[0-9.]+ s  passed *", good)
    assert re.fullmatch(r"bad +[0-9.]+ s  failed, exit code 5 *", bad)
    assert "\x1b[32mpassed" in text
    assert on_terminal(launchpad, "smoke", "jobs.toml", environ={"TERM": "dumb"}, columns=60)[0].count(ESCAPE) == 0
