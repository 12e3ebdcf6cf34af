"""Says why a process can't be forked into ranks: it has threads that a fork would not have, or has opened what can't be
shared.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from launchpad.rank import own_process

# Threads of pytest-xdist's connection: a rank never uses it.
_HARMLESS = ("execnet",)

_REMEDY = "do that in the test, or in a fixture that uses `rank`"


def why_not(where: str) -> str:
    """Why forking this process, which `where` names, is unsound, in one sentence; "" if it is sound."""
    if own_process.is_free_threaded():
        return "this Python is free-threaded, which is not known to be safe after a fork"
    if thread := _thread():
        return f"{where} can't be forked: {thread} runs in it; {_REMEDY}"
    try:
        if own_process.holds_gpu():
            return f"{where} can't be forked: CUDA is initialised in it; {_REMEDY}"
    except OSError:
        return f"{where} can't be forked safely: /proc doesn't show whether it has opened the GPU"
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return f"{where} can't be forked: MPI is initialised in it; run pytest with --ranks-backend mpi, or {_REMEDY}"
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is not None and groups.is_initialized():
        return f"{where} can't be forked: it has a process group; {_REMEDY}"
    return ""


def _thread() -> str:
    """A Python thread besides this one, in words; "" if there is none that matters."""
    names = {one.ident: one.name for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
    for number, frame in sys._current_frames().items():
        if number == threading.get_ident():
            continue
        outermost = frame
        while outermost.f_back is not None:
            outermost = outermost.f_back
        if number in names:
            return f"the thread {names[number]!r}"
        if not str(outermost.f_globals.get("__name__", "")).startswith(_HARMLESS):
            return f"a thread that began in {outermost.f_code.co_qualname}"
    return ""
