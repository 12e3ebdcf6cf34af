"""Runs py-spy, with a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from ..poll import Poll

_MAX_CHARACTERS = 30_000


def find() -> str | None:
    """The path of py-spy: on the PATH, or beside the interpreter."""
    for folder in (*os.get_exec_path(), os.path.dirname(sys.executable)):
        path = os.path.join(folder, "py-spy")
        if os.access(path, os.X_OK):
            return path
    return None


class Spy:
    """One py-spy. `report` is called once with its output, unless `end` comes first."""

    def __init__(self, poll: Poll, argv: list[str], seconds: float, report: Callable[[str], None]) -> None:
        """It may take so many seconds. Raises OSError if it can't be started."""
        self._poll = poll
        self._seconds = seconds
        self._report = report
        self._chunks: list[bytes] = []
        self._output, writer = os.pipe()
        try:
            self.pid = os.posix_spawn(
                argv[0],
                argv,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writer, 1),
                    (os.POSIX_SPAWN_DUP2, writer, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE],  # which Python ignores
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(writer)
        self.deadline = time.monotonic() + seconds
        poll.watch(self._output, lambda _: self._read())

    def _read(self) -> None:
        self._chunks.append(os.read(self._output, 1 << 16))
        if not self._chunks[-1]:
            self._close()
            self._report(b"".join(self._chunks).decode(errors="replace")[:_MAX_CHARACTERS])

    def _close(self) -> None:
        self._poll.unwatch(self._output)
        os.close(self._output)

    def tick(self, now: float) -> None:
        """End it if its deadline has passed."""
        if now >= self.deadline:
            self.end()
            self._report(f"py-spy did not finish within {self._seconds:g} s")

    def end(self) -> None:
        """Kill it. A process that it had stopped continues then."""
        self._close()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has exited by itself
            pass
