"""Lists of CPUs and of NUMA nodes as the kernel writes them: 0-3,8 (cpuset(7), "List format")."""

from __future__ import annotations

from collections.abc import Iterable


def parse(text: str) -> list[int]:
    """The numbers in a list; none for an empty one. Raises ValueError."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def written(numbers: Iterable[int]) -> str:
    """The list of these numbers."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
