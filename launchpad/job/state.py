"""Where launchpad keeps what outlives a command, as the XDG Base Directory Specification has it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def state_folder(environ: Mapping[str, str]) -> str:
    """$XDG_STATE_HOME/launchpad, by default ~/.local/state/launchpad; a relative path there counts as none."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "launchpad")
