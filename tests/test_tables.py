"""Tables on a terminal, and the same as plain lines in a pipe: launchpad jobs, smoke, bench."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from launchpad.bench import tables
from launchpad.bench import terminal_table as bench_table
from launchpad.bench.messages import LinkTiming, Row, Setting
from launchpad.console.terminal import drawn, printable
from tests.conftest import Launchpad
from tests.test_terminal import Terminal

ESCAPE = "\x1b["
RULE = "─"

ROW = Row("ring_all_reduce", "gloo", 4, 1 << 20, 1 << 18, "float32", 20, 1000.0, 900.0, 2000.0, 1.0, 1.5, 0, 12.34)


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


@pytest.mark.parametrize(
    ("width", "missing"),
    [
        (200, ""),
        (tables.row(ROW).rindex("12.3") + 5, ""),
        (119, "calls"),
        (110, "calls count"),
        (100, "calls count model"),
        (80, "calls count model max min"),
        (20, "calls count model max min"),
    ],
)
def test_bench_shows_the_columns_that_fit(width: int, missing: str) -> None:
    names, units = plain(drawn(bench_table.columns(width), 1, {}, width).decode()).splitlines()[:2]
    all_names, all_units = tables.columns()
    assert names.split() == [name for name in all_names.split() if name not in missing.split()]
    row = plain(drawn(bench_table.row(ROW, width), 1, {}, width).decode()).rstrip("\n")
    if not missing:
        assert (names, units, row) == (all_names, all_units, tables.row(ROW))
    assert {len(line) for line in (names, row)} <= set(range(max(79, width + 1)))
    assert row.split()[0] == "ring_all_reduce"


def test_what_bench_says_of_links_and_settings_is_the_same_on_a_terminal() -> None:
    links = [
        LinkTiming("gloo", "a", "a", 10, 4),
        LinkTiming("gloo", "a", "b", 50, 1.25),
        LinkTiming("gloo", "b", "b", 11, 5),
    ]
    table = bench_table.links(links)
    assert table is not None
    shown = plain(drawn(table, 1, {}, 100).decode()).splitlines()
    assert [line.split() for line in shown if RULE not in line] == [line.split() for line in tables.link_matrix(links)]
    setting = Setting("gloo", 4, ("a",), (4,), (2,), "float32", "2.13", "gloo", 7)
    shown = plain(drawn(bench_table.heading(setting), 1, {}, 200).decode()).splitlines()
    assert shown == tables.heading(setting)
    rows = [Row(**{**vars(ROW), "size": size, "time_us": time}) for size, time in ((4, 10.0), (4096, 50.0))]
    fits = bench_table.fits(rows)
    assert fits is not None
    shown = plain(drawn(fits, 1, {}, 100).decode()).splitlines()
    assert [line.split() for line in shown if RULE not in line] == [line.split() for line in tables.fit_table(rows)]
    assert bench_table.links([]) is None
    assert bench_table.fits([]) is None


def test_what_is_wrong_or_fails_is_all_shown_on_a_terminal() -> None:
    failed = Row(**{**vars(ROW), "error": "no such thing " * 20})
    assert plain(drawn(bench_table.row(failed, 80), 1, {}, 80).decode()).count("no such thing") == 20
    wrong = Row(**{**vars(ROW), "wrong": 17})
    environ = {"TERM": "xterm"}
    assert plain(drawn(bench_table.row(wrong, 80), 1, environ, 80).decode()).split()[-2:] == ["17", "WRONG"]


def test_text_of_others_moves_no_cursor() -> None:
    assert printable("é ∑\x1b[2J\n\t\r\x07\udcff") == "é ∑\\x1b[2J\\n\\t\\r\\x07\\udcff"
