"""Detects tracers and preloaded libraries that watch this process and would miss what its forks do."""

from __future__ import annotations

import os
import sys

# Number of tool ids in PEP 669.
_MOST_TOOLS = 6

# Allocators and runtimes that are preloaded for speed and work in forks too.
_HARMLESS = ("libjemalloc", "libtcmalloc", "libmimalloc", "libiomp5", "libomp", "libgomp", "libstdc++", "libgcc_s")


def by() -> str:
    """Describe what watches this process; "" for nothing."""
    if sys.gettrace() or sys.getprofile():
        return "a tracer or profiler has been running since the interpreter started"
    tool = _tool()
    if tool:
        return f"{tool} watches the interpreter (sys.monitoring)"
    library = _preloaded(os.environ.get("LD_PRELOAD", ""))
    if library:
        return f"{library} is in LD_PRELOAD, and may do work at the start and end of each process"
    return ""


def _tool() -> str:
    """The first tool registered with sys.monitoring."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12
    if monitoring is None:
        return ""
    return next((str(name) for name in map(monitoring.get_tool, range(_MOST_TOOLS)) if name is not None), "")


def _preloaded(libraries: str) -> str:
    """The first preloaded library that isn't known to be harmless."""
    names = [os.path.basename(path) for path in libraries.replace(":", " ").split()]
    return next((name for name in names if not name.startswith(_HARMLESS)), "")
