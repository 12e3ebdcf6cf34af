"""Names a `file://` store that an earlier job, or attempt, has left: ranks would meet the dead in it and hang.

torch's FileStore removes its file only when every rank has closed it, so a crash leaves it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from launchpad.events import Restarted
from launchpad.job.spec import Target

_STORE = re.compile(r"file://(/[^\s'\"`{}?&,;()<>]+)")

# Of a script, so much is looked through.
_SOURCE_CHARACTERS = 1 << 18


class StaleStores:
    """A sink: looks when it is made, before the ranks start, and before each restart."""

    def __init__(self, target: Target, environ: Iterable[str], say: Callable[[str], None]) -> None:
        """A store's address is looked for in the arguments, in the values of `environ`, and in the script."""
        texts = [*target.args, *environ]
        if target.kind == "script" and os.path.isfile(target.name):
            with open(target.name, errors="replace") as file:
                texts.append(file.read(_SOURCE_CHARACTERS))
        self._paths = list(dict.fromkeys(path for text in texts for path in _STORE.findall(text)))
        self._say = say
        self._look()

    def on(self, event: Any) -> bool:
        """Look again when the ranks are about to start again."""
        if type(event) is Restarted:
            self._look()
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing here waits for time."""

    def close(self) -> None:
        """Nothing is held open."""

    def _look(self) -> None:
        for path in self._paths:
            try:
                found = os.stat(path)
            except OSError:
                continue
            if found.st_size:
                written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
                self._say(
                    f"{path} (a file:// store) is left over from an earlier job, last written {written}: ranks that "
                    "meet in it wait for dead ones; remove it first, or use env://"
                )
