"""Reads what keeps processes from computing: a busy core, a quota, disks, swap; and what else their host is busy with.

All figures but the clock are totals, of which only differences mean anything. What the kernel does not tell is -1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import fmean

from ... import linux
from .resources import cgroup_folders

_TICKS = os.sysconf("SC_CLK_TCK")

# The threads that are looked at, of all ranks together: reading one takes 10 µs, and the agent does nothing else then.
_MOST_THREADS = 1000


class HindranceReader:
    """Reads what hinders trees of processes, again and again."""

    def __init__(self, cgroups: str = "/sys/fs/cgroup") -> None:
        self._cgroups = cgroups
        self._threads: dict[tuple[int, str], int] = {}  # how long each has waited for a core, in ns
        self._queued: dict[int, int] = {}  # the sum of what was added to these, by root; -1 if it is unknown

    def read(self, trees: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, float, float, float, float]]:
        """Of each tree, by its root: seconds waited for a core, for disks; faults read from a disk; seconds that the
        root was throttled; the mean clock in MHz of the cores on which it may run.
        """
        self._read_threads(trees)
        queued = {root: waited / 1e9 if waited >= 0 else -1 for root, waited in self._queued.items()}
        quotas: dict[str, float] = {}
        clocks = _clocks()
        return {
            root: (queued[root], *_sums(pids), self._throttled(root, quotas), _clock(root, clocks))
            for root, pids in trees.items()
        }

    def _read_threads(self, trees: Mapping[int, Sequence[int]]) -> None:
        """Of each process the oldest ones, its main thread first."""
        each = max(1, _MOST_THREADS // max(1, sum(map(len, trees.values()))))
        before, self._threads = self._threads, {}
        self._queued = {root: self._queued.get(root, 0) for root in trees}
        for root, pids in trees.items():
            for pid in pids:
                try:
                    for thread in islice(os.listdir(f"/proc/{pid}/task"), each):
                        self._read_thread(root, pid, thread, before)
                except (FileNotFoundError, ProcessLookupError):  # it has ended
                    continue
                except (OSError, ValueError, IndexError):
                    self._queued[root] = -1
                    break

    def _read_thread(self, root: int, pid: int, thread: str, before: Mapping[tuple[int, str], int]) -> None:
        """Add what it has waited since the last time. Others than then may be looked at."""
        waited = int(linux.contents(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
        self._threads[pid, thread] = waited
        if self._queued[root] >= 0:
            self._queued[root] += max(0, waited - before.get((pid, thread), waited))

    def _throttled(self, root: int, quotas: dict[str, float]) -> float:
        """Of the cgroup that sets the tightest quota, or its ancestors. Most ranks share theirs."""
        path = f"/proc/{root}/cgroup"
        membership = linux.text_of(path)
        if membership not in quotas:
            folders = cgroup_folders("cpu", self._cgroups, path)
            quotas[membership] = max((_throttled_in(f"{folder}/cpu.stat") for folder in folders), default=-1)
        return quotas[membership]


def _sums(pids: Sequence[int]) -> tuple[float, float]:
    figures = [found for pid in pids if (found := _process(pid)) is not None]
    return (sum(seconds for seconds, _ in figures), sum(faults for _, faults in figures)) if figures else (-1, -1)


def _process(pid: int) -> tuple[float, int] | None:
    try:
        fields = linux.stat(pid)
        return int(fields[39]) / _TICKS, int(fields[9]) + int(fields[10])
    except (OSError, ValueError, IndexError):
        return None


def _clocks() -> dict[int, float]:
    """The clock of each core now, in MHz."""
    found: dict[int, float] = {}
    core = -1
    for line in linux.text_of("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            core = int(value)
        elif name.strip() == "cpu MHz":
            found[core] = float(value)
    return found


def _clock(pid: int, clocks: Mapping[int, float]) -> float:
    try:
        own = [clocks[core] for core in os.sched_getaffinity(pid) if core in clocks]
    except OSError:
        return -1
    return fmean(own) if own else -1


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
    }
    return {name: _known(read) for name, read in found.items()}


def _cpu() -> list[int]:
    return [int(word) for word in _read("/proc/stat").split("\n", 1)[0].split()[1:]]


def _retransmitted() -> float:
    names, figures = (line.split() for line in _read("/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
    return int(figures[names.index("RetransSegs")])


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
