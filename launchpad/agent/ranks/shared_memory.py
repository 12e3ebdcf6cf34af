"""Removes what killed ranks left in /dev/shm under names with their pids: torch's files, MPICH's worlds of one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

_SHM = "/dev/shm"

# torch: ATen/MapAllocator.cpp; MPICH: a world that nobody has named is named after the pid, in hexadecimal.
_NAMES = r"torch_(?P<decimal>\d+)_\d+_\d+|mpich_(?:shm|vci)_(?P<hexadecimal>[0-9a-f]+)_\d+"

# PROC_PID_INIT_INO in include/linux/proc_ns.h.
_FIRST_NAMESPACE = 4026531836


def remove(pids: Collection[int], since: float) -> None:
    """Remove what these processes, which are gone, have made since then (`time.time()`).

    In a container /dev/shm may be the host's, where a pid may be somebody else's: nothing is done there.
    """
    try:
        if not pids or os.stat("/proc/self/ns/pid").st_ino != _FIRST_NAMESPACE:
            return
        names = os.listdir(_SHM)
    except OSError:
        return
    for name in names:
        found = re.fullmatch(_NAMES, name)
        pid = int(found["decimal"] or int(found["hexadecimal"], 16)) if found else 0
        if pid not in pids or os.path.exists(f"/proc/{pid}"):
            continue
        path = os.path.join(_SHM, name)
        try:
            facts = os.lstat(path)
            if facts.st_uid == os.getuid() and facts.st_ctime >= since:
                os.unlink(path)
        except OSError:
            pass
