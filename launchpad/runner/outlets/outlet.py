"""The interface of an outlet: one report on a job, besides its console and its record."""

import os
from typing import TYPE_CHECKING, Protocol

from launchpad.head.sink import Sink
from launchpad.named import NamedTuple

if TYPE_CHECKING:
    from launchpad.diagnosis.diagnosis import Diagnosis
    from launchpad.diagnosis.verdict import Verdict


class Ended(NamedTuple):
    """A job that is over, for those who report on it."""

    code: int  # the exit code
    diagnosis: "Diagnosis"
    verdict: "Verdict | None"  # None: all ranks have succeeded
    report: list[str]  # the verdict's lines
    lines: list[str]  # the same, and where to look for more
    folder: str  # of its log files, or else of its record; "" if there are none


class Says(Protocol):
    """Where an outlet shows what it has to say itself: the console."""

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show a line of launchpad's own."""


class Outlet:
    """Does nothing. An outlet says what it does otherwise. Its constructor raises UsageError for what can't work."""

    name: str  # what the user knows it by
    sink: Sink | None = None  # sees all events of the job
    reads_record = False  # when it finishes

    def begin(self, folder: str) -> None:
        """The job's record is kept in `folder`; "" if it can't be kept. Raises UsageError."""

    def conclude(self, ended: Ended) -> None:
        """It is known how the job ended; the console doesn't show it yet."""

    def finish(self, ended: Ended) -> None:
        """The console has shown it, and the record is complete."""


def adds(path: str, since: float | None) -> bool:
    """Whether to add to a report: if an earlier job of the same file has written it since then."""
    try:
        return since is not None and os.stat(path).st_mtime >= since
    except OSError:
        return False
