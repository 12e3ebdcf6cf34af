"""What the forkserver tells pytest about a test: how each rank ended, and what it reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launchpad.testing.warned import WarningSeen

# Why a rank did not end by itself.
TIMEOUT = "timeout"
WAITED = "waited"  # another rank had failed or died, and this one did not end after that
STOPPED = "stopped"  # the test was over


@dataclass
class RankEnd:
    """One rank's part in a test."""

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)  # as pytest serialises them, in order
    done: bool = False  # it has reported everything
    code: int = 0  # its exit code, -n for signal n
    ended: str = ""  # TIMEOUT, WAITED or STOPPED if we ended it
    reason: str = ""  # what it did to its MPI world, as a phrase
    output: list[tuple[str, str]] = field(default_factory=list)  # "stdout" or "stderr", and text in no report
    crash: list[str] = field(default_factory=list)  # where it was when it crashed, innermost first
    left: list[str] = field(default_factory=list)  # its threads and children that it did not end
    broken: str = ""  # a traceback: pytest itself failed there
    stop: tuple[str, int | None] | None = None  # pytest.exit(): its message and exit code
    warnings: list[WarningSeen] = field(default_factory=list)

    def died(self) -> bool:
        """Whether it ended by itself, and not as a rank that has reported everything does."""
        failed = any(report.get("outcome") == "failed" for report in self.reports)
        return not self.ended and (not self.done or self.code not in (0, int(failed)))


@dataclass
class TestEnd:
    """All that is known about a test that was to run on several ranks."""

    __test__ = False

    error: str = ""  # why the ranks were not started; then there is nothing else
    before: dict[str, Any] | None = None  # the report, if shared fixtures could not be set up or torn down
    sections: list[tuple[str, str]] = field(default_factory=list)  # captured while shared fixtures were torn down
    warnings: list[WarningSeen] = field(default_factory=list)  # of shared fixtures
    ranks: list[RankEnd] = field(default_factory=list)
    stacks: str = ""  # where the ranks were when they were ended
    limit: float | None = None  # seconds
    left: list[str] = field(default_factory=list)  # processes that one of the ranks left behind
    interrupted: bool = False
    stop: tuple[str, int | None] | None = None  # pytest.exit() in a shared fixture: its message and exit code
