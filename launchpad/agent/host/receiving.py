"""Tells which threads wait for data from a UNIX or UDP socket, and how often each has been woken.

The kernel counts no bytes for these sockets. But a thread that receives sleeps and is woken for each piece of data, and
one whose data never comes is not: its count of voluntary context switches tells.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Mapping

from . import procfs, traffic

_RECEIVES = ("recvfrom", "recvmsg", "recvmmsg")
_POLLIN = 1

_POLLED = struct.Struct("=ihh")  # struct pollfd
_TIME = struct.Struct("=qq")  # struct timespec

# No more processes and threads are looked at.
_MAX_PROCESSES = 200
_MAX_THREADS = 1000
# No more are told of.
MAX_WAITS = 100

# [thread, descriptor, how often it was woken, seconds after which it wakes by itself; 0: never]
Wait = tuple[int, int, int, float]


def waits(pid: int, counted: Mapping[str, object], own: int) -> list[Wait]:
    """Those of a process and its descendants.

    `counted`: sockets whose bytes are known (traffic.py). `own`: a thread that waits for our requests.
    """
    found: list[Wait] = []
    family = itertools.chain([pid], (child for child, _ in procfs.descendants(pid)))
    for process in itertools.islice(family, _MAX_PROCESSES):
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
        except OSError:  # it is gone
            continue
        found += (wait for thread in threads[:_MAX_THREADS] if thread != own for wait in _of(process, thread, counted))
        if len(found) >= MAX_WAITS:
            break
    return found[:MAX_WAITS]


def _of(process: int, thread: int, counted: Mapping[str, object]) -> Iterator[Wait]:
    """The wait that a thread is in, if it is one for such a socket."""
    try:
        descriptor, patience = waits_for(process, thread)
        if descriptor >= 0:
            link = os.readlink(f"/proc/{process}/fd/{descriptor}")
            if link.startswith("socket:") and link not in counted:
                yield thread, descriptor, _wakes(f"{process}/task/{thread}"), patience
    except (OSError, ValueError):  # it is gone, or hidden
        pass


def waits_for(process: int, thread: int) -> tuple[int, float]:
    """The descriptor from which a thread wants to read, -1 for none, and after how many seconds it gives up; 0: never.

    Raises OSError, ValueError.
    """
    name, values = procfs.call(f"{process}/task/{thread}")
    if name in _RECEIVES:
        return values[0], 0.0
    if name not in ("poll", "ppoll") or values[1] != 1:  # of several, nobody knows which has woken it
        return -1, 0.0
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        descriptor, events, _ = _POLLED.unpack(os.pread(memory.fileno(), _POLLED.size, values[0]))
        patience = 0.0
        if name == "poll":
            patience = max(0, struct.unpack("=i", struct.pack("=I", values[2] & 0xFFFFFFFF))[0]) / 1000
        elif values[2]:
            seconds, nanoseconds = _TIME.unpack(os.pread(memory.fileno(), _TIME.size, values[2]))
            patience = seconds + nanoseconds / 1e9
    return (descriptor if events & _POLLIN else -1), patience


def reads_port(pid: int, sockets: Mapping[str, traffic.Connection]) -> int:
    """The port at the other end of the TCP connection whose data the main thread waits for; 0 if it doesn't.

    Nor if it has children, which might do something meanwhile.
    """
    try:
        descriptor, _ = waits_for(pid, pid)
        link = os.readlink(f"/proc/{pid}/fd/{descriptor}") if descriptor >= 0 and not procfs.children(pid) else ""
    except (OSError, ValueError):  # it is gone, or hidden
        return 0
    return sockets[link].port if link in sockets else 0


def _wakes(task: str) -> int:
    return int(procfs.status(task)["voluntary_ctxt_switches"])
