"""Whether the kernel killed for want of memory: its own counters, read before and after a death."""

from __future__ import annotations

import os

from .node import cgroup_folders


def kills(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Processes that the kernel has killed for memory so far: in this cgroup, else on the whole node.

    cgroup v2 counts in memory.events, v1 in memory.oom_control; without either, /proc/vmstat counts for the node
    (Linux 4.13), where a neighbour's death would be counted too.
    """
    for folder in cgroup_folders("memory", cgroups, membership):
        for name in ("memory.events", "memory.oom_control"):
            count = _field(os.path.join(folder, name), "oom_kill")
            if count is not None:
                return count
    return _field("/proc/vmstat", "oom_kill") or 0


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
