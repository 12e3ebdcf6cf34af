"""Says that --sync-env would have helped a rank on another host that did not find a module."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launchpad.diagnosis.verdict import Verdict

# Whether an interpreter has a package, besides what is in the folder where it was started.
_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"

_SECONDS = 5.0


def missing_module(verdict: Verdict) -> str:
    """The package that the first failed rank did not find; "" if that was not it."""
    traceback = verdict.cause.traceback if verdict.cause is not None else None
    if traceback is None or traceback.roots[0].type != "ModuleNotFoundError":
        return ""
    found = re.match(r"No module named '(\w+)", traceback.roots[0].message)
    return found[1] if found else ""


def advice(package: str, python: str, host: str) -> str:
    """What to do if this machine's interpreter has the package that the host lacks; "" if it hasn't."""
    path = shutil.which(python)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, "-c", _HAS, package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    return f"{path} has {package} on this machine: --sync-env gives {host} this environment"
