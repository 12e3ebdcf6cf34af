"""Draws `launchpad top` with rich: a screenful, or once as text."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, Group
from rich.text import Text

from launchpad.console.message import wants_colour
from launchpad.diagnosis.activity import (
    ENDED,
    LOST,
    PROMPT,
    STOPPED,
    WAITING,
    ChildRow,
    HostRow,
    JobLook,
    RankRow,
    folded,
    seconds_in_words,
    state_in_words,
)
from launchpad.protocol.events import STDOUT
from launchpad.protocol.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

# On a smaller terminal nothing can be read.
LEAST_ROWS = 8
LEAST_COLUMNS = 40

# The columns of the ranks, besides the last line.
_CELLS = ("rank", "host", "state", "CPU", "memory", "threads", "read/s", "write/s", "GPU", "GPU mem", "lines/s")
# Those that are left out, one after the other, until the last line has this much room.
_LESS_IMPORTANT = ("threads", "write/s", "read/s", "lines/s", "GPU mem", "host")
_LAST_LINE_COLUMNS = 24
_GAP = 2
_SPACE = _GAP * " "
_TEXTS = ("host", "state", "last line", "")
_MOST_HOST = 16

# So many hosts, and ranks, has --once.
MOST_ONCE = 512

# The columns of --once where there is no terminal.
PLAIN_COLUMNS = 160

# The hosts take no more than this share of the rows.
_HOSTS_SHARE = 4

_STYLES = {WAITING: "yellow", PROMPT: "bold cyan", STOPPED: "magenta", LOST: "red"}

KEYS = "↑ ↓ choose  Enter output  s stacks  / filter  o order  e end the job  q quit"
TEXT_KEYS = "↑ ↓ scroll  Esc back  q quit"


_Cell = tuple[str, str]  # a text, and its style


class ScreenSize(NamedTuple):
    """A terminal's size."""

    rows: int
    columns: int

    @property
    def too_small(self) -> bool:
        """Whether nothing can be read on it."""
        return self.rows < LEAST_ROWS or self.columns < LEAST_COLUMNS


def job_lines(look: JobLook, ranks: Sequence[RankRow], columns: int) -> list[Text]:
    """The job: what runs and for how long; how many ranks do what, attempts, machines that join; who is slow."""
    state = look.state
    if look.started:
        state += f" for {seconds_in_words((look.time - look.started) / 1e9)}"
    first = Text(f"job {look.job}", "bold", no_wrap=True)
    words = Text(" ".join(look.words), no_wrap=True, overflow="ellipsis")
    words.truncate(max(0, columns - len(first) - len(state) - 4), overflow="ellipsis")
    gap = max(2, columns - len(first) - 2 - words.cell_len - len(state))
    counts = Counter("in " + row.operation if row.state == WAITING else row.state for row in ranks)
    parts = [f"{len(ranks)} rank{'s' * (len(ranks) != 1)}: " + ", ".join(f"{n} {what}" for what, n in _sorted(counts))]
    if look.attempt:
        parts.append(f"attempt {look.attempt + 1}")
    if look.most_restarts:
        parts.append(f"{look.restarts} of {look.most_restarts} restarts")
    if look.joining:
        parts.append(f"joining: {', '.join(look.joining)}")
    return [
        Text.assemble(first, "  ", words, " " * gap, (state, "bold")),
        Text("   ".join(parts), no_wrap=True, overflow="ellipsis"),
        *([Text(look.slow, "yellow", no_wrap=True, overflow="ellipsis")] if look.slow else []),
    ]


