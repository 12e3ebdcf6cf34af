"""Says when memory is short, so that nothing is kept that nobody uses."""

from __future__ import annotations

import os
import re

from .. import linux

# Percent of the last ten seconds in which some process waited for memory.
STALLED = 10.0

# Of the memory that a cgroup, or the machine, may use, the least part that is to be free.
FREE = 0.05


def found() -> str:
    """Why memory is short; "" if it isn't, or can't be seen."""
    return judge(
        linux.text_of("/proc/pressure/memory"),
        _number("/proc/meminfo", "MemAvailable"),
        _number("/proc/meminfo", "MemTotal"),
        [(_used(folder), _bytes(f"{folder}/memory.max")) for folder in _cgroups()],
    )


def judge(stalls: str, available: int, total: int, cgroups: list[tuple[int, int]]) -> str:
    """The same, of /proc/pressure/memory, the machine's memory, and use and limit of cgroups (0: none known)."""
    match = re.search(r"^some avg10=([\d.]+)", stalls, re.M)
    if match and float(match[1]) >= STALLED:
        return f"processes wait for memory ({match[1]} % of the time)"
    if total and available < total * FREE:
        return "the machine's memory is nearly used up"
    if any(limit and used > limit * (1 - FREE) for used, limit in cgroups):
        return "the memory of its cgroup is nearly used up"
    return ""


def _cgroups() -> list[str]:
    path = next((line[3:] for line in linux.text_of("/proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    parts = [part for part in path.split("/") if part]
    return ["/".join(["/sys/fs/cgroup", *parts[:depth]]) for depth in range(1, len(parts) + 1)]


def _used(cgroup: str) -> int:
    """Without files, of which the kernel drops the copies when it needs the memory."""
    files = re.findall(r"^(?:in)?active_file (\d+)", linux.text_of(f"{cgroup}/memory.stat"), re.M)
    return _bytes(f"{cgroup}/memory.current") - sum(map(int, files))


def _bytes(path: str) -> int:
    text = linux.text_of(path).strip()
    return int(text) if text.isdigit() else 0


def _number(path: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", linux.text_of(path), re.M)
    return int(match[1]) if match else 0


def memory_of(pid: int) -> int:
    """The bytes of memory that a process has, shared pages in parts; 0 if unknown."""
    path = f"/proc/{pid}/smaps_rollup"
    return _number(path, "Pss") * 1024 if os.path.exists(path) else 0
