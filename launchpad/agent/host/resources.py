"""Counts what this node offers (usable cores, visible GPUs, limits), and how often its memory ran out."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

_UNLIMITED = 1 << 31

# How long torch may take to be imported: the head waits 30 s for the node's facts.
_SECONDS = 25.0


def usable_cores(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Cores that this process may actually use, at least 1: rounded down."""
    return max(1, int(core_share(cgroups, membership)))


def core_share(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> float:
    """How many cores' worth of time this process gets at most: CPU affinity, then the cgroups' quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders("cpu", cgroups, membership):
        version_1 = _numbers(f"{folder}/cpu.cfs_quota_us", 1) + _numbers(f"{folder}/cpu.cfs_period_us", 1)
        quota, period = _numbers(f"{folder}/cpu.max") or version_1 or (0, 0)
        if quota > 0 and period > 0:
            cores = min(cores, quota / period)
    return cores


def process_limit(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """The process limit: the least of the user's (root has none), the cgroups' pids.max and the kernel's pid_max."""
    limits: list[int] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(soft)
    for folder in cgroup_folders("pids", cgroups, membership):
        limits += _numbers(f"{folder}/pids.max", 1)
    limits += _numbers("/proc/sys/kernel/pid_max", 1)
    return min(limits, default=_UNLIMITED)


def open_file_limit() -> int:
    """The hard limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if hard == resource.RLIM_INFINITY else hard


def memory_left(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """How many bytes the cgroups let their processes take besides what they have; -1 without a limit.

    What the kernel caches of files counts as used there, but makes room when it is needed.
    """
    left = []
    for folder in cgroup_folders("memory", cgroups, membership):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            numbers = _numbers(f"{folder}/{limit}", 1) + _numbers(f"{folder}/{used}", 1)
            if len(numbers) == 2 and numbers[0] < 1 << 60:
                left.append(numbers[0] - numbers[1] + (_field(f"{folder}/memory.stat", cached) or 0))
    return max(0, min(left)) if left else -1


def cgroup_folders(controller: str, cgroups: str, membership: str) -> list[str]:
    """This process's cgroup for the controller and its ancestors, in cgroup v2 (one tree) and v1 (a tree each)."""
    folders = []
    try:
        with open(membership, errors="surrogateescape") as file:
            lines = [line.split(":", 2) for line in file.read().splitlines()]
    except OSError:
        return []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        root = f"{cgroups}/{controller}" if controllers else cgroups
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside of our cgroup namespace: it may be anywhere below the root, whose files say nothing
            continue
        # In a container the path may be the host's, and its own cgroup the root: missing folders are skipped.
        folders += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return folders


def _numbers(path: str, count: int = 2) -> tuple[int, ...]:
    """The file's first `count` numbers; () if there is no such file or it says "max"."""
    try:
        with open(path) as file:
            return tuple(int(word) for word in file.read().split()[:count])
    except (OSError, ValueError):
        return ()


def oom_kills(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int | None:
    """The number of OOM kills so far in this cgroup, or else on the whole node; None if unknown.

    If it rose around a process's death, the OOM killer may be the cause.
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
            _, found, rest = f"\n{file.read()}".partition(f"\n{name} ")
        return int(rest.partition("\n")[0]) if found else None
    except (OSError, ValueError):
        return None


def visible_gpus() -> int:
    """How many GPUs a rank would see, counted without torch and without a CUDA context."""
    return _visible(_installed_gpus(), os.environ)


def accelerators(name: str, python: str) -> int:
    """How many accelerators of this kind torch sees; 0 if it knows none. For this the interpreter must import torch."""
    import subprocess

    code = f"import torch; print(torch.{name}.device_count())"
    try:
        found = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
        return int(found.stdout.split()[-1])  # imports may print
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0


def _visible(installed: int, environ: Mapping[str, str]) -> int:
    listed = visible_devices(environ)
    return installed if listed is None else len(devices_in(listed, installed))


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """The list of GPUs that a rank with these variables sees; None: all."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return next((environ[name] for name in names if name in environ), None)


def devices_in(value: str, installed: int) -> list[str]:
    """The devices that a *_VISIBLE_DEVICES list names. As in CUDA, the first invalid entry ends the list."""
    found: list[str] = []
    for entry in value.split(",") if installed else ():
        entry = entry.strip()
        if int(entry) >= installed if entry.isdecimal() else not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found


def _installed_gpus() -> int:
    return _nvml_count() or _nvidia_device_files() or _amd_count()


def _nvml_count() -> int:
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0
    nvml.nvmlShutdown()
    return 0 if failed else count.value


def _nvidia_device_files() -> int:
    try:
        return sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    except OSError:
        return 0


def _amd_count() -> int:
    """GPUs in the kernel driver's topology, which also lists CPUs, with no SIMD units."""
    count = 0
    topology = "/sys/class/kfd/kfd/topology/nodes"
    try:
        for node in os.listdir(topology):
            with open(f"{topology}/{node}/properties") as file:
                count += any(line.startswith("simd_count ") and line.split()[1] != "0" for line in file)
    except OSError:
        return 0
    return count
