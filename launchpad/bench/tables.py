"""Formats the results of `launchpad bench` as lines of a table, and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from launchpad._version import __version__
from launchpad.bench.fit import Fit, fit
from launchpad.bench.messages import LinkTiming, Message, Row, Setting, Unavailable


class Column(NamedTuple):
    """A column of the results table, `gap` blanks after the previous one."""

    name: str
    unit: str
    form: str  # how a cell is padded
    gap: int = 1


_COLUMNS = (
    Column("operation", "", "<29", 0),
    Column("size", "bytes", ">9"),
    Column("count", "", ">9"),
    Column("calls", "", ">5", 2),
    Column("time", "µs", ">10"),
    Column("min", "µs", ">10"),
    Column("max", "µs", ">10"),
    Column("algbw", "GB/s", ">8"),
    Column("busbw", "GB/s", ">8"),
    Column("correct", "", "<7", 2),
    Column("model", "µs", "<5", 2),
)
_BEFORE_AN_ERROR = 3  # columns

# On a narrow terminal these are dropped, in this order, until a row fits.
_SPARED = ("calls", "count", "model", "max", "min")


def heading(setting: Setting) -> list[str]:
    """The lines above a backend's results."""
    hosts = len(setting.hosts)
    where = f"on {setting.hosts[0]}" if hosts == 1 else f"on {hosts} hosts"
    library = setting.library if setting.library != setting.backend else ""
    facts = [f"{setting.ranks} ranks {where}", setting.dtype, f"torch {setting.torch}", library]
    lines = ["", f"{setting.backend}: {', '.join(filter(None, facts))}"]
    crowded = [
        f"{name} has {ranks} ranks on {cores} processor{'s' if cores > 1 else ''}"
        for name, ranks, cores in zip(setting.hosts, setting.ranks_on, setting.cores, strict=True)
        if ranks > cores
    ]
    if crowded:
        shown = "; ".join(crowded[:3]) + ("; …" if len(crowded) > 3 else "")
        lines.append(f"{shown}: ranks share processors, so times include waiting for the scheduler")
    return lines


def fitting(width: int) -> list[str]:
    """The names of the columns that fit into `width`."""
    left = list(_COLUMNS)
    for name in _SPARED:
        if sum(column.gap + int(column.form[1:]) for column in left) <= width:
            break
        left = [column for column in left if column.name != name]
    return [column.name for column in left]


def columns() -> list[str]:
    """The two header lines: names and units."""
    return ["".join(padded(line).values()).rstrip() for line in heads()]


def row(one: Row) -> str:
    """One line of the results table."""
    return "".join(padded(cells(one)).values()).rstrip()


def cells(one: Row) -> dict[str, str]:
    """A row's cells by column name; for an operation that failed, only the first ones and the reason as "error"."""
    figures = (
        one.operation,
        size_in_words(one.size) if one.size or one.error else "-",
        str(one.count if one.count or one.error else "-"),
        str(one.calls),
        *map(_figure, (one.time_us, one.min_us, one.max_us)),
        *(_rate(rate) if one.size else "-" for rate in (one.algbw, one.busbw)),
        f"{one.wrong} WRONG" if one.wrong else "yes",
        _figure(one.model_us) if one.model_us is not None else "",
    )
    found = {column.name: text for column, text in zip(_COLUMNS, figures, strict=True)}
    if one.error:
        found = dict(list(found.items())[:_BEFORE_AN_ERROR])
        found["error"] = f"  can't be done: {one.error}"
    return found


def padded(found: Mapping[str, str]) -> dict[str, str]:
    """The cells padded to the width of their columns, with the gap in front."""
    known = {one.name: one for one in _COLUMNS}
    return {
        name: f"{'':{known[name].gap}}{text:{known[name].form}}" if name in known else text
        for name, text in found.items()
    }


def heads() -> tuple[dict[str, str], dict[str, str]]:
    """The cells of the two header lines."""
    return {one.name: one.name for one in _COLUMNS}, {one.name: one.unit for one in _COLUMNS}


LINKS = "links, one way: latency of 8 B right of the diagonal, bandwidth of 4 MiB left of it"


def link_matrix(links: Sequence[LinkTiming]) -> list[str]:
    """The matrix as lines: latency above the diagonal, bandwidth below, and both, within a host, on it."""
    found = link_cells(links)
    width = max((len(cell) for line in found for cell in line), default=0)
    lines = [[f"{first:<{width}}", *(f"{cell:>{width}}" for cell in rest)] for first, *rest in found]
    return [LINKS, *map("  ".join, lines)] if lines else []


def link_cells(links: Sequence[LinkTiming]) -> list[list[str]]:
    """The matrix, with names as its first row and first column; empty without links."""
    names = list(dict.fromkeys(name for link in links for name in (link.first, link.second)))
    found = {}
    for link in links:
        latency, bandwidth = f"{_figure(link.latency_us)} µs", f"{_rate(link.bandwidth)} GB/s"
        if link.first == link.second:
            found[link.first, link.first] = f"{latency}, {bandwidth}"
        else:
            low, high = sorted((link.first, link.second), key=names.index)
            found[low, high], found[high, low] = latency, bandwidth
    rows = [[first, *(found.get((first, second), "·") for second in names)] for first in names]
    return [["", *names], *rows] if names else []


def fits(rows: Iterable[Row]) -> dict[tuple[str, str], Fit]:
    """The line fitted to each operation's times, by operation and backend, if there are enough sizes."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in rows:
        if not one.error and one.size:
            points.setdefault((one.operation, one.backend), []).append((one.size, one.time_us * 1e-6))
    return {key: found for key, some in points.items() if (found := fit(some))}


FITS = "time ≈ α + β × size"
FIT_COLUMNS = ("operation", "backend", "α", "1/β", "off by (r.m.s.)")


def fit_table(rows: Sequence[Row]) -> list[str]:
    """A line for each operation and backend: the parameters of the fit, and its error."""
    lines = [
        f"{operation:<29} {backend:<7} {latency:>12} {bandwidth:>14}  {error}"
        for operation, backend, latency, bandwidth, error in (FIT_COLUMNS, *fit_cells(rows))
    ]
    return ["", FITS, *lines] if len(lines) > 1 else []


def fit_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of FIT_COLUMNS."""
    return [
        (
            operation,
            backend,
            f"{_figure(one.latency * 1e6)} µs",
            "-" if math.isinf(one.bandwidth) else f"{_rate(one.bandwidth)} GB/s",
            f"{one.error:.0%}",
        )
        for (operation, backend), one in fits(rows).items()
    ]


def as_json(messages: Sequence[Message]) -> dict[str, Any]:
    """All results as JSON. Names end in their units; bandwidths are in GB/s (1e9 bytes)."""

    def every(kind: type[Any]) -> list[dict[str, Any]]:
        return [asdict(one) for one in messages if type(one) is kind]

    rows = [one for one in messages if isinstance(one, Row)]
    return {
        "launchpad": __version__,
        "settings": every(Setting),
        "links": every(LinkTiming),
        "rows": every(Row),
        "fits": [
            {
                "operation": operation,
                "backend": backend,
                "alpha_us": one.latency * 1e6,
                "beta_us_per_byte": one.per_byte * 1e6,
                "error": one.error,
            }
            for (operation, backend), one in fits(rows).items()
        ],
        "unavailable": every(Unavailable),
    }


def size_in_words(size: int) -> str:
    """A number of bytes for people: 4 B, 64 KiB, 1.5 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value < 0.001 else f"{value:.2g}"
