"""Finds processes by a variable that they have inherited. Tests do so often, also while they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


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
    tool = Path(sys.executable).with_name("py-spy")  # which need not be in PATH
    found = []
    for pid in pids:
        try:
            spied = subprocess.run([tool, "dump", "-p", str(pid)], capture_output=True, text=True, timeout=20)
            found.append(f"{pid}: {spied.stdout}{spied.stderr}")
        except (OSError, subprocess.TimeoutExpired) as error:
            found.append(f"{pid}: {error}")
    return "\n".join(found)
