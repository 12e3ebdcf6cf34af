"""Finds the child process whose death broke a connection of multiprocessing's: a DataLoader worker's, a pool's."""

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

_EXITING = 0x4  # PF_EXITING in include/linux/sched.h


def explain(error: BaseException) -> str:
    """`its child process 4711 was killed by SIGKILL`; "" if none was, or if the connection led elsewhere.

    Nothing is reaped: the program can still wait for its children.
    """
    if not _from_multiprocessing(error):
        return ""
    module: Any = sys.modules["multiprocessing.process"]
    known = getattr(module, "_dangling", ())  # those that the program, or a library, still refers to
    children = [one for one in known if one._parent_pid == os.getpid() and one._popen is not None]
    deadline = time.monotonic() + LONGEST_EXIT
    for child in sorted(children, key=lambda one: one._popen.returncode is not None):  # waited for: ended earlier
        signum = -child._popen.returncode if child._popen.returncode else _signal_of(child.pid, deadline)
        if signum > 0:
            name = signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
            return f"its child process {child.pid} was killed by {name}"
    return ""


def _from_multiprocessing(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "multiprocessing.connection":
            return True
        trace = trace.tb_next
    return False


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
    """Whether the kernel is tearing the process down."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            _state, _, _, _, _, _, flags, *_ = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return bool(int(flags) & _EXITING)
