"""Judges each host by itself: limits, folders, memory, load, sshd."""

from __future__ import annotations

from collections.abc import Iterator

from launchpad.doctor.seen import Finding, HostSeen, Level, counted, size
from launchpad.protocol.health import Folder, Load, MemoryLeft, ResourceLimits, SshServer

FEW_FILES, TOO_FEW_FILES = 1024, 256
FEW_PROCESSES, TOO_FEW_PROCESSES = 1024, 128
# For InfiniBand: what a queue pair and its buffers need.
FEW_LOCKED = 64 << 20
# NCCL and DataLoader workers take some for each rank; Docker gives 64 MiB, and that is known to be too little.
LITTLE_SHARED, TOO_LITTLE_SHARED = 256 << 20, 32 << 20
LITTLE_SPACE, TOO_LITTLE_SPACE = 1 << 30, 16 << 20
FEW_INODES, TOO_FEW_INODES = 10_000, 100
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 1 << 30, 256 << 20
SWAPPING = 4 << 20  # bytes per second
# sshd drops connections from its 10th one on, unless it is told otherwise.
FEW_STARTUPS = 10

_UNLIMITED = 1 << 62


def judge_host(place: int, host: HostSeen) -> Iterator[Finding]:
    """What is wrong with one host."""

    def found(level: Level, subject: str, text: str, remedy: str) -> Finding:
        return Finding(level, (place,), subject, text, remedy)

    for subject, problem in host.problems.items():
        text = problem or "no answer"
        yield found("warn", subject, f"could not be checked: {_NAMES.get(subject, subject)} ({text})", "")
    limits: ResourceLimits | None = host.facts.get("limits")
    if limits:
        yield from _limits(place, limits)
    for subject, what in _FOLDERS.items():
        folder: Folder | None = host.facts.get(subject)
        if folder:
            yield from _folder(place, subject, what, folder)
    memory: MemoryLeft | None = host.facts.get("memory")
    if memory:
        left = min(one for one in (memory.available, memory.left_in_cgroup, _UNLIMITED) if one >= 0)
        if left < LITTLE_MEMORY:
            whose = "its cgroup allows" if left == memory.left_in_cgroup else "it has"
            yield found(
                "bad" if left < TOO_LITTLE_MEMORY else "warn",
                "memory",
                f"{whose} {size(left)} more of memory, and a rank with torch takes 300 MB",
                "end what needs the memory (ps aux --sort -rss | head), or ask for more",
            )
        if memory.swapped > SWAPPING:
            rate = size(memory.swapped)
            yield found("warn", "memory", f"it is swapping {rate} a second", "ps aux --sort -rss | head")
    load: Load | None = host.facts.get("load")
    if load and limits and load.running > 1.5 * limits.all_cores and load.busy > 0.8:
        yield found(
            "warn",
            "load",
            f"others keep it busy: {load.running:.0f} tasks want its {counted(limits.all_cores, 'core')}",
            "top -o %CPU, or another host",
        )
    sshd: SshServer | None = host.facts.get("sshd")
    if sshd and 0 <= sshd.begin < FEW_STARTUPS:
        yield found(
            "warn",
            "sshd",
            f"its sshd drops connections as soon as {sshd.begin} others are logging in (MaxStartups)",
            "MaxStartups 10:30:100 in /etc/ssh/sshd_config; sudo systemctl reload ssh",
        )
    elif sshd and sshd.pending > sshd.begin // 2 > 0:
        yield found(
            "warn",
            "sshd",
            f"{sshd.pending} connections to its sshd hang before login; at {sshd.begin} it starts dropping some",
            "sudo ss -tnp state established '( sport = :ssh )'",
        )


# What can't be checked, in words.
_NAMES = {
    "tmp": "the folder for temporary files",
    "cache": "the folder for caches",
    "shm": "/dev/shm",
    "lookup": "what its own name and the others' mean; is its DNS server up?",
    "probes": "its paths to the others",
    "software": "what its Python has installed",
    "gpus": "the GPUs",
    "mpi": "which MPI its Python would use",
    "code": "the code in the working folder",
    "kept": "the images that are kept",
}
_FOLDERS = {"tmp": "for temporary files", "cache": "for the agent", "shm": "for shared memory"}


