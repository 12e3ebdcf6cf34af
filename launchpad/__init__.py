"""Launchpad: turn one command into N supervised ranks of a distributed program.

Every process of a job imports this file, so it imports nothing heavy itself.
"""

from ._version import __version__

# The other public names, by module; each is imported on first use.
_HOMES = {
    "launchpad.api.run": ("run",),
    "launchpad.api.roles": ("Role",),
    "launchpad.api.ranks": ("Ranks", "ranks"),
    "launchpad.api.results": ("Results",),
    "launchpad.api.magic": ("load_ipython_extension",),
    "launchpad.time_left": ("stop_by",),
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
    "Ranks",
    "RemoteTraceback",
    "Results",
    "Role",
    "UnpicklableError",
    "UsageError",
    "WorldError",
    "__version__",
    "load_ipython_extension",
    "ranks",
    "run",
    "stop_by",
]

TYPE_CHECKING = False  # importing typing would take longer than all of this
if TYPE_CHECKING:
    from launchpad.api.magic import load_ipython_extension
    from launchpad.api.ranks import Ranks, ranks
    from launchpad.api.results import Results
    from launchpad.api.roles import Role
    from launchpad.api.run import run
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
    from launchpad.time_left import stop_by


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
