"""Notes what imports look at: the variables that they read, and the modules that they ask for.

It runs where the ranks' imports do, so it imports nothing that an interpreter has not loaded anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# Stands for the whole environment.
ALL = "*"


class Seen:
    """What was read and asked for between `begin` and `end`."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self.modules: set[str] = set()  # top-level names, found or not
        self._environ: Any = type(os.environ)
        self._getitem, self._iter = self._environ.__getitem__, self._environ.__iter__

    def begin(self) -> None:
        """Start to note."""

        def getitem(environ: Any, name: Any) -> Any:
            # A plain str, whatever subclass of str it is.
            self.variables.add(os.fsdecode(os.fsencode(name)) if isinstance(name, str | bytes) else ALL)
            return self._getitem(environ, name)

        def iterate(environ: Any) -> Iterator[Any]:
            self.variables.add(ALL)
            return self._iter(environ)

        self._environ.__getitem__, self._environ.__iter__ = getitem, iterate
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Leave everything as it was before."""
        self._environ.__getitem__, self._environ.__iter__ = self._getitem, self._iter
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Find nothing, as a finder that is asked first."""
        self.modules.add(name.partition(".")[0])
