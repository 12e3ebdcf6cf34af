"""Tells whether a recorded job is still running: by the lock on its record or, failing that, by its process.

A running launchpad holds a lock on its job's events.jsonl. Some file systems have no locks, and some shared ones have
locks for each host separately. So the first event also identifies launchpad's process, even if its pid is reused.
"""

import fcntl
import os
from collections.abc import Callable
from typing import BinaryIO, Literal

from launchpad import linux
from launchpad.named import NamedTuple
from launchpad.protocol.events import JobOver, JobPlanned
from launchpad.record import files
from launchpad.record.event_lines import event_of

State = Literal["running", "over", "unknown"]
Lock = Literal["held", "free", "none"]

# The last event of a finished job fits into this.
_LAST_BYTES = 1024

# psutil's start times include the boot time, which the kernel gives in whole seconds.
_DOUBT_SECONDS = 2.0


class HeadProcess(NamedTuple):
    """What identifies a head together with its pid, even if that is reused later."""

    host: str
    boot: str  # the kernel's id of the current boot
    pids: str  # the PID namespace
    born: float  # when the process started, in seconds since boot


def own_process() -> HeadProcess:
    """The identity of this process."""
    try:
        born = int(linux.stat("self")[linux.STARTED]) / os.sysconf("SC_CLK_TCK")
        return HeadProcess(os.uname().nodename, linux.boot_id(), linux.namespace("pid"), born)
    except OSError:  # without a usable /proc nobody can tell whether we are alive
        return HeadProcess("", "", "", 0.0)


def state_of(folder: str, name: str) -> State:
    """The state of the job whose events are in this file of its folder."""
    try:
        file = files.open_file(folder, name)
    except (OSError, files.Unreadable):
        return "over"
    with file:
        lock = _lock(file.fileno())
        if lock == "held":
            return "running"
        planned = event_of(file.readline(files.MOST_BYTES))
        over = _is_over(file)
    return judge(lock, planned if isinstance(planned, JobPlanned) else None, over, own_process(), lives)


def has_ended(folder: str, name: str) -> bool:
    """Whether the events in this file of a job's folder end with a JobOver."""
    try:
        with files.open_file(folder, name) as file:
            return _is_over(file)
    except (OSError, files.Unreadable):
        return True


def _is_over(file: BinaryIO) -> bool:
    file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
    return isinstance(event_of(file.read().rstrip(b"\n").rpartition(b"\n")[2]), JobOver)


def judge(
    lock: Lock, planned: JobPlanned | None, over: bool, here: HeadProcess, lives: Callable[[JobPlanned], bool]
) -> State:
    """`planned`: the first event of the record; `over`: whether it ends with a JobOver; `here`: the asking process."""
    if lock == "held":
        return "running"
    if over or planned is None:
        return "over"
    if not planned.boot:  # recorded by an older launchpad
        return "over" if lock == "free" else "unknown"
    if planned.boot != here.boot:
        # A free lock proves nothing: it may be local to this host.
        return "over" if planned.host == here.host else "unknown"
    if lock == "free":
        return "over"
    if not is_visible(planned, here):
        return "unknown"
    return "running" if lives(planned) else "over"


def is_visible(planned: JobPlanned, here: HeadProcess) -> bool:
    """Whether we could see the job's launchpad among our processes."""
    return (planned.boot, planned.pids) == (here.boot, here.pids)


def lives(planned: JobPlanned) -> bool:
    """Whether this very process exists, and is not a zombie."""
    import psutil  # takes 20 ms

    try:
        process = psutil.Process(planned.pid)
        born = process.create_time() - psutil.boot_time()
        return process.status() != psutil.STATUS_ZOMBIE and abs(born - planned.born) < _DOUBT_SECONDS
    except psutil.Error:  # gone, or another user's
        return False


def _lock(fd: int) -> Lock:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:
        return "none"
    return "free"
