"""Says from which process of this machine a rank waits for data over TCP: a server that hangs, or was stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ... import linux
from ...protocol.events import Awaited
from ..host import procfs, receiving
from .outside import ancestors, who

_LISTENS = "0A"

# The rank's own launchpad, and what that runs besides ranks, are not what it waits for.
_OURS = 3


class Socket(NamedTuple):
    """A line of /proc/net/tcp."""

    here: str  # address and port in hex
    there: str
    state: str
    link: str  # as the target of a descriptor


def awaited(pid: int, ranks: Mapping[int, int]) -> Awaited:
    """The process that the main thread waits for data from; {} if it is no other one here. `ranks`: by their pids."""
    try:
        descriptor, _ = receiving.waits_for(pid, pid)
        link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except (OSError, ValueError):
        return {}
    sockets = _sockets(pid)
    wanted = other_end(sockets, link)
    server = next((one for one in _pids() if linux.descriptor(one, (wanted,))), 0) if wanted else 0
    ours = ancestors(pid)[:_OURS]
    if not server or server in ranks or server == pid or {server, *ancestors(server)[:1]} & {*ours}:
        return {}
    stopped = ", which is stopped by a signal" if procfs.state(server) == "T" else ""
    return {"server": f"{who(server, ranks)}{stopped}"}


def other_end(sockets: list[Socket], link: str) -> str:
    """The socket that one is connected to, or of whoever has not accepted that yet; "" if it is not here."""
    mine = next((one for one in sockets if one.link == link and one.state != _LISTENS), None)
    if mine is None:
        return ""
    for one in sockets:
        if (one.here, one.there) == (mine.there, mine.here) and one.link != "socket:[0]":
            return one.link
    if not any((one.here, one.there) == (mine.there, mine.here) for one in sockets):
        return ""
    port = mine.there.rpartition(":")[2]
    return next((one.link for one in sockets if one.state == _LISTENS and one.here.endswith(f":{port}")), "")


def _sockets(pid: int) -> list[Socket]:
    """Those of the process's network; addresses of IPv4 look the same in both tables."""
    found = []
    for family in ("tcp", "tcp6"):
        for line in linux.text_of(f"/proc/{pid}/net/{family}").splitlines()[1:]:
            row = line.split()
            here, there = (one.removeprefix("0000000000000000FFFF0000") for one in row[1:3])
            found.append(Socket(here, there, row[3], f"socket:[{row[9]}]"))
    return found


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
