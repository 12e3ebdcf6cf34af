"""MPI is begun by each rank and never before the fork, though mpi4py begins it where its module MPI is imported."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

# False by its value, and no program writes it so.
_HELD = 0


def hold() -> None:
    """From here on importing mpi4py.MPI begins nothing."""
    try:
        rc: Any = __import__("mpi4py").rc
    except Exception:  # there is none, or none that can be imported: who needs it will say so
        return
    if rc.initialize:
        rc.initialize = _HELD


def release() -> None:
    """In a rank: begin MPI, if what was imported before the fork would have done so."""
    rc: Any = getattr(sys.modules.get("mpi4py"), "rc", None)
    if getattr(rc, "initialize", None) is not _HELD:
        return
    rc.initialize = True
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is None or module.Is_initialized():
        return
    if rc.threads:
        module.Init_thread(getattr(module, f"THREAD_{rc.thread_level.upper()}"))
    else:
        module.Init()
