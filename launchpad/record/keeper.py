"""Keeps checkpoints of a job in its record, and with them where its hosts are (held.json)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Any

from launchpad.output.mark import SinkMark
from launchpad.record import checkpoint, held_hosts, resume_lock
from launchpad.record.checkpoint import Checkpoint
from launchpad.record.held_hosts import HeldHost
from launchpad.transport.held_link import LinkState


class CheckpointKeeper:
    """For one head after the other."""

    def __init__(self, folder: str, settings: Any, before: Checkpoint | None = None) -> None:
        """`folder`: of the record. `settings`: for the next head, as it is; None: there can be none.

        `before`: where the one before us was.
        """
        self.refusal = "" if settings is not None else "its results are for this Python program"
        self._folder = folder
        self._settings = settings
        self._sizes = dict(before.sizes) if before else {}
        self._inside = f"{folder}/", f"{os.path.realpath(folder)}/"

    def hold(self, links: Collection[LinkState]) -> None:
        """Note where ranks would go on without us."""
        held = [HeldHost(one.name, *one.way, one.place, one.secret, one.seconds) for one in links]
        with contextlib.suppress(OSError):  # a full disk: they end by themselves
            held_hosts.write(self._folder, held)

    def save(self, head: bytes, mark: SinkMark) -> None:
        """Keep this instead of the last one. Raises OSError."""
        self._sizes.update(mark.sizes)
        outside = [path for path in mark.sizes if not path.startswith(self._inside)]
        inodes = {path: found for path in outside if (found := checkpoint.inode(path))}
        checkpoint.write(self._folder, Checkpoint(head, self._settings, mark.states, self._sizes, inodes))

    def drop(self) -> None:
        """The last one doesn't count any more."""
        checkpoint.remove(self._folder)

    def close(self) -> None:
        """The job is over."""
        forget(self._folder)


def forget(folder: str) -> None:
    """Nothing of the job with this record goes on anywhere."""
    checkpoint.remove(folder)
    held_hosts.remove(folder)
    resume_lock.remove(folder)
