"""Reads /proc: a process's state, the resources that it and its descendants use, the signals that it catches.

/proc may hide a live process (hidepid, another user's) or lack a file (gVisor): then the answer is "unknown".
"""

from __future__ import annotations

import functools
import os
import signal
from collections import deque
from collections.abc import Iterator

from ... import linux
from . import traffic

_TICKS = os.sysconf("SC_CLK_TCK")

# A flag in /proc/PID/stat (linux/sched.h): the process is exiting, and may have closed its files already.
_PF_EXITING = 0x4

_MOST_SLACK = 4.0

# Kernel functions in which a process waits for a child's end, or for what it writes.
_WAITS_FOR_CHILDREN = ("do_wait", "poll_schedule", "do_poll", "do_select", "ep_poll", "pipe_read", "anon_pipe_read")

# By processor: the numbers and names of the system calls in which a process sleeps for long.
_CALLS = {
    "x86_64": """
        0 read 1 write 7 poll 23 select 34 pause 35 nanosleep 42 connect 43 accept 44 sendto 45 recvfrom 46 sendmsg
        47 recvmsg 61 wait4 72 fcntl 73 flock 74 fsync 202 futex 230 clock_nanosleep 232 epoll_wait 247 waitid
        257 openat 270 pselect6 271 ppoll 281 epoll_pwait 299 recvmmsg""",
    "aarch64": """
        22 epoll_pwait 25 fcntl 32 flock 56 openat 63 read 64 write 72 pselect6 73 ppoll 82 fsync 95 waitid 98 futex
        101 nanosleep 115 clock_nanosleep 202 accept 203 connect 206 sendto 207 recvfrom 211 sendmsg 212 recvmsg
        243 recvmmsg 260 wait4""",
}

# `use` looks at no more than this many processes.
_MAX_PROCESSES = 200


def status(process: int | str) -> dict[str, str]:
    """The lines of /proc/PROCESS/status; empty if the process is gone or hidden."""
    try:
        with open(f"/proc/{process}/status", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def state(pid: int) -> str:
    """The main thread's state, a letter as in proc(5); "X" if the process is gone or exiting, "" if unknown."""
    try:
        fields = linux.stat(pid)
    except OSError:
        return "X" if linux.is_gone(pid) else ""
    return "X" if int(fields[6]) & _PF_EXITING else fields[0]


def executable(pid: int) -> str:
    """The base name of the process's executable; "" if the process is gone or another user's."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def is_dying(pid: int) -> bool:
    """Whether the process is gone, or each of its threads is exiting or will as soon as it is scheduled.

    On a fatal signal, and when one thread exits for all, the kernel queues SIGKILL to each of them. A process whose
    main thread alone has exited lives on.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return linux.is_gone(pid)
    return all(_is_ending(f"{pid}/task/{thread}") for thread in threads)


def _is_ending(thread: str) -> bool:
    try:
        flags = int(linux.stat(thread)[6])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return bool(flags & _PF_EXITING) or has_signal(status(thread), "SigPnd", signal.SIGKILL)


def children(process: int | str) -> list[int]:
    """The process's children, including zombies. Raises OSError."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{process}/task"):
        try:
            with open(f"/proc/{process}/task/{task}/children") as file:
                found += map(int, file.read().split())
        except ProcessLookupError:  # the thread has ended
            continue
    return found


def has_signal(fields: dict[str, str], field: str, signum: int) -> bool:
    """Whether a signal is set in a mask of `status`: SigCgt, SigBlk, ShdPnd …"""
    return bool(int(fields.get(field, "0"), 16) >> (signum - 1) & 1)


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """The processes that descend from one, nearest first, each with its parent; what is gone is left out."""
    todo = deque([pid])
    while todo:
        parent = todo.popleft()
        try:
            found = children(parent)
        except OSError:
            continue
        todo += found
        yield from ((child, parent) for child in found)


def wchan(pid: int) -> str:
    """The kernel function that the main thread sleeps in; "" if it doesn't sleep or the kernel hides it."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            name = file.read()
    except OSError:
        return ""
    return "" if name == "0" else name


def system_call(process: int | str) -> str:
    """The system call that the main thread sleeps in; "" if it doesn't sleep, or the call isn't known."""
    return call(process)[0]


def call(process: int | str) -> tuple[str, list[int]]:
    """The system call that a thread sleeps in, as `system_call`, and what it was given."""
    fields = linux.text_of(f"/proc/{process}/syscall").split()
    name = _names_of_calls().get(fields[0], "") if fields else ""
    return name, [int(field, 16) for field in fields[1:]]


@functools.cache
def _names_of_calls() -> dict[str, str]:
    known = _CALLS.get(os.uname().machine, "").split()
    return dict(zip(known[::2], known[1::2], strict=True))


def maps(pid: int, name: str) -> bool:
    """Whether the process has mapped a file whose path contains `name`."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            return any(name in line for line in file)
    except OSError:
        return False


def waits_for_children(pid: int) -> bool:
    """Whether the main thread may be waiting for a child's end, or for what it writes."""
    return wchan(pid).startswith(_WAITS_FOR_CHILDREN)


def watched_by(pid: int, epoll: int) -> list[int]:
    """The descriptors that the process's epoll descriptor watches. Raises OSError."""
    with open(f"/proc/{pid}/fdinfo/{epoll}") as file:
        return [int(line.split()[1]) for line in file if line.startswith("tfd:")]


def load() -> float:
    """How many threads have wanted a processor in the last minute, on average; 0 if that is not known."""
    try:
        return os.getloadavg()[0]
    except OSError:  # without /proc
        return 0.0


def slack() -> float:
    """How many times as long other processes may take to answer, as more threads want a processor than there are."""
    return min(_MOST_SLACK, max(1.0, load() / (os.cpu_count() or 1)))


def sleep(pid: int) -> str:
    """Identifies the sleep for a given time that the main thread is in; "" if it is in none.

    One that waits for children sleeps if one of them does.
    """
    name = wchan(pid)
    if "nanosleep" in name:
        return f"{pid} {status(pid).get('voluntary_ctxt_switches', '')}"
    if not name.startswith(_WAITS_FOR_CHILDREN):
        return ""
    try:
        return next(filter(None, map(sleep, children(pid)[:_MAX_PROCESSES])), "")
    except OSError:
        return ""


def use(pid: int, sockets: dict[str, traffic.Connection]) -> tuple[float, bool, int]:
    """What a process and its descendants use: CPU seconds, whether a thread is runnable, bytes read and written.

    Seconds and bytes are -1 if /proc doesn't show them for every process. `sockets`: see traffic.py.
    """
    seconds, busy, moved = 0.0, False, 0
    todo, visited = [pid], 0
    while todo and visited < _MAX_PROCESSES:
        process = todo.pop()
        visited += 1
        try:
            fields = linux.stat(process)
            # utime and stime, then the same of children that have been waited for.
            seconds += sum(int(fields[index]) for index in (11, 12, 13, 14)) / _TICKS
            for task in os.listdir(f"/proc/{process}/task"):
                try:
                    busy = busy or linux.stat(f"{process}/task/{task}")[0] == "R"
                except OSError:  # the thread has ended
                    continue
            todo += children(process)
            with open(f"/proc/{process}/io") as file:
                moved += sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
            moved += traffic.of(process, sockets) if sockets else 0
        except OSError:
            if not linux.is_gone(process):
                return -1.0, busy, -1
    return seconds, busy, moved
