"""Tables on a terminal: those of `launchpad bench`."""

from __future__ import annotations

import re

import pytest

from launchpad.bench import tables
from launchpad.bench import terminal_table as bench_table
from launchpad.bench.messages import LinkTiming, Row, Setting
from launchpad.console.terminal import drawn

RULE = "─"

ROW = Row("ring_all_reduce", "gloo", 4, 1 << 20, 1 << 18, "float32", 20, 1000.0, 900.0, 2000.0, 1.0, 1.5, 0, 12.34)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


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
