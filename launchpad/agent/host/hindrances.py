"""Reads what keeps processes from computing: a busy core, a quota, disks, swap; and what else their host is busy with.

All figures are totals since the processes, or the host, began. What the kernel does not tell is -1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ... import linux
from .resources import cgroup_folders

_TICKS = os.sysconf("SC_CLK_TCK")

# The threads of a process that are looked at: one with thousands must not keep the agent busy.
_MOST_THREADS = 200


def of_tree(root: int, pids: Iterable[int], cgroups: str = "/sys/fs/cgroup") -> list[float]:
    """Of processes: seconds waited for a core, for disks; faults read from a disk; seconds the root was throttled."""
    figures = [found for pid in pids if (found := _process(pid)) is not None]
    sums = [sum(column) if min(column) >= 0 else -1 for column in zip(*figures, strict=True)] or [-1, -1, -1]
    return [*sums, _throttled(root, cgroups)]


def _process(pid: int) -> tuple[float, float, int] | None:
    try:
        fields = linux.stat(pid)
        threads = os.listdir(f"/proc/{pid}/task")
        blocked, faults = int(fields[39]) / _TICKS, int(fields[9]) + int(fields[10])
    except (OSError, ValueError, IndexError):
        return None
    return _queued(pid, threads) if len(threads) <= _MOST_THREADS else -1, blocked, faults


def _queued(pid: int, threads: Iterable[str]) -> float:
    waited = 0
    for thread in threads:
        try:
            waited += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except (OSError, ValueError, IndexError):
            return -1
    return waited / 1e9


def _throttled(pid: int, cgroups: str) -> float:
    """Of the cgroup that sets the tightest quota, or its ancestors."""
    folders = cgroup_folders("cpu", cgroups, f"/proc/{pid}/cgroup")
    return max((_throttled_in(f"{folder}/cpu.stat") for folder in folders), default=-1)


def _throttled_in(path: str) -> float:
    try:
        lines = _lines(path)
        if "throttled_usec" in lines:
            return int(lines["throttled_usec"]) / 1e6
        return int(lines["throttled_time"]) / 1e9
    except (OSError, ValueError, KeyError):
        return -1


def of_host() -> dict[str, float]:
    """Of this host: see protocol/events.py, Hindrances."""
    found: dict[str, Callable[[], float]] = {
        "cores": lambda: os.cpu_count() or -1,
        "busy": lambda: sum(_cpu()[place] for place in (0, 1, 2, 5, 6)) / _TICKS,
        "stolen": lambda: _cpu()[7] / _TICKS,
        "swapped": lambda: sum(int(_lines("/proc/vmstat")[name]) for name in ("pswpin", "pswpout")),
        "retransmitted": _retransmitted,
        "mhz": _mhz,
    }
    return {name: _known(read) for name, read in found.items()}


def _cpu() -> list[int]:
    return [int(word) for word in _read("/proc/stat").split("\n", 1)[0].split()[1:]]


def _retransmitted() -> float:
    names, figures = (line.split() for line in _read("/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
    return int(figures[names.index("RetransSegs")])


def _mhz() -> float:
    """The mean clock of the cores now."""
    found = [float(line.split(":")[1]) for line in _read("/proc/cpuinfo").splitlines() if line.startswith("cpu MHz")]
    return sum(found) / len(found)


def _known(read: Callable[[], float]) -> float:
    try:
        return read()
    except (OSError, ValueError, LookupError, ZeroDivisionError):  # another kernel, or it is hidden
        return -1


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _lines(path: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(" ") for line in _read(path).splitlines())}
