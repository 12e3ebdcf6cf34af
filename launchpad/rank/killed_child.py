"""Knows which child processes of this rank were killed by a signal: DataLoader workers, those of pools, commands.

Whoever waits for a child takes its exit status away, and may keep it to himself. multiprocessing's own list of children
tells us when it drops one; what subprocess has waited for is in its Popen; the others can be looked at as zombies.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds. Between the moment at which the kernel closes a process's files and the one at which it can be waited for.
LONGEST_EXIT = 1.0

# So many of the children that multiprocessing has dropped are remembered: a pool may replace its workers for ever.
MOST_NOTED = 64

_EXITING = 0x4  # PF_EXITING in include/linux/sched.h

# Signals that ask for an end: libraries send them to the other children when one has died.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# What pools raise when a worker is gone.
_BROKEN_POOLS = ("BrokenProcessPool", "TerminatedWorkerError")

_noted: list[tuple[int, int]] = []  # (pid, signal)


class _Children(set):  # type: ignore[type-arg]  # evaluated when it is run
    """multiprocessing's set of children, from which it discards those that it has waited for."""

    def discard(self, child: Any, /) -> None:
        popen: Any = getattr(child, "_popen", None)
        code = getattr(popen, "returncode", None)
        if isinstance(code, int) and code < 0 and child in self:
            _noted.append((popen.pid, -code))
            del _noted[:-MOST_NOTED]
        super().discard(child)


def install() -> bool:
    """Begin to note multiprocessing's children, if it is imported. Returns whether it is."""
    module: Any = sys.modules.get("multiprocessing.process")
    children = getattr(module, "_children", None)
    if not isinstance(children, set):
        return False
    if not isinstance(children, _Children):
        module._children = _Children(children)
    return True


def explain(error: BaseException) -> str:
    """`its child process 4711 was killed by SIGKILL`, if the exception says that a child is gone, and one was; else "".

    Nothing is reaped: the program can still wait for its children.
    """
    if not _misses_a_child(error):
        return ""
    killed = sorted(_killed(), key=lambda one: one[1] in _REQUESTS)
    if not killed:
        return ""
    pid, signum = killed[0]
    return f"its child process {pid} was killed by {_name(signum)}"


def by_sigkill() -> int:
    """The last child that was killed by SIGKILL, as the kernel does when memory runs out; 0 if none was."""
    return next((pid for pid, signum in reversed(_killed()) if signum == signal.SIGKILL), 0)


def last_noted() -> str:
    """`4711 was killed by SIGKILL`, of the last child that its module has waited for and that nobody asked to end."""
    killed = next((one for one in reversed(_noted) if one[1] not in _REQUESTS), None)
    return f"{killed[0]} was killed by {_name(killed[1])}" if killed is not None else ""


def _name(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def _misses_a_child(error: BaseException) -> bool:
    if type(error).__name__ in _BROKEN_POOLS:
        return True
    lost = isinstance(error, EOFError | ConnectionError)
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        if lost and module == "multiprocessing.connection":
            return True
        if module == "torch.utils.data.dataloader" and "exited unexpectedly" in str(error):
            return True
        trace = trace.tb_next
    return False


def _killed() -> list[tuple[int, int]]:
    """(pid, signal) of those that are known to have been killed: first those that were waited for."""
    found = dict(_noted)
    deadline = time.monotonic() + LONGEST_EXIT
    for one in [*_of_multiprocessing(deadline), *_commands()]:
        if one.returncode and one.returncode < 0:
            found[one.pid] = -one.returncode
    for pid in _children():
        signum = _signal_of(pid, deadline)
        if signum:
            found[pid] = signum
    return list(found.items())


def _of_multiprocessing(deadline: float) -> list[Any]:
    """The Popen objects of multiprocessing's children. Its forkserver has the status of those that it forked."""
    module: Any = sys.modules.get("multiprocessing.process")
    found = [popen for child in list(getattr(module, "_children", ())) if (popen := child._popen) is not None]
    for popen in found:
        while popen.method == "forkserver" and popen.poll() is None and time.monotonic() < deadline:
            if not _is_exiting(popen.pid):
                break
            time.sleep(0.001)
    return found


def _commands() -> list[Any]:
    """The program's subprocess.Popen objects."""
    subprocess: Any = sys.modules.get("subprocess")
    if subprocess is None:
        return []
    import gc

    # Not isinstance, which would run the code of objects that stand for others.
    return [one for one in gc.get_objects() if issubclass(type(one), subprocess.Popen)]


def _children() -> list[int]:
    """This process's children, including zombies; none if /proc can't show them."""
    found: list[int] = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        pass
    return found


def _signal_of(pid: int, deadline: float) -> int:
    """The signal that killed this child; 0 if it still runs, or ended otherwise."""
    while True:
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # waited for
            return 0
        if end is not None:
            return 0 if end.si_code == os.CLD_EXITED else end.si_status
        if not _is_exiting(pid) or time.monotonic() >= deadline:
            return 0
        time.sleep(0.001)


def _is_exiting(pid: int) -> bool:
    """Whether the kernel is tearing the process down, or has done so."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            _state, _, _, _, _, _, flags, *_ = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return bool(int(flags) & _EXITING)
