"""Fits a straight line to an operation's times: t(S) = α + βS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """Hockney's two parameters of an operation, and the error of the fit."""

    latency: float  # α, seconds
    per_byte: float  # β, seconds; 0 if the time doesn't grow with the size
    error: float  # root mean square of (α + βS − t) / t

    @property
    def bandwidth(self) -> float:
        """1/β in GB/s; infinite if the time doesn't grow."""
        return 1e-9 / self.per_byte if self.per_byte else math.inf

    def at(self, size: float) -> float:
        """The time in seconds for `size` bytes."""
        return self.latency + self.per_byte * size


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The non-negative α and β with the least squares of relative errors; None for fewer than two sizes.

    `points`: (bytes, seconds > 0). The errors are relative because times span orders of magnitude: 10 µs matter at
    4 bytes and not at 16 MiB.
    """
    points = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in points}) < 2:
        return None
    # Weighted least squares around the weighted means, with weights 1/t².
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    size_mean = sum(weight * size for weight, (size, _) in zip(weights, points, strict=True)) / total
    time_mean = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / total
    deviations = [weight * (size - size_mean) for weight, (size, _) in zip(weights, points, strict=True)]
    variance = sum(deviation * (size - size_mean) for deviation, (size, _) in zip(deviations, points, strict=True))
    covariance = sum(
        deviation * (seconds - time_mean) for deviation, (_, seconds) in zip(deviations, points, strict=True)
    )
    slope = covariance / variance
    latency = time_mean - slope * size_mean
    if slope < 0:
        latency, slope = sum(1 / seconds for _, seconds in points) / total, 0.0
    elif latency < 0:
        ratios = [size / seconds for size, seconds in points]
        latency, slope = 0.0, sum(ratios) / sum(ratio**2 for ratio in ratios)
    errors = [(latency + slope * size - seconds) / seconds for size, seconds in points]
    return Fit(latency, slope, math.sqrt(sum(error**2 for error in errors) / len(errors)))
