"""What a job was run with, for its report: the command line, the environment without secrets, versions, the plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from launchpad._version import __version__
from launchpad.job.masking import masked_environ, masked_words
from launchpad.job.plan import Plan
from launchpad.job.user_environment import forwarded
from launchpad.record import files, job_store

# The plan of more ranks is not written out.
MOST_RANKS = 256

_PACKAGES = ("torch", "numpy", "mpi4py")


def circumstances(plan: Plan, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is kept."""
    from launchpad.console.dry_run import in_words

    argv = plan.nodes[0].argv
    given = {name for node in plan.nodes for name in node.environ}  # by --env
    program = os.path.basename(sys.argv[0])
    return {
        "command": masked_words(["launchpad" if program == "__main__.py" else program, *sys.argv[1:]]),
        "environment": masked_environ(dict(sorted(environ.items())), given - forwarded(environ).keys()),
        "versions": {
            "launchpad": __version__,
            "Python of launchpad": "{}.{}.{}".format(*sys.version_info),
            "Linux": os.uname().release,
            **packages_of(argv[0] if plan.nodes[0].python and argv else sys.executable),
        },
        "plan": in_words(_masked(plan)) if len(plan.ranks) <= MOST_RANKS else f"{len(plan.ranks)} ranks",
    }


def _masked(plan: Plan) -> Plan:
    nodes = [
        node._replace(ranks=tuple(rank._replace(argv=tuple(masked_words(rank.argv))) for rank in node.ranks))
        for node in plan.nodes
    ]
    return plan._replace(nodes=tuple(nodes))


def packages_of(python: str) -> dict[str, str]:
    """The versions of the packages that matter, installed beside this interpreter, without running it."""
    found = {}
    lib = os.path.join(os.path.dirname(python), "..", "lib")
    for folder in _names_in(lib):
        for name in _names_in(os.path.join(lib, folder, "site-packages")) if folder.startswith("python3") else ():
            package, _, version = name.partition("-")
            if package in _PACKAGES and version.endswith(".dist-info"):
                found[package] = version.removesuffix(".dist-info")
    return {package: found[package] for package in _PACKAGES if package in found}


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read(folder: str) -> dict[str, Any]:
    """What was kept; empty if nothing was."""
    try:
        said = json.loads(files.read(folder, job_store.CIRCUMSTANCES))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
