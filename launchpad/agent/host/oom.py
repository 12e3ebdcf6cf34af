"""Reads the kernel's count of OOM kills: if it rose around a process's death, the OOM killer may be the cause."""

from __future__ import annotations

import os

from .resources import cgroup_folders


def kills(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int | None:
    """The number of OOM kills so far in this cgroup, or else on the whole node; None if unknown.

    cgroup v2 counts them in memory.events, v1 in memory.oom_control. Without either, /proc/vmstat has the node's count
    (Linux 4.13), which includes other jobs' processes.
    """
    for folder in cgroup_folders("memory", cgroups, membership):
        for name in ("memory.events", "memory.oom_control"):
            count = _field(os.path.join(folder, name), "oom_kill")
            if count is not None:
                return count
    return _field("/proc/vmstat", "oom_kill")


def _field(path: str, name: str) -> int | None:
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None
