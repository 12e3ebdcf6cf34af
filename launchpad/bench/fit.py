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
    # Weighted least squares about the weighted means, with weights 1/t².
    weights = [1 / seconds**2 for _, seconds in points]
    whole = sum(weights)
    size_mean = sum(weight * size for weight, (size, _) in zip(weights, points, strict=True)) / whole
    time_mean = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / whole
    away = [weight * (size - size_mean) for weight, (size, _) in zip(weights, points, strict=True)]
    spread = sum(one * (size - size_mean) for one, (size, _) in zip(away, points, strict=True))
    slope = sum(one * (seconds - time_mean) for one, (_, seconds) in zip(away, points, strict=True)) / spread
    latency = time_mean - slope * size_mean
    if slope < 0:
        latency, slope = sum(1 / seconds for _, seconds in points) / whole, 0.0
    elif latency < 0:
        shares = [size / seconds for size, seconds in points]
        latency, slope = 0.0, sum(shares) / sum(one * one for one in shares)
    off = [(latency + slope * size - seconds) / seconds for size, seconds in points]
    return Fit(latency, slope, math.sqrt(sum(one * one for one in off) / len(off)))
