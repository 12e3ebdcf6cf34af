"""What /proc says of a process, from outside: its state, what it and its children use, which signals it catches."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")

# Of the flags in /proc/PID/stat (linux/sched.h): it has begun to exit, and may have closed its files already.
_PF_EXITING = 0x4

# So many processes below a rank are looked at.
_MOST = 200


def status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status; empty where the process is gone."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def stat(process: int | str) -> list[str]:
    """The fields of /proc/PROCESS/stat from the state on, which proc(5) counts as the third. Raises OSError."""
    with open(f"/proc/{process}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def state(pid: int) -> str:
    """The main thread's state, a letter as in proc(5); "X" where the process is gone, or is about to be."""
    try:
        fields = stat(pid)
        return "X" if int(fields[6]) & _PF_EXITING else fields[0]
    except (OSError, IndexError, ValueError):
        return "X"


def has_signal(fields: dict[str, str], field: str, signum: int) -> bool:
    """Whether a signal stands in SigCgt, ShdPnd … of a status."""
    return bool(int(fields.get(field, "0"), 16) >> (signum - 1) & 1)


def wchan(pid: int) -> str:
    """The function of the kernel in which the main thread sleeps; "" where it doesn't, or the kernel hides it."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            name = file.read()
    except OSError:
        return ""
    return "" if name == "0" else name


def maps(pid: int, name: str) -> bool:
    """Whether the process has loaded a file with this in its path."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            return any(name in line for line in file)
    except OSError:
        return False


def descriptor(pid: int, target: str) -> str:
    """The path, under /proc, of the process's open file that is called so; "" where it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{name}") == target:
                    return f"{folder}/{name}"
            except OSError:  # closed since
                continue
    except OSError:
        pass
    return ""


def use(pid: int) -> tuple[float, bool, int]:
    """Of a process and its descendants: seconds of CPU, whether one runs or is ready to, bytes read and written."""
    seconds, busy, moved = 0.0, False, 0
    todo, seen = [pid], 0
    while todo and seen < _MOST:
        one = todo.pop()
        seen += 1
        try:
            fields = stat(one)
            # Of itself and of children that have been waited for.
            seconds += sum(int(fields[place]) for place in (11, 12, 13, 14)) / _TICKS
            for task in os.listdir(f"/proc/{one}/task"):
                busy = busy or stat(f"{one}/task/{task}")[0] == "R"
                with open(f"/proc/{one}/task/{task}/children") as file:
                    todo += map(int, file.read().split())
            with open(f"/proc/{one}/io") as file:
                moved += sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
        except (OSError, IndexError, ValueError):  # gone, another user's, or a kernel that doesn't tell
            continue
    return seconds, busy, moved
