"""`launchpad bench --plot`: time over size, a panel for each operation, with the fitted line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.bench.results import Row
from launchpad.errors import UsageError
from launchpad.report.bench import fits

_COLOURS = {"gloo": "tab:blue", "mpi": "tab:orange", "nccl": "tab:green"}

_MISSING = "--plot needs matplotlib: pip install 'launchpad[plot]', or leave the option out"


def check() -> None:
    """Raise UsageError where there is no matplotlib."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(_MISSING)


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the picture, in the format that the path's ending names. Raises UsageError where it can't be written.

    Points are medians, bars reach from the fastest to the slowest call, dashed is α + βS, dotted the cost model.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.size and not row.error]
    operations = list(dict.fromkeys(row.operation for row in rows)) or [""]
    across = min(3, len(operations))
    down = -(-len(operations) // across)
    figure = Figure(figsize=(4.2 * across, 3.2 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    for panel, operation in zip(panels, operations, strict=False):
        _panel(panel, operation, [row for row in rows if row.operation == operation])
    for panel in panels[len(operations) :]:
        panel.remove()
    try:
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else str(error).partition("(")[0].strip()
        raise UsageError(f"--plot {path}: {reason}; give a path that can be written, ending in .png") from None


def _panel(panel: Any, operation: str, rows: Sequence[Row]) -> None:
    found = fits(rows)
    for backend in dict.fromkeys(row.backend for row in rows):
        some = sorted((row for row in rows if row.backend == backend), key=lambda row: row.size)
        colour = _COLOURS[backend]
        sizes, times = [row.size for row in some], [row.time_us for row in some]
        bars = [[row.time_us - row.min_us for row in some], [row.max_us - row.time_us for row in some]]
        panel.errorbar(
            sizes, times, bars, fmt="o", ms=4, color=colour, elinewidth=4, ecolor=(colour, 0.25), label=backend
        )
        line = found.get((operation, backend))
        if line:
            label = f"{line.latency * 1e6:.0f} µs" + f" + S / {line.bandwidth:.2f} GB/s" * bool(line.per_byte)
            fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
            panel.plot(fine, [line.at(size) * 1e6 for size in fine], "--", lw=1, color=colour, label=label)
        model = [(row.size, row.model_us) for row in some if row.model_us]
        if model:
            panel.plot(*zip(*model, strict=True), ":", lw=1.2, color=colour, label=f"{backend}: cost model")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(operation, fontsize=10)
    panel.set_xlabel("bytes", fontsize=8)
    panel.set_ylabel("µs", fontsize=8)
    panel.tick_params(labelsize=7)
    if rows:
        panel.legend(fontsize=6)
