"""Merges speedscope files of several ranks into one, with one frame table. Pure.

https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources has the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from launchpad.protocol.stacks import RANK_CODE

_OUR_THREAD = "rank/stack_server.py"  # it waits all the time


# How py-spy names a profile: Process 4711 Thread 4712 "pin_memory".
_NAME = re.compile(r"(?:Process (\d+) )?(.*)", re.DOTALL)


def merge(files: Mapping[int, tuple[int, Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """The profiles of these ranks, as one file of that name: the main threads, by rank, then the others.

    Each has the rank's pid; below it come the processes that descend from it.

    Raises LookupError or TypeError for what is no speedscope file.
    """
    frames: list[Any] = []
    numbers: dict[tuple[tuple[str, Any], ...], int] = {}
    mains: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for rank, (pid, file) in sorted(files.items()):
        table = file["shared"]["frames"]
        threads = sorted(((*_thread(profile["name"], pid), profile) for profile in file["profiles"]), key=itemgetter(0))
        for place, (_, thread, profile) in enumerate(threads):
            stacks = [[table[frame] for frame in sample] for sample in profile["samples"]]
            if stacks and all(any(_path(frame).endswith(_OUR_THREAD) for frame in stack) for stack in stacks):
                continue
            samples = [[_number(frame, frames, numbers) for frame in stack if _is_theirs(frame)] for stack in stacks]
            made = {**profile, "samples": samples, "name": f"rank {rank}, {thread}" if place else f"rank {rank}"}
            (others if place else mains).append(made)
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": frames},
        "profiles": [*mains, *others],
        "activeProfileIndex": 0,
        "name": name,
        "exporter": "launchpad",
    }


def _thread(name: str, pid: int) -> tuple[tuple[int, bool], str]:
    """Its place among the rank's threads, and its name: the rank's own come first, of each process the main one."""
    found = _NAME.fullmatch(name)
    process, thread = (int(found[1] or pid), found[2]) if found else (pid, name)
    main = '"MainThread"' in thread
    if process != pid:
        thread = f"process {process}" if main else f"process {process}, {thread}"
    return (0 if process == pid else process, not main), thread


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
    """Whether it is a frame of the rank's own program, and not a process, which py-spy shows as the outermost one."""
    if str(frame["name"]).startswith("process ") and not _path(frame):
        return False
    return not any(ours in _path(frame) for ours in RANK_CODE)
