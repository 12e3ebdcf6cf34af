"""Where the ranks of a job go on if launchpad is killed (--keep-running), for whoever ends them: a private file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from launchpad.protocol.typed import typed
from launchpad.record import checkpoint, files, job_store, liveness


class HeldHost(NamedTuple):
    """A host, the way to it, and what its holder (agent/holder.py) wants to know."""

    name: str
    user: str
    port: int
    python: str
    ssh: str  # --ssh; "" for as it needs it
    ssh_config: str  # --ssh-config; "" for the user's
    here: bool  # it is the machine that launchpad ran on, and is reached without SSH
    place: str
    secret: str
    seconds: float = 0.0  # for as long it is kept without launchpad


class Headless(NamedTuple):
    """A job whose launchpad was killed, and whose ranks go on, or did. Times are in seconds since 1970."""

    job: str
    since: float  # about
    until: float
    hosts: list[str]
    resumable: bool

    @property
    def ended(self) -> bool:
        """Nobody has taken it over in time, so its ranks have ended."""
        return bool(self.hosts) and time.time() > self.until

    def __str__(self) -> str:
        """Since when, and until when."""
        since, until = (_clock_time(at) for at in (self.since, self.until))
        if self.ended:
            return f"without launchpad since {since}; its ranks ended at about {until}"
        what = f"`launchpad stop {self.job}` ends its ranks, or they"
        if self.resumable:
            what = f"`launchpad resume {self.job}` takes it over, or its ranks"
        return f"without launchpad since {since}; {what} end at {until}"


def headless(folder: str) -> Headless | None:
    """What goes on of the job in this folder, if its launchpad is gone; None if that is there, or has ended the job."""
    held = read(folder)
    found = files.status(folder, checkpoint.CHECKPOINT)
    begun = found or files.status(folder, job_store.HELD)
    if begun is None or job_store.state_of(folder) != "over" or liveness.has_ended(folder, job_store.EVENTS):
        return None
    seconds = max((one.seconds for one in held), default=0.0)
    hosts = [one.name for one in held]
    return Headless(os.path.basename(folder), begun.st_mtime, begun.st_mtime + seconds, hosts, found is not None)


def _clock_time(at: float) -> str:
    """With the date, unless that is today's."""
    then = time.localtime(at)
    return time.strftime("%H:%M" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", then)


def write(folder: str, held: Sequence[HeldHost]) -> None:
    """Note these. Raises OSError."""
    fd = os.open(os.path.join(folder, job_store.HELD), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        json.dump(held, file)


def read(folder: str) -> list[HeldHost]:
    """Those of a job; none if it has ended, or has none."""
    try:
        found: list[HeldHost] = typed(list[HeldHost], json.loads(files.read(folder, job_store.HELD)))
        return found
    except (ValueError, TypeError):
        return []


def remove(folder: str) -> None:
    """Nothing goes on without launchpad any more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, job_store.HELD))
