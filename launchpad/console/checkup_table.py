"""The result of a checkup as a table on a terminal, and as lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from launchpad.console.terminal import plain_table
from launchpad.doctor.judge import about_host, about_pairs, about_reductions, level_of
from launchpad.doctor.seen import Examination, Finding, Level
from launchpad.protocol.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

# Longer names are broken, so that they leave room for what is said.
_HOST_COLUMNS = 18
_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


class CheckupRow(NamedTuple):
    """A line of the table."""

    where: str  # a host or a pair; "" where it is the same as above
    level: Level
    text: str
    remedy: str


def rows(seen: Examination, findings: list[Finding]) -> Iterator[CheckupRow]:
    """Each host with what is wrong there; then pairs, and what concerns all."""
    for place, host in enumerate(seen.hosts):
        own = [one for one in findings if one.hosts == (place,)]
        if not host.failure:
            yield CheckupRow(host.shown, level_of(own), about_host(seen, place), "")
        for one in own:
            yield CheckupRow(host.shown if host.failure else "", one.level, one.text, one.remedy)
    pairs = [one for one in findings if len(one.hosts) == 2]
    for one in pairs:
        yield CheckupRow(_names(seen, one), one.level, one.text, one.remedy)
    if (text := about_pairs(seen)) and not pairs:
        yield CheckupRow("network", "ok", text, "")
    for one in findings:
        if len(one.hosts) > 2:
            yield CheckupRow(one.subject, one.level, one.text, one.remedy)
    if text := about_reductions(seen):
        yield CheckupRow("all_reduce", "ok", text, "")


def _names(seen: Examination, finding: Finding) -> str:
    return " ↔ ".join(seen.hosts[place].shown for place in finding.hosts)


def lines(found: list[CheckupRow]) -> Iterator[str]:
    """For a file, a pipe, or an error message."""
    width = max((len(row.where) for row in found), default=0)
    for row in found:
        yield f"{row.where:<{width}}  {row.level:<4}  {printable(row.text)}"
        if row.remedy:
            yield f"{'':<{width}}        try: {printable(row.remedy)}"


def notes(seen: Examination, findings: list[Finding]) -> Iterator[str]:
    """A line for each finding, for a job that is about to start."""
    for one in findings:
        yield printable(f"{_names(seen, one)}: {one.text}" + (f"; try: {one.remedy}" if one.remedy else ""))


def table(found: list[CheckupRow]) -> Table:
    """For a terminal."""
    from rich.text import Text

    made = plain_table()
    made.show_header = False
    made.add_column(max_width=_HOST_COLUMNS, overflow="fold")
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in found:
        text = Text(printable(row.text))
        if row.remedy:
            text.append("\ntry: ", "dim").append(printable(row.remedy), "cyan")
        made.add_row(Text(row.where, "bold"), Text(row.level, _STYLES[row.level]), text)
    return made
