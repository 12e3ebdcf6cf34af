"""What `launchpad bench` has measured: as lines of a table, and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from launchpad import __version__
from launchpad.bench.fit import Fit, fit
from launchpad.bench.results import Link, Message, Row, Setting, Unavailable

_COLUMNS = (
    f"{'operation':<29} {'size':>9} {'count':>9}  {'calls':>5} {'time':>10} {'min':>10} {'max':>10} "
    f"{'algbw':>8} {'busbw':>8}  {'correct':<7}  model"
)
_UNITS = f"{'':<29} {'bytes':>9} {'':>9}  {'':>5} {'µs':>10} {'µs':>10} {'µs':>10} {'GB/s':>8} {'GB/s':>8}  {'':<7}  µs"


def heading(setting: Setting) -> list[str]:
    """What stands above a backend's figures."""
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
        lines.append(f"{shown}: they take turns, and times are those of the scheduler too")
    return lines


def columns() -> list[str]:
    """The names and the units of a row's columns."""
    return [_COLUMNS, _UNITS]


def row(one: Row) -> str:
    """A line of the table."""
    if one.error:
        return f"{one.operation:<29} {size_in_words(one.size):>9} {one.count:>9}  can't be done: {one.error}"
    correct = "yes" if not one.wrong else f"{one.wrong} WRONG"
    figures = f"{_figure(one.time_us):>10} {_figure(one.min_us):>10} {_figure(one.max_us):>10}"
    rates = f"{_rate(one.algbw):>8} {_rate(one.busbw):>8}" if one.size else f"{'-':>8} {'-':>8}"
    size = size_in_words(one.size) if one.size else "-"
    model = _figure(one.model_us) if one.model_us is not None else ""
    line = (
        f"{one.operation:<29} {size:>9} {one.count or '-':>9}  {one.calls:>5} {figures} {rates}  {correct:<7}  {model}"
    )
    return line.rstrip()


def link_matrix(links: Sequence[Link]) -> list[str]:
    """Latency above the diagonal's other half, bandwidth below it; on the diagonal, within a host, both."""
    names = list(dict.fromkeys(name for link in links for name in (link.first, link.second)))
    if not names:
        return []
    cells = {}
    for link in links:
        latency, bandwidth = f"{_figure(link.latency_us)} µs", f"{_rate(link.bandwidth)} GB/s"
        if link.first == link.second:
            cells[link.first, link.first] = f"{latency}, {bandwidth}"
        else:
            low, high = sorted((link.first, link.second), key=names.index)
            cells[low, high], cells[high, low] = latency, bandwidth
    width = max([*map(len, names), *map(len, cells.values())])
    lines = ["links, one way: latency of 8 B right of the diagonal, bandwidth of 4 MiB left of it"]
    lines.append("  ".join([f"{'':<{width}}", *(f"{name:>{width}}" for name in names)]))
    for first in names:
        shown = (cells.get((first, second), "·") for second in names)
        lines.append("  ".join([f"{first:<{width}}", *(f"{cell:>{width}}" for cell in shown)]))
    return lines


def fits(rows: Iterable[Row]) -> dict[tuple[str, str], Fit]:
    """The line through each operation's times, by operation and backend, where there are sizes enough."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in rows:
        if not one.error and one.size:
            points.setdefault((one.operation, one.backend), []).append((one.size, one.time_us * 1e-6))
    return {key: found for key, some in points.items() if (found := fit(some))}


def fit_table(rows: Sequence[Row]) -> list[str]:
    """A line for each operation and backend: the two parameters of its time, and how well they tell it."""
    found = fits(rows)
    if not found:
        return []
    lines = ["", "time ≈ α + β × size", f"{'operation':<29} {'backend':<7} {'α':>12} {'1/β':>14}  off by (r.m.s.)"]
    for (operation, backend), one in found.items():
        bandwidth = "-" if math.isinf(one.bandwidth) else f"{_rate(one.bandwidth)} GB/s"
        latency = f"{_figure(one.latency * 1e6)} µs"
        lines.append(f"{operation:<29} {backend:<7} {latency:>12} {bandwidth:>14}  {one.error:.0%}")
    return lines


def as_json(messages: Sequence[Message]) -> dict[str, Any]:
    """All of it for machines; names end in their units, bandwidths are in GB/s (1e9 bytes)."""

    def every(kind: type[Any]) -> list[dict[str, Any]]:
        return [asdict(one) for one in messages if type(one) is kind]

    rows = [one for one in messages if isinstance(one, Row)]
    return {
        "launchpad": __version__,
        "settings": every(Setting),
        "links": every(Link),
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
    """Bytes as a person writes them: 4, 64 KiB, 1.5 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value < 0.001 else f"{value:.2g}"
