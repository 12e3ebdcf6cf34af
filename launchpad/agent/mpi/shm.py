"""Removes what MPI ranks left in /dev/shm. What MPICH left is found by the name of their world, which is unique.

The names are kept in the job's private directory, so that the guard finds them if the agent is gone.
"""

from __future__ import annotations

import os

from ..ranks import rundir

_SHM = "/dev/shm"
_MARK = "mpi-"

# MPICH: mpich_shm_WORLD_NODE and mpich_vci_WORLD_NODE (src/mpid/ch4/shm/posix/posix_init.c).
_KINDS = ("shm", "vci")


def open_mpis(folder: str) -> str:
    """Where this node's ranks of Open MPI put their shared memory; `folder` is the job's."""
    return os.path.join(_SHM, f"{os.path.basename(folder)}.mpi")


def remember(folder: str, name: str) -> None:
    """Record that a world of this name is about to start."""
    try:
        os.close(os.open(os.path.join(folder, _MARK + name), os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:  # a full disk must not prevent the run
        pass


def remove(folder: str) -> None:
    """Remove what the remembered worlds have left. None of their processes may be alive."""
    try:
        marks = [name for name in os.listdir(folder) if name.startswith(_MARK)]
        worlds = {f"{world_id(name.removeprefix(_MARK)):x}" for name in marks}
        left = os.listdir(_SHM) if worlds else []
    except OSError:
        return
    doomed = [os.path.join(folder, name) for name in marks]
    doomed += [os.path.join(_SHM, name) for name in left if _world_of(name) in worlds]
    for path in doomed:
        try:
            if os.lstat(path).st_uid == os.getuid():
                os.unlink(path)
        except OSError:
            pass
    rundir.remove(open_mpis(folder))


def _world_of(name: str) -> str:
    words = name.split("_")
    ours = len(words) == 4 and words[0] == "mpich" and words[1] in _KINDS and words[3].isdecimal()
    return words[2] if ours else ""


def world_id(name: str) -> int:
    """MPICH's number for a world of this name: 32-bit FNV-1a (HASH_FNV of src/mpl/include/mpl_uthash.h)."""
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value
