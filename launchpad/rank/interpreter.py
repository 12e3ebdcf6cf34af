"""Says which interpreter has looked for a module in vain, and why another one may have it."""

from __future__ import annotations

import os
import shutil
import sys


def seeker() -> str:
    """`It was looked for by /usr/bin/python3; VIRTUAL_ENV /gone has no bin/python`."""
    found = [f"It was looked for by {sys.executable}"]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable)
        if folder and not os.access(os.path.join(folder, "bin", "python"), os.X_OK):
            found.append(f"{variable} {folder} has no bin/python")
    python = shutil.which("python")
    if python and os.path.realpath(os.path.dirname(python)) != os.path.realpath(os.path.dirname(sys.executable)):
        found.append(f"`python` is {python}, which --python python takes")
    return "; ".join(found)
