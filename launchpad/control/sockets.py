"""Where the sockets of running jobs are, and whether whoever listened there is gone.

The folder is in the user's state folder, which several hosts and containers may share, even some with the same
hostname. A socket is therefore named JOB@BOOT.NAMESPACE.PID.START after the launchpad that listens, and is removed only
if that process is certainly gone.
"""

from __future__ import annotations

import os

from launchpad import linux
from launchpad.job.state import state_folder

# Timeouts for a request, and for a response, which may take long: native frames of many ranks.
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 600.0


def folder() -> str:
    """Where the sockets are."""
    return os.path.join(state_folder(os.environ), "running")


def own_name(job: str) -> str:
    """The name of the socket at which this process listens for the job."""
    return f"{job}@{'.'.join((*here(), str(os.getpid()), start_of(os.getpid())))}"


def here() -> tuple[str, str]:
    """The ids of this boot and of our PID namespace; empty if /proc doesn't give them."""
    try:
        return linux.boot_id().replace("-", ""), linux.namespace("pid").strip("pid:[]")
    except OSError:
        return "", ""


def start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if unknown."""
    try:
        return linux.stat(pid)[linux.STARTED] if linux.shows_our_pids() else ""
    except OSError:
        return ""


def is_gone(listener: str) -> bool:
    """Whether the launchpad with this BOOT.NAMESPACE.PID.START is certainly gone."""
    boot, namespace, pid, start = [*listener.split("."), "", "", ""][:4]
    if not (boot and start and pid.isdecimal()) or (boot, namespace) != here():
        return False
    try:
        if linux.is_gone(int(pid)):
            return True
    except OverflowError:
        return False
    return start_of(int(pid)) not in ("", start)
