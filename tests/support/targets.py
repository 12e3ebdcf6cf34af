"""What a target shows of itself."""

from __future__ import annotations

import json


def shown(stdout: str) -> dict[int, dict[str, object]]:
    """What show_env.py printed, by rank."""
    found = {}
    for line in stdout.splitlines():
        prefix, _, text = line.partition("] ")
        found[int(prefix.strip("[ "))] = json.loads(text)
    return found
