"""Reads times as users write them: 30, 30s, 5m, 2h, 1d. Pure."""

from __future__ import annotations

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """A non-negative time in seconds. Raises ValueError."""
    unit = _UNITS.get(text[-1:])
    value = float(text[:-1]) * unit if unit else float(text)
    if not 0 <= value < 1e9:
        raise ValueError(f"{value} s")
    return value
