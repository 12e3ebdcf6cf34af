"""Says once a day, to somebody at a terminal, that `launchpad warm` would have spared this run its imports."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from launchpad.image import place
from launchpad.job.state import state_folder

# An import that takes less is not worth a word.
SECONDS = 1.0

_DAY = 86400.0

_STAMP = "warm-suggested"


def suggestion(preload: Sequence[str], imported: float, environ: Mapping[str, str]) -> str:
    """The sentence, or "". `imported`: how many seconds the ranks waited for the imports."""
    if not preload or imported < SECONDS or not os.isatty(2) or place.exists(environ):
        return ""
    stamp = os.path.join(state_folder(environ), _STAMP)
    try:
        if time.time() - os.stat(stamp).st_mtime < _DAY:
            return ""
    except OSError:  # never said
        pass
    try:
        with open(stamp, "w"):
            pass
    except OSError:  # it would be said each time
        return ""
    what = next((name for name in preload if name != "torch.distributed"), preload[0])
    return f"importing {what} took {imported:.1f} s; after launchpad warm, later runs start without it"
