"""`launchpad bench --plot`: plots time over size, one panel per operation, with the fitted line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.bench.messages import Row
from launchpad.bench.tables import fits
from launchpad.errors import UsageError

_COLOURS = {"gloo": "tab:blue", "mpi": "tab:orange", "nccl": "tab:green"}

_MISSING = "--plot needs matplotlib: pip install 'launchpad[plot]', or drop the option"


def check() -> None:
    """Raise UsageError if matplotlib is missing."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(_MISSING)


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the plot, in the format of the path's extension. Raises UsageError if it can't be written.

    Points are medians, bars span the fastest to the slowest call, dashed lines are α + βS, dotted ones the cost model.
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
        raise UsageError(f"--plot {path}: {reason}; give a writable path ending in .png") from None


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
