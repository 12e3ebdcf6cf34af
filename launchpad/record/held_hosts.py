"""Where the ranks of a job go on if launchpad is killed (--keep-running), for whoever ends them: a private file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from launchpad.protocol.typed import typed
from launchpad.record import files

HELD = "held.json"


class HeldHost(NamedTuple):
    """A host, the way to it, and what its holder (agent/holder.py) wants to know."""

    name: str
    user: str
    port: int
    python: str
    ssh: str  # --ssh; "" for as it needs it
    ssh_config: str  # --ssh-config; "" for the user's
    place: str
    secret: str


def write(folder: str, held: Sequence[HeldHost]) -> None:
    """Note these. Raises OSError."""
    fd = os.open(os.path.join(folder, HELD), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(held, file)


def read(folder: str) -> list[HeldHost]:
    """Those of a job; none if it has ended, or has none."""
    try:
        found: list[HeldHost] = typed(list[HeldHost], json.loads(files.read(folder, HELD)))
        return found
    except (ValueError, TypeError):
        return []


def remove(folder: str) -> None:
    """Nothing goes on without launchpad any more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, HELD))
