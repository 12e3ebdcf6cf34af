"""What one launchpad hands on to the one that takes its job over (--keep-running)."""

from __future__ import annotations

from launchpad.head.checkpoints import HeadState
from launchpad.named import NamedTuple
from launchpad.output.mark import Resumed
from launchpad.protocol.events import HeadResumed
from launchpad.record.checkpoint import Checkpoint
from launchpad.runner.options import ReportOptions


class Settings(NamedTuple):
    """What a head that takes over needs to know besides the job."""

    reports: ReportOptions
    detached: bool


class Before(NamedTuple):
    """A head that is gone, from which we take over."""

    checkpoint: Checkpoint
    head: HeadState
    resumed: Resumed
    event: HeadResumed
