"""Frames that are cut."""

from __future__ import annotations

import itertools


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data, cut at these places, which may lie beyond its end."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]
