"""Merges speedscope files of several ranks into one, with one frame table. Pure.

https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchpad.protocol.stacks import RANK_CODE

_OUR_THREAD = "rank/stack_server.py"  # it waits all the time


def merge(files: Mapping[int, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The profiles of these ranks, as one file of that name: the main threads, by rank, then the others.

    Raises LookupError or TypeError for what is no speedscope file.
    """
    frames: list[Any] = []
    numbers: dict[tuple[tuple[str, Any], ...], int] = {}
    mains: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for rank, file in sorted(files.items()):
        table = file["shared"]["frames"]
        for place, profile in enumerate(sorted(file["profiles"], key=lambda one: '"MainThread"' not in one["name"])):
            stacks = [[table[frame] for frame in sample] for sample in profile["samples"]]
            if stacks and all(any(_path(frame).endswith(_OUR_THREAD) for frame in stack) for stack in stacks):
                continue
            samples = [[_number(frame, frames, numbers) for frame in stack if _is_theirs(frame)] for stack in stacks]
            thread = profile["name"] if place else ""
            made = {**profile, "samples": samples, "name": f"rank {rank}, {thread}" if thread else f"rank {rank}"}
            (others if place else mains).append(made)
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": frames},
        "profiles": [*mains, *others],
        "activeProfileIndex": 0,
        "name": name,
        "exporter": "launchpad",
    }


def _number(frame: Mapping[str, Any], frames: list[Any], numbers: dict[tuple[tuple[str, Any], ...], int]) -> int:
    """The frame's place in the table, where it is entered if it is new."""
    key = tuple(sorted(frame.items()))
    if key not in numbers:
        numbers[key] = len(frames)
        frames.append(frame)
    return numbers[key]


def _path(frame: Mapping[str, Any]) -> str:
    return str(frame.get("file") or "")


def _is_theirs(frame: Mapping[str, Any]) -> bool:
    """Whether it is a frame of the rank's own program."""
    return not any(ours in _path(frame) for ours in RANK_CODE)
