"""What this host has and allows: limits, folders, memory, load, and what sshd lets any user see."""

from __future__ import annotations

import glob
import os
import re
import resource
import time
from typing import Any

from ... import linux
from ...protocol.health import Folder, Load, MemoryLeft, ResourceLimits, SshServer
from ..host import resources

# How long to watch what the host is doing.
WATCH_SECONDS = 0.4

_CAP_IPC_LOCK = 14

_PAGE = os.sysconf("SC_PAGE_SIZE")


def limits() -> ResourceLimits:
    """The limits of the user's processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return ResourceLimits(
        nofile=soft,
        nofile_hard=hard,
        memlock=-1 if _may_lock_memory() else memlock,
        processes=resources.process_limit(),
        cores=resources.core_share(),
        all_cores=os.cpu_count() or 1,
        infiniband=any(map(_is_used, glob.glob("/sys/class/infiniband/*/ports/*"))),
    )


def _is_used(port: str) -> bool:
    """Whether this is a port of an InfiniBand network, not one of Ethernet with RDMA."""
    return "ACTIVE" in linux.text_of(f"{port}/state") and "InfiniBand" in linux.text_of(f"{port}/link_layer")


def _may_lock_memory() -> bool:
    """Whether the limit of locked memory does not count (CAP_IPC_LOCK)."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", linux.text_of("/proc/self/status"), re.MULTILINE)
    return effective is not None and bool(int(effective.group(1), 16) >> _CAP_IPC_LOCK & 1)


def expanded(use: str, request: dict[str, Any]) -> str:
    """The path of a folder, as the ranks would find it."""
    environ = {**os.environ, **request["environ"]}
    if use == "tmp":
        return environ.get("TMPDIR") or "/tmp"
    return environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def folder(path: str) -> Folder:
    """A folder's file system. One that does not exist yet is made where its parent is."""
    place = path
    while not os.path.exists(place) and os.path.dirname(place) != place and path != "/dev/shm":
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Folder(path, (error.strerror or str(error)).lower(), -1, -1, -1, False)
    problem = ""
    if found.f_flag & os.ST_RDONLY:
        problem = "read-only file system"
    elif not os.path.isdir(place):
        problem = "not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = "permission denied"
    return Folder(
        path,
        problem,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else -1,
        noexec=bool(found.f_flag & os.ST_NOEXEC),
    )


def memory() -> MemoryLeft:
    """Memory, and whether the host swaps."""
    before = _swapped()
    time.sleep(WATCH_SECONDS)
    found = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) << 10
    return MemoryLeft(
        total=found["MemTotal"],
        available=found.get("MemAvailable", -1),
        left_in_cgroup=resources.memory_left(),
        swapped=(_swapped() - before) * _PAGE / WATCH_SECONDS,
    )


def _swapped() -> int:
    """Pages swapped in and out since boot."""
    with open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("pswpin ", "pswpout ")))


def load() -> Load:
    """How busy the host is."""
    total, idle = _ticks()
    time.sleep(WATCH_SECONDS)
    later, still = _ticks()
    return Load(os.getloadavg()[0], 1 - (still - idle) / max(1, later - total))


def _ticks() -> tuple[int, int]:
    """Clock ticks of all cores since boot, and the idle ones."""
    with open("/proc/stat") as file:
        ticks = list(map(int, file.readline().split()[1:9]))
    return sum(ticks), ticks[3] + ticks[4]


def ssh_server() -> SshServer:
    """What sshd's main process has in its title: "… [listener] 0 of 10-100 startups"."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", errors="replace") as file:
                title = file.read()
        except OSError:
            continue
        if found := re.match(r"sshd: .*\[listener\] (\d+) of (\d+)-\d+ startups", title):
            return SshServer(int(found[1]), int(found[2]))
    return SshServer(-1, -1)
