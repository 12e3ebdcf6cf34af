"""Linux process facts: subreaper, parent-death signal, children, and the sweep that leaves none of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection

from . import facts

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# A process in uninterruptible sleep can't be killed; the sweep does not wait for it for ever.
SWEEP_SECONDS = 10.0

# Python's and torch's helpers go by themselves as soon as the last process that could use them is gone. They remove the
# shared memory and semaphores of a process that died; killed before that, they would leave them in /dev/shm.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
HELPER_SECONDS = 2.0

# Of a command line, so much is shown.
_SHOWN = 60

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant, also of one that called setsid or forked twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends. Call it in the child."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def wakeup_on_exit() -> int:
    """A descriptor that is readable when a child has ended; for a process that waits for other things too."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def children() -> list[int]:
    """The processes whose parent is this process, zombies among them."""
    found: list[int] = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_scan()
    return found


def _children_by_scan() -> list[int]:
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = facts.stat(name)[1]
            except OSError:
                continue
            if int(parent) == me:
                found.append(int(name))
    return found


def name_of(pid: int) -> str:
    """The command line of a process; "" where it has none any more: it is gone, or about to be."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_zombie(pid: int) -> bool:
    """Whether a child is dead and only waits to be reaped."""
    try:
        return facts.stat(pid)[0] in "ZX"
    except OSError:
        return True


def reap(watched: int) -> int | None:
    """Reap every dead child; the exit code of `watched` (-n for signal n) if it was among them."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == watched:
            result = os.waitstatus_to_exitcode(status)


def sweep(reap_children: Callable[[], object], own: Collection[int] = (), spared: Collection[int] = ()) -> list[str]:
    """Kill all descendants. Each kill hands the victim's children to us, a subreaper, so it takes rounds.

    `own` are killed and not named, `spared` are left alone. Returns who was killed, "PID NAME" each. It gives up after
    SWEEP_SECONDS on what can't be killed: processes in uninterruptible sleep.
    """
    start = time.monotonic()
    pause = 0.0005
    killed: dict[int, str] = {}
    while True:
        reap_children()
        left = [pid for pid in children() if pid not in spared]
        waited = time.monotonic() - start
        if not left or waited > SWEEP_SECONDS:
            return [f"{pid} {name if len(name) <= _SHOWN else name[:_SHOWN] + '…'}" for pid, name in killed.items()]
        for pid in left:
            name = name_of(pid)
            leaves = any(helper in name for helper in _HELPERS) and waited < HELPER_SECONDS
            if leaves or is_zombie(pid):
                continue
            if name and pid not in own:
                killed[pid] = name
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
