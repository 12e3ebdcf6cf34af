"""Renders the results of `launchpad bench` for a terminal: coloured, and with as many columns as fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from launchpad.bench import tables
from launchpad.bench.messages import LinkTiming, Row, Setting
from launchpad.console.terminal import plain_table


def heading(setting: Setting) -> Text:
    """The lines above a backend's results."""
    blank, title, *notes = tables.heading(setting)
    return Text("\n").join([Text(blank), Text(title, "bold"), *(Text(note, "yellow") for note in notes)])


def columns(width: int) -> Text:
    """The two header lines: names and units of the columns that fit."""
    names, units = tables.heads()
    return Text("\n").join([_line(names, width, dict.fromkeys(names, "bold")), _line(units, width, {}, "dim")])


def row(one: Row, width: int) -> Text:
    """One line of the results table."""
    styles = {"operation": "cyan", "time": "bold", "correct": "bold red" if one.wrong else "green", "error": "yellow"}
    return _line(tables.cells(one), width, {**styles, "model": "dim"})


def links(found: Sequence[LinkTiming]) -> Group | None:
    """The links between ranks or nodes; None if there are none."""
    lines = tables.link_cells(found)
    if not lines:
        return None
    table = _table("", *lines[0][1:], left=1)
    for name, *rest in lines[1:]:
        table.add_row(Text(name, "bold"), *map(Text, rest))
    return Group(tables.LINKS, table)


def fits(rows: Sequence[Row]) -> Group | None:
    """The line fitted to each operation's times; None if there is none."""
    lines = tables.fit_cells(rows)
    if not lines:
        return None
    table = _table(*tables.FIT_COLUMNS, left=2)
    for line in lines:
        table.add_row(*map(Text, line))
    return Group("", Text(tables.FITS, "bold"), table)


def _line(cells: Mapping[str, str], width: int, styles: Mapping[str, str], style: str = "") -> Text:
    shown = [*tables.fitting(width), "error"]
    line = Text(style=style)
    for name, text in tables.padded(cells).items():
        if name in shown:
            line.append(text, styles.get(name, ""))
    line.rstrip()
    return line


def _table(*names: str, left: int) -> Table:
    table = plain_table()
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table
