"""Keeps the file that says until when the node's ranks may run: what `launchpad.stop_by` reads."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from ..part import AgentPart
from . import rundir


class TimeLimit(AgentPart):
    """Takes StopBy."""

    def on(self, command: Any) -> None:
        """Replace the file at once, as ranks may be reading it."""
        path = rundir.stop_by_file(self._hub.folder)
        made = f"{path}.new"
        with contextlib.suppress(OSError):  # a full disk must not end the ranks
            if command.seconds is None:
                os.unlink(path)
                return
            with open(made, "w", encoding="ascii") as file:
                file.write(f"{time.time() + command.seconds:.3f}\n")
            os.replace(made, path)
