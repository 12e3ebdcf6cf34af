"""`--events`: a sink that writes each event as a line of JSON, the ranks' output among them, to a file or to stdout."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.errors import UsageError
from launchpad.events import STDOUT, ConsoleClosed, LogFailed, Output
from launchpad.report.records import line_of, text_line
from launchpad.report.writer import Writer

if TYPE_CHECKING:
    from launchpad.report.story import Story
    from launchpad.report.verdict import Verdict


class EventLines:
    """Its reader is waited for, as the console's is. Raises UsageError where the file can't be written."""

    def __init__(self, path: str, post: Callable[[Any], None], *, adds: bool = False) -> None:
        """`path` is "-", or a file, which begins anew unless this `adds` to it."""
        self._path = path
        self._post = post
        self._fd = STDOUT
        if path != "-":
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if adds else os.O_TRUNC), 0o600)
            except OSError as error:
                raise UsageError(f"--events {path}: {error.strerror}; name a file that can be written, or -") from None
        self._writer = Writer(post, self._failed)

    def on(self, event: Any) -> bool:
        """Write an event; True where an Output's bytes were given to the writer."""
        if type(event) is Output:
            self._writer.put([(self._fd, text_line(event).encode() + b"\n")], event)
            return True
        line = line_of(event)
        if line is not None:
            self._writer.put([(self._fd, line.encode() + b"\n")])
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing here waits for time."""

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.close()
        if self._fd != STDOUT:
            os.close(self._fd)

    def verdict(self, story: Story, verdict: Verdict, lines: list[str], history: Sequence[str]) -> None:
        """The verdict on a job that failed: what verdict.json holds, as an event."""
        from launchpad.report.conclusion import as_json

        said = {"event": "Verdict", **as_json(story, verdict, lines, history)}
        self._writer.put([(self._fd, json.dumps(said).encode() + b"\n")])

    def _failed(self, _: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        now = time.monotonic_ns()
        self._post(ConsoleClosed(now, reason) if self._path == "-" else LogFailed(now, self._path, reason))
