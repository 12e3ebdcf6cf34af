"""Finds out who listens on a TCP port of this machine, as far as /proc tells."""

import os

from . import linux

_LISTENS = "0A"


def holder(port: int) -> str:
    """`pid 71, python`; or, if that is not ours to see, `a process of ann`; or ""."""
    sockets = _listening(port)
    for pid in _pids() if sockets else []:
        if linux.descriptor(pid, sockets):
            return f"pid {pid}, {_command(pid)}"
    users = {linux.user_name(uid) or f"user {uid}" for uid in sockets.values()}
    return f"a process of {', '.join(sorted(users))}" if users else ""


def _listening(port: int) -> dict[str, int]:
    """The sockets that listen there, as links of descriptors, with the user id of each."""
    found = {}
    for family in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{family}") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # a kernel without IPv6, or a /proc without it
            continue
        for row in rows:
            if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                found[f"socket:[{row[9]}]"] = int(row[7])
    return found


def _pids() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "gone"
