"""Where launchpad keeps state that outlives a command, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from collections.abc import Mapping


def state_folder(environ: Mapping[str, str]) -> str:
    """$XDG_STATE_HOME/launchpad, by default ~/.local/state/launchpad; a relative XDG_STATE_HOME is ignored."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "launchpad")
