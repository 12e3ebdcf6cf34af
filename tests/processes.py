"""Finds processes by a variable that they have inherited. Tests do so often, also while they wait."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator


def with_variable(name: str, value: object) -> Iterator[int]:
    """The processes that have this in their environment."""
    wanted = os.fsencode(f"{name}={value}")
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb", buffering=0) as file:
                environ = file.readall()
        except OSError:
            continue
        if wanted in environ and wanted in environ.split(b"\0"):
            yield int(entry)


def stacks(pids: Iterable[int]) -> str:
    """What these processes do, for a test that waits in vain: what py-spy says of each."""
    found = []
    for pid in pids:
        spied = subprocess.run(["py-spy", "dump", "-p", str(pid)], capture_output=True, text=True, timeout=20)
        found.append(f"{pid}: {spied.stdout}{spied.stderr}")
    return "\n".join(found)
