"""`--events`: a sink that writes all events, including the ranks' output, as JSON lines to a file or to stdout."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.console.writer import Target, Writer
from launchpad.errors import UsageError
from launchpad.protocol.events import STDOUT, ConsoleClosed, LogFailed, Output
from launchpad.record.event_json import line_of, text_line

if TYPE_CHECKING:
    from launchpad.diagnosis.history import History
    from launchpad.diagnosis.verdict import Verdict


class EventLines:
    """A slow reader slows the job down, as at the console. Raises UsageError if the file can't be written."""

    def __init__(self, path: str, post: Callable[[Any], None], *, adds: bool = False) -> None:
        """`path`: "-" or a file, which is truncated unless `adds`."""
        self._path = path
        self._post = post
        self._fd = STDOUT
        if path != "-":
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if adds else os.O_TRUNC), 0o600)
            except OSError as error:
                raise UsageError(f"--events {path}: {error.strerror}; choose a writable file, or -") from None
        self._writer = Writer(post, self._failed)

    def on(self, event: Any) -> bool:
        """Write an event; True if the writer now holds an Output's bytes."""
        if type(event) is Output:
            self._writer.put([(self._fd, text_line(event).encode() + b"\n")], event)
            return True
        line = line_of(event)
        if line is not None:
            self._writer.put([(self._fd, line.encode() + b"\n")])
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.close()
        if self._fd != STDOUT:
            os.close(self._fd)

    def verdict(self, history: History, verdict: Verdict, lines: list[str], earlier: Sequence[str]) -> None:
        """Write the verdict on a failed job: the content of verdict.json, as an event."""
        from launchpad.diagnosis.verdict_json import as_json

        said = {"event": "Verdict", **as_json(history, verdict, lines, earlier)}
        self._writer.put([(self._fd, json.dumps(said).encode() + b"\n")])

    def _failed(self, _: Target, error: OSError) -> None:
        reason = error.strerror or str(error)
        now = time.monotonic_ns()
        self._post(ConsoleClosed(now, reason) if self._path == "-" else LogFailed(now, self._path, reason))
