"""Says which file system had no room for what a rank wrote: a disk, or /dev/shm, which has 64 MB in most containers."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

SHM = "/dev/shm"  # also what torch and MPI write to

# A file system with less room than this share of it is full: the last piece may have been too large for the rest.
FULL = 0.05

# A bus error may have other reasons than a /dev/shm that is larger.
SMALL_BYTES = 256 << 20

# Compiled on first use: few ranks fail like this.
_NO_SPACE = r"No space left on device|PytorchStreamWriter failed writing"
_NO_SHARED_MEMORY = r"shared memory|</torch_"
_BUS_ERROR = r"SIGBUS|out of shared memory"
_PATH = r"'(/[^']+)'"

_REMEDY = "; docker run --shm-size gives a container more"


def explain(traceback: dict[str, Any], cwd: str) -> None:
    """If the recorded exception, or one that it is due to, says that there was no room, add where.

    `cwd`: the ranks' folder.
    """
    link: Any = traceback
    while isinstance(link, dict):
        why = str(link.get("why", ""))
        if found := _meant(f"{why} {link.get('message')}", cwd):
            link["why"] = "; ".join(filter(None, (why, found)))
        link = link.get("cause") or link.get("context")


def explain_exit(code: int) -> str:
    """Why a rank, or the command that a shell ran in it, died of a bus error, if that is clear; else ""."""
    return _shared_memory() if code in (-signal.SIGBUS, 128 + signal.SIGBUS) else ""


def _meant(message: str, cwd: str) -> str:
    if re.search(_BUS_ERROR, message):
        return _shared_memory()
    if not re.search(_NO_SPACE, message):
        return ""
    if re.search(_NO_SHARED_MEMORY, message):
        return _told(SHM)
    if named := re.search(_PATH, message):
        return _told(os.path.dirname(named[1]))
    full = (place for place in (SHM, os.environ.get("TMPDIR", "/tmp"), cwd) if _is_full(place))
    return next(map(_told, full), "") or _shared_memory()


def _shared_memory() -> str:
    """That /dev/shm is the reason, if it is full or small."""
    total, _ = _room(SHM)
    return _told(SHM) if _is_full(SHM) or 0 < total <= SMALL_BYTES else ""


def _told(place: str) -> str:
    """What there is in the file system at this place, in words; "" if it can't be seen."""
    total, free = _room(place)
    if not total:
        return ""
    remedy = _REMEDY if place.startswith(SHM) else ""
    if _is_full(place):
        return f"{place} is full ({_size(total)}, {_size(free)} free{remedy})"
    return f"{place} has only {_size(total)} ({_size(free)} free now{remedy})"


def _is_full(place: str) -> bool:
    total, free = _room(place)
    return free < FULL * total


def _room(place: str) -> tuple[int, int]:
    """How many bytes the file system has, and how many of them are free for us; 0 and 0 if that can't be seen."""
    try:
        found = os.statvfs(place)
    except (OSError, ValueError):  # a path with a null byte
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
