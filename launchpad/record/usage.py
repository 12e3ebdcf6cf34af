"""Measures how much CPU and memory running jobs use on this machine: each launchpad with all its descendants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

# CPU usage is measured over this time.
SAMPLE_SECONDS = 0.2


class Usage(NamedTuple):
    """The usage of one job."""

    memory: int  # bytes; shared memory is counted once
    processors: float  # 1.5: one and a half are busy


def usage(pids: Sequence[int]) -> list[Usage]:
    """The usage of each of these launchpads. Takes SAMPLE_SECONDS, however many there are."""
    trees = [_tree(pid) for pid in pids]
    for tree in trees:
        for process in tree:
            _percent(process)
    time.sleep(SAMPLE_SECONDS)
    return [Usage(sum(map(_memory, tree)), sum(map(_percent, tree)) / 100) for tree in trees]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    except psutil.Error:
        return []


def _percent(process: psutil.Process) -> float:
    """CPU usage since the last call."""
    try:
        return process.cpu_percent()
    except psutil.Error:
        return 0.0


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
