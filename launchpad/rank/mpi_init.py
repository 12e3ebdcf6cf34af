"""Keeps mpi4py from initializing MPI before the fork, which importing mpi4py.MPI normally does."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

# A false value that no program would use, so we can recognise it.
_HELD = 0


def hold() -> None:
    """Keep later imports of mpi4py.MPI from initializing MPI."""
    try:
        rc: Any = __import__("mpi4py").rc
    except Exception:  # missing or broken: whoever needs it will report that
        return
    if rc.initialize:
        rc.initialize = _HELD


def release() -> bool:
    """After the fork: initialize MPI if an import before it would have done so. Returns whether that was done."""
    rc: Any = getattr(sys.modules.get("mpi4py"), "rc", None)
    if getattr(rc, "initialize", None) is not _HELD:
        return False
    rc.initialize = True
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is None or module.Is_initialized():
        return False
    if rc.threads:
        module.Init_thread(getattr(module, f"THREAD_{rc.thread_level.upper()}"))
    else:
        module.Init()
    from . import own_world

    own_world.mark(module)
    return True


def finalize() -> None:
    """Finalize MPI if it was initialized. mpi4py does so only if it began MPI itself, at a full interpreter exit."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