def _sorted(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def host_lines(hosts: Sequence[HostRow], most: int) -> list[Text]:
    """A line for each host, or as many as there is room for, and a head."""
    shown = hosts if len(hosts) <= most else hosts[: most - 1]
    cells: list[dict[str, _Cell]] = [
        {
            "host": (host.name, ""),
            "ranks": (str(host.ranks), ""),
            "CPU": (percent(host.cpu * 100), ""),
            "memory": (amount(host.memory), ""),
            **({"GPU mem": (amount(host.gpu_memory), "")} if any(one.gpu_memory >= 0 for one in hosts) else {}),
            "read/s": (amount(host.read), ""),
            "write/s": (amount(host.written), ""),
            "": (host.note, "red"),
        }
        for host in shown
    ]
    lines = _table(cells, _widths(cells[0], cells))
    if len(shown) < len(hosts):
        lines.append(Text(f"and {len(hosts) - len(shown)} more", "dim"))
    return lines


def rank_lines(
    rows: Sequence[RankRow],
    columns: int,
    *,
    hosts: bool,
    gpus: bool,
    selected: int = -1,
    widest: dict[str, int] | None = None,
    below: Mapping[int, Sequence[ChildRow]] = MappingProxyType({}),
) -> list[Text]:
    """A line for each row, and a head. `hosts`, `gpus`: whether to show these columns. What doesn't fit is left out.

    `below`: the processes of each rank, which have lines below its own.

    `widest`: how wide the columns have been, to be updated; they don't shrink, so that nothing moves from look to look.
    """
    cells: list[dict[str, _Cell]] = []
    for row in rows:
        cells.append(_cells(row))
        cells += [_cells_of_child(child) for child in below.get(row.ranks[0], ())]
    widths = _widths([name for name in _CELLS if (hosts or name != "host") and (gpus or "GPU" not in name)], cells)
    if widest is not None:
        widths = {name: max(width, widest.get(name, 0)) for name, width in widths.items()}
        widest |= widths
    for name in _LESS_IMPORTANT:
        if name in widths and sum(widths.values()) + _GAP * len(widths) + _LAST_LINE_COLUMNS > columns:
            del widths[name]
    lines = _table(cells, {**widths, "last line": 0})
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    if selected >= 0 and rows:
        selected += sum(len(below.get(row.ranks[0], ())) for row in rows[:selected])
        lines[selected + 1].truncate(columns, overflow="ellipsis", pad=True)
        lines[selected + 1].stylize("reverse")
    return lines


def _are_roles(rows: Sequence[RankRow]) -> bool:
    """Whether what stands for the hosts are roles, on one machine."""
    return all(row.role in row.hosts for row in rows)


def _cells(row: RankRow) -> dict[str, _Cell]:
    style = _STYLES.get(row.state, "")
    if row.state == ENDED:
        style = "red" if row.code else "dim"
    figures = {
        "CPU": percent(row.cpu * 100),
        "memory": amount(row.memory),
        "threads": "" if row.threads < 0 else f"{row.threads:.0f}",
        "read/s": amount(row.read),
        "write/s": amount(row.written),
        "GPU": percent(row.gpu),
        "GPU mem": amount(row.gpu_memory),
        "lines/s": "" if row.lines < 0 else f"{row.lines:.3g}",
    }
    return {
        "rank": (f"{row.role} {_ranks(row.own)}" if row.role else _ranks(row.ranks), ""),
        "host": (row.hosts[0][:_MOST_HOST] if len(row.hosts) == 1 else f"{len(row.hosts)} hosts", ""),
        "state": (state_in_words(row), style),
        **{name: (text, "dim" if text in ("0", "0%") else "") for name, text in figures.items()},
        "last line": (row.last_line, "dim"),
    }


def _cells_of_child(child: ChildRow) -> dict[str, _Cell]:
    figures = {
        "CPU": percent(child.cpu * 100),
        "memory": amount(child.memory),
        "threads": f"{child.threads}",
    }
    return {
        **dict.fromkeys(_CELLS, ("", "")),
        "rank": ("└", "dim"),
        "state": (f"{child.pid} {child.state}", "dim"),
        **{name: (text, "dim") for name, text in figures.items()},
        "last line": (printable(" ".join(child.command.split())), "dim"),
    }


def below_ranks(
    rows: Sequence[RankRow], children: Mapping[int, Sequence[ChildRow]], room: int
) -> Mapping[int, Sequence[ChildRow]]:
    """The processes to be shown below their ranks: all, if there is room for them, or none."""
    shown = {row.ranks[0]: children[row.ranks[0]] for row in rows if len(row.ranks) == 1 and row.ranks[0] in children}
    return shown if len(rows) + sum(map(len, shown.values())) <= room else {}


def _widths(names: Iterable[str], cells: Sequence[Mapping[str, _Cell]]) -> dict[str, int]:
    return {name: max([len(name), *(len(row[name][0]) for row in cells)]) for name in names}


def _table(cells: Sequence[Mapping[str, _Cell]], widths: Mapping[str, int]) -> list[Text]:
    """Rows and a head in columns of these widths. Text is left-aligned, figures right. Quicker than rich's Table."""
    head = {name: (name, "bold") for name in widths}
    return [
        Text.assemble(
            *(
                (f"{text:<{width}}{_SPACE}" if name in _TEXTS else f"{text:>{width}}{_SPACE}", style)
                for name, width in widths.items()
                for text, style in (row[name],)
            ),
            no_wrap=True,
            overflow="ellipsis",
        )
        for row in (head, *cells)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks on little room: "3", "0-7", "58 of 0-63"."""
    if len(ranks) == 1:
        return str(ranks[0])
    whole = f"{ranks[0]}-{ranks[-1]}"
    return whole if len(ranks) == ranks[-1] - ranks[0] + 1 else f"{len(ranks)} of {whole}"


def percent(share: float) -> str:
    """A share of a core or a GPU; "" if unknown."""
    return "" if share < 0 else f"{share:.0f}%"


def amount(size: float) -> str:
    """Bytes with three digits, like 1.25G; "" if unknown."""
    if size < 1024:
        return "" if size < 0 else f"{size:.0f}"
    power = next(power for power in range(1, 7) if size < 999.5 * 1024**power or power == 6)
    return f"{size / 1024**power:.3g}{'KMGTPE'[power - 1]}"


def text_of(what: RenderableType, columns: int, environ: Mapping[str, str], *, plain: bool = False) -> list[str]:
    """What is shown, as lines for a terminal; `plain`: without any escape sequence."""
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system=None if plain else "standard",
        no_color=not wants_colour(STDOUT, environ),
        width=columns,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ=environ,
    )
    with console.capture() as captured:
        console.print(what, no_wrap=True, overflow="ellipsis", crop=True)
    return captured.get().splitlines()


def once(
    look: JobLook,
    hosts: Sequence[HostRow],
    rows: Sequence[RankRow],
    children: Mapping[int, Sequence[ChildRow]],
    columns: int,
    *,
    plain: bool,
) -> list[str]:
    """All of it, as lines of text; if that is very many, ranks that are alike as one."""
    several = len(hosts) > 1
    parts: list[Any] = [*job_lines(look, rows, columns), Text()]
    if several:
        parts += [*host_lines(hosts, MOST_ONCE), Text()]
    gpus = any(row.gpu_memory >= 0 for row in rows)
    shown = folded(rows, MOST_ONCE)
    below = below_ranks(shown, children, MOST_ONCE)
    parts += rank_lines(shown, columns, hosts=several and not _are_roles(shown), gpus=gpus, below=below)
    return [line.rstrip() for line in text_of(Group(*parts), columns, os.environ, plain=plain)]


class RankList:
    """The screen with the ranks: which rows it shows, and which is selected."""

    def __init__(self) -> None:
        self.selected: list[int] = []  # the ranks of the selected row
        self._top = 0  # the first row shown
        self._place = 0
        self._shown: Sequence[RankRow] = ()
        self._widest: dict[str, int] = {}

    def move(self, by: int) -> None:
        """Select another row."""
        if self._shown:
            self._place = min(max(0, self._place + by), len(self._shown) - 1)
            self.selected = self._shown[self._place].ranks

    @property
    def row(self) -> RankRow | None:
        """The selected row."""
        return self._shown[self._place] if self._shown else None

    def lines(
        self,
        look: JobLook,
        every: Sequence[RankRow],
        hosts: Sequence[HostRow],
        arrange: Callable[[int], Sequence[RankRow]],
        size: ScreenSize,
        marks: Sequence[str],
        note: str,
        children: Mapping[int, Sequence[ChildRow]] = MappingProxyType({}),
    ) -> list[str]:
        """The screen.

        `every`: a row for each rank; `arrange`: the rows to show, given how many fit; `marks`: what is special about
        them; `note`: the last line; `children`: the processes of each rank.
        """
        several = len(hosts) > 1
        parts: list[Any] = [*job_lines(look, every, size.columns), Text()]
        used = 3 + bool(look.slow)
        if several:
            most = max(2, size.rows // _HOSTS_SHARE - 2)
            parts += [*host_lines(hosts, most), Text()]
            used += min(len(hosts), most) + 2
        room = max(1, size.rows - used - 3)  # the table's head, and the last two lines
        rows = self._shown = arrange(room)
        found = [place for place, row in enumerate(rows) if set(row.ranks) & set(self.selected)]
        self._place = found[0] if found else min(self._place, max(0, len(rows) - 1))
        self._top = min(max(self._top, self._place - room + 1), self._place, max(0, len(rows) - room))
        shown = rows[self._top : self._top + room]
        gpus = any(row.gpu_memory >= 0 for row in every)
        selected = self._place - self._top
        below = below_ranks(rows, children, room)
        hosts_too = several and not _are_roles(rows)
        parts += rank_lines(
            shown, size.columns, hosts=hosts_too, gpus=gpus, selected=selected, widest=self._widest, below=below
        )
        lines = text_of(Group(*parts), size.columns, os.environ)[: size.rows - 2]
        more = len(rows) - self._top - len(shown)
        lines += [""] * (size.rows - 2 - len(lines))
        below_table = "   ".join([*marks, *([f"{more} more below"] if more else [])])
        return lines + text_of(Text(below_table, "dim"), size.columns, os.environ) + _last(note, size)


class TextPage:
    """The screen with lines of text, which scrolls; at the end it follows what is added."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.text: list[str] = []
        self._from_end = 0
        self._room = 1

    def move(self, by: int) -> None:
        """Scroll."""
        self._from_end = min(max(0, self._from_end - by), max(0, len(self.text) - self._room))

    def lines(self, size: ScreenSize, note: str) -> list[str]:
        """The screen."""
        self._room = size.rows - 3
        self.move(0)
        end = len(self.text) - self._from_end
        shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in self.text[max(0, end - self._room) : end]]
        head = [Text(self.title, "bold", no_wrap=True, overflow="ellipsis"), Text()]
        lines = text_of(Group(*head, *shown), size.columns, os.environ)
        return lines + [""] * (size.rows - 1 - len(lines)) + _last(note, size)


def _last(note: str, size: ScreenSize) -> list[str]:
    return text_of(Text(note, "dim" if note in (KEYS, TEXT_KEYS) else "bold"), size.columns, os.environ)
