"""Launchpad: turn one command into N supervised ranks of a distributed program.

This file is imported by every process of a job, so it imports nothing heavy itself.
"""

__version__ = "0.1.0"

# What is public beside it, by module; imported when it is first used.
_HOMES = {
    "launchpad.functions.run": ("run",),
    "launchpad.functions.results": ("Results",),
    "launchpad.errors": (
        "ConnectError",
        "FrontendError",
        "JobTimeout",
        "LaunchpadError",
        "NodeError",
        "RankError",
        "RemoteTraceback",
        "UnpicklableError",
        "UsageError",
        "WorldError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ConnectError",
    "FrontendError",
    "JobTimeout",
    "LaunchpadError",
    "NodeError",
    "RankError",
    "RemoteTraceback",
    "Results",
    "UnpicklableError",
    "UsageError",
    "WorldError",
    "__version__",
    "run",
]

TYPE_CHECKING = False  # typing takes longer to import than this
if TYPE_CHECKING:
    from launchpad.errors import (
        ConnectError,
        FrontendError,
        JobTimeout,
        LaunchpadError,
        NodeError,
        RankError,
        RemoteTraceback,
        UnpicklableError,
        UsageError,
        WorldError,
    )
    from launchpad.functions.results import Results
    from launchpad.functions.run import run


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