def _limits(place: int, limits: ResourceLimits) -> Iterator[Finding]:
    def found(level: Level, text: str, remedy: str) -> Finding:
        return Finding(level, (place,), "limits", text, remedy)

    if 0 <= limits.nofile < FEW_FILES:
        remedy = "ulimit -n 65536 in ~/.bashrc"
        if 0 <= limits.nofile_hard < FEW_FILES:
            remedy = "in /etc/security/limits.conf: * - nofile 65536; then log in again"
        yield found(
            "bad" if limits.nofile < TOO_FEW_FILES else "warn",
            f"a process may open only {limits.nofile} files (ulimit -n), and a rank needs some for each other rank",
            remedy,
        )
    if 0 <= limits.processes < FEW_PROCESSES:
        yield found(
            "bad" if limits.processes < TOO_FEW_PROCESSES else "warn",
            f"only {limits.processes} processes and threads are allowed (ulimit -u, pids.max)",
            "in /etc/security/limits.conf: * - nproc 65536; of a container: --pids-limit -1",
        )
    if limits.infiniband and 0 <= limits.memlock < FEW_LOCKED:
        yield found(
            "bad",
            f"only {size(limits.memlock)} may be locked in memory (ulimit -l), and InfiniBand needs more",
            "in /etc/security/limits.conf: * - memlock unlimited; of a container: --ulimit memlock=-1",
        )
    if limits.cores < min(1.0, limits.all_cores):
        yield found(
            "warn",
            f"its cgroup allows {limits.cores:.2g} of {counted(limits.all_cores, 'core')}",
            "ask for whole cores; of a container: --cpus",
        )


def _folder(place: int, subject: str, what: str, folder: Folder) -> Iterator[Finding]:
    def found(level: Level, text: str, remedy: str) -> Finding:
        return Finding(level, (place,), subject, text, remedy)

    other = {"tmp": "export TMPDIR=FOLDER", "cache": "export XDG_CACHE_HOME=FOLDER"}.get(subject, "")
    if folder.problem:
        way = other or "sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs /dev/shm"
        # The agent finds another place, and few programs need shared memory.
        level: Level = "bad" if subject == "tmp" else "warn"
        yield found(level, f"{folder.path}, {what}, can't be used: {folder.problem}", way)
        return
    if subject == "shm":
        if folder.total < LITTLE_SHARED or folder.free < LITTLE_SHARED:
            least = min(folder.total, folder.free)
            free = "in all" if folder.total < LITTLE_SHARED else "left"
            yield found(
                "bad" if least < TOO_LITTLE_SHARED else "warn",
                f"/dev/shm has {size(least)} {free}; NCCL, MPI and DataLoader workers need it",
                "sudo mount -o remount,size=50% /dev/shm; of a container: --shm-size=8g or --ipc=host"
                if folder.total < LITTLE_SHARED
                else "ls -l /dev/shm, and remove what dead jobs have left",
            )
        return
    if folder.free < LITTLE_SPACE:
        yield found(
            "bad" if folder.free < TOO_LITTLE_SPACE and subject == "tmp" else "warn",
            f"{folder.path}, {what}, has {size(folder.free)} left",
            f"du -xsh {folder.path}/* | sort -h, or {other}",
        )
    if 0 <= folder.inodes < FEW_INODES:
        yield found(
            "bad" if folder.inodes < TOO_FEW_INODES and subject == "tmp" else "warn",
            f"{folder.path}, {what}, has room for {folder.inodes} more files (inodes)",
            f"find {folder.path} -xdev | wc -l, or {other}",
        )
    if folder.noexec and subject == "tmp":
        yield found(
            "warn",
            f"{folder.path}, {what}, is mounted noexec: what torch.compile and extensions build there can't be loaded",
            f"sudo mount -o remount,exec {folder.path}, or {other}",
        )
