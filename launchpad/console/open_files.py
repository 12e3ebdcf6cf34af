"""Opens files for appending, with a limit on how many are open at a time."""

from __future__ import annotations

import os

# Well below the soft limit on descriptors; links to nodes need some too.
MOST_OPEN = 32


class OpenFiles:
    """Descriptors by path. At MOST_OPEN, the least recently used one is closed to open another."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}  # most recently used last

    def descriptor(self, path: str) -> int:
        """The file's descriptor; creates the file if needed. Raises OSError."""
        fd = self._fds.pop(path, None)
        if fd is None:
            while len(self._fds) >= MOST_OPEN:
                self.close(next(iter(self._fds)))
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._fds[path] = fd
        return fd

    def close(self, path: str) -> None:
        """Close the file, if it is open."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close_all(self) -> None:
        """Close all files."""
        for path in list(self._fds):
            self.close(path)
