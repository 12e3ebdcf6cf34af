"""Says what a rank waits for as /proc shows it: a child, what a child writes, a lock on a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ... import linux
from ...protocol.events import Awaited
from ..host import processes, procfs

# In /proc/locks: "3: -> FLOCK ADVISORY WRITE 4711 fe:00:2165118 0 EOF", with an arrow if that process waits for it.
_LOCK = re.compile(r"(\d+): (-> )?(?:FLOCK|POSIX|OFDLCK) +\S+ +\S+ +(-?\d+) +\w+:\w+:(\d+) ")

# How far up the family of a process is looked for a rank.
_MOST_PARENTS = 20

_MOST_COMMAND = 60


def awaited(pid: int) -> Awaited:
    """The child that the main thread of a process waits for; {} if it waits for none."""
    name = procfs.wchan(pid)
    call, values = procfs.call(pid)
    try:
        children = procfs.children(pid)
        if name.startswith("do_wait"):
            wanted = values[1 if call == "waitid" else 0] if len(values) > 1 else 0
            found = [wanted] if wanted in children else children
            what = _child(pid, found[0]) if len(found) == 1 else "one of its children"
        elif name.startswith(("pipe_read", "anon_pipe_read")) and values:
            pipe = os.readlink(f"/proc/{pid}/fd/{values[0]}")
            found = [child for child in _family(pid) if _has_open(child, pipe)]
            what = f"the output of {_child(pid, found[0])}" if found else ""
        else:
            return {}
    except (OSError, ValueError):
        return {}
    return {"what": what, "pids": found} if found else {}


def _child(pid: int, child: int) -> str:
    command = _command(child)
    return "its child process" if command == _command(pid) else f"its child `{command}`"


def _command(pid: int) -> str:
    command = processes.name_of(pid) or procfs.executable(pid)
    return command if len(command) <= _MOST_COMMAND else command[:_MOST_COMMAND] + "…"


def _family(pid: int) -> list[int]:
    """Its children, and theirs."""
    found = procfs.children(pid)
    for child in found[:]:
        try:
            found += procfs.children(child)
        except OSError:
            continue
    return found


def _has_open(pid: int, target: str) -> bool:
    return bool(linux.descriptor(pid, (target,)))


def file_lock(pid: int, known: Awaited, ranks: Mapping[int, int]) -> Awaited:
    """The locked file that a process waits for, and who has locked it; {} if there is none. `ranks`: by their pids.

    Programs may also ask for a lock again and again (SQLite, filelock). Then it is that of `known`, or on a file which
    they have open.
    """
    waiting, holders = _locks()
    inode = waiting.get(pid, 0)
    path = known.get("path", "")
    if not inode and path:
        try:
            inode = os.stat(path).st_ino
        except OSError:
            return {}
    files = {} if path or (known and not inode) else _open_files(pid)
    if not inode:
        shared = {pid, *ancestors(pid)}  # who has the lock on a file that it inherited
        inode = next((one for one in files if holders.get(one, pid) not in shared), 0)
    holder = holders.get(inode, 0)
    if not holder or holder == pid:
        return {}
    path = path or files.get(inode, "")
    found: Awaited = {"path": path, "holder": who(holder, ranks)}
    if "what" not in known:
        found["what"] = f"the lock on {path}" if path and pid in waiting else ""
    return found


def _locks() -> tuple[dict[int, int], dict[int, int]]:
    """The file for which each process waits, and who has locked each file; files are inodes."""
    waiting: dict[int, int] = {}
    holders: dict[int, int] = {}
    for line in linux.text_of("/proc/locks").splitlines():
        if (found := _LOCK.match(line)) is not None:
            pid, inode = int(found[3]), int(found[4])
            if found[2]:
                waiting[pid] = inode
            else:
                holders.setdefault(inode, pid)
    return waiting, holders


def _open_files(pid: int) -> dict[int, str]:
    """The paths of the files that a process has open, by inode."""
    found: dict[int, str] = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                found[os.stat(f"/proc/{pid}/fd/{name}").st_ino] = path
    except OSError:  # a descriptor has been closed, or the process is another user's
        pass
    return found


def ancestors(pid: int) -> list[int]:
    """The parent of a process, the parent's, and so on."""
    found: list[int] = []
    while pid > 1 and len(found) < _MOST_PARENTS:
        try:
            pid = int(linux.stat(pid)[1])
        except OSError:
            break
        found.append(pid)
    return found


def who(pid: int, ranks: Mapping[int, int]) -> str:
    """The process in words: that of a rank of this job, of another one, or by its command."""
    for process in (pid, *ancestors(pid)):
        if process in ranks:
            return f"rank {ranks[process]}" + (f"'s process {pid}" if process != pid else f" (pid {pid})")
    variables = linux.text_of(f"/proc/{pid}/environ").split("\0")
    rank = next((one[5:] for one in variables if one.startswith("RANK=")), "")
    of_job = f"rank {rank} of another job, " if rank.isdecimal() else ""
    return f"{of_job}pid {pid} ({_command(pid)})"
