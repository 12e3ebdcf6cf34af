"""The straight line through an operation's times: t(S) = α + βS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """Hockney's two parameters of an operation, and how far they are off."""

    latency: float  # α, seconds
    per_byte: float  # β, seconds; 0 where the time doesn't grow with the size
    error: float  # root mean square of (α + βS − t) / t

    @property
    def bandwidth(self) -> float:
        """1/β in GB/s; infinite where the time doesn't grow."""
        return 1e-9 / self.per_byte if self.per_byte else math.inf

    def at(self, size: float) -> float:
        """The time in seconds for so many bytes."""
        return self.latency + self.per_byte * size


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The α and β, neither negative, with the least sum of squares of relative errors; None of fewer than two sizes.

    `points`: (bytes, seconds > 0). Relative, because times span orders of magnitude: an error of 10 µs is much for
    4 bytes and nothing for 16 MiB.
    """
    points = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in points}) < 2:
        return None
    # Weighted by 1/t²; the sums of the normal equations. Sizes in units of the largest, so that nothing is lost.
    unit = max(size for size, _ in points)
    rows = [(1 / seconds, size / unit / seconds) for size, seconds in points]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency, slope = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
    if latency < 0:
        latency, slope = 0.0, b1 / bb
    elif slope < 0:
        latency, slope = a1 / aa, 0.0
    off = [latency * a + slope * b - 1 for a, b in rows]
    return Fit(latency, slope / unit, math.sqrt(sum(one * one for one in off) / len(off)))
