"""Reads and writes times as users do: 30, 30s, 5m, 2h, 1d. Pure."""

from __future__ import annotations

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """A non-negative time in seconds. Raises ValueError."""
    unit = _UNITS.get(text[-1:])
    value = float(text[:-1]) * unit if unit else float(text)
    if not 0 <= value < 1e9:
        raise ValueError(f"{value} s")
    return value


def duration(seconds: float) -> str:
    """A time in the largest unit that needs no fraction, as the options take it: 90s, 30m, 1h, 2d."""
    unit = next(unit for unit, size in reversed(_UNITS.items()) if unit == "s" or seconds % size == 0)
    return f"{seconds / _UNITS[unit]:g}{unit}"
