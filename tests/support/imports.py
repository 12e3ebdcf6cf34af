"""What an interpreter has loaded."""

from __future__ import annotations

import json
import subprocess
import sys


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    show = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))
