"""Finds out which process has a TCP port that a rank wanted to listen on."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from . import procfs

# Compiled on first use: few ranks fail like this.
_IN_USE = r"EADDRINUSE|[Aa]ddress already in use"
# As torch, asyncio and others name the port.
_PORT = r"\bport[:= ]+(\d+)|\('[^']*', (\d+)[,)]|:(\d{2,5})\b"
_LISTENS = "0A"

# All ranks may fail on the same port, one soon after the other: what was found holds for so many seconds.
FOUND_HOLDS = 2.0

_found: dict[int, tuple[float, str]] = {}  # by port: until when it holds


def explain(traceback: dict[str, Any]) -> None:
    """If the recorded exception, or one that it is due to, says that a port is taken, add who has it."""
    link: Any = traceback
    while isinstance(link, dict):
        message = str(link.get("message"))
        if re.search(_IN_USE, message) and (named := re.search(_PORT, message)):
            link["why"] = taken(int(named[1] or named[2] or named[3]))
        link = link.get("cause") or link.get("context")


def taken(port: int) -> str:
    """That the port is taken, and by whom as far as we may know."""
    until, text = _found.get(port, (0.0, ""))
    if time.monotonic() >= until:
        text = _look_up(port)
        _found[port] = time.monotonic() + FOUND_HOLDS, text
    return text


def _look_up(port: int) -> str:
    sockets = _listening(port)
    for pid in _pids():
        if any(procfs.descriptor(pid, link) for link in sockets):
            return f"the port {port} is taken (by pid {pid}, {procfs.status(pid).get('Name', 'gone')})"
    users = {_name(uid) for uid in sockets.values()}
    return f"the port {port} is taken" + (f" (by a process of {', '.join(sorted(users))})" if users else "")


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


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
