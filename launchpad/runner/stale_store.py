"""Warns about a `file://` store that an earlier job or attempt left behind: ranks that use it would hang.

torch's FileStore removes its file only after every rank has closed it, so a crash leaves it behind. Ranks that find it
wait for the dead ranks in it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from launchpad.job.spec import Target
from launchpad.protocol.events import Restarted

_STORE = r"file://(/[^\s'\"`{}?&,;()<>]+)"

# How much of a script is searched.
_SOURCE_CHARACTERS = 1 << 18


class StaleStores:
    """A sink. It checks when it is created, before the ranks start, and before each restart."""

    def __init__(self, target: Target, environ: Iterable[str], say: Callable[[str], None]) -> None:
        """Stores are looked for in the arguments, in `environ` (values of variables), and in the script."""
        texts = [*target.args, *environ]
        if target.kind == "script" and os.path.isfile(target.name):
            with open(target.name, errors="replace") as file:
                texts.append(file.read(_SOURCE_CHARACTERS))
        self._paths = list(
            dict.fromkeys(path for text in texts if "file://" in text for path in re.findall(_STORE, text))
        )
        self._say = say
        self._check()

    def on(self, event: Any) -> bool:
        """Check again before a restart."""
        if type(event) is Restarted:
            self._check()
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """There are no deadlines."""

    def close(self) -> None:
        """There is nothing to close."""

    def _check(self) -> None:
        for path in self._paths:
            try:
                found = os.stat(path)
            except OSError:
                continue
            if found.st_size:
                written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
                self._say(
                    f"{path} (a file:// store) is left over from an earlier job (last written {written}): ranks that "
                    "use it would wait for dead ranks; remove it first, or use env://"
                )
