"""When this rank has come how far: for the timeline of the job's report."""

from __future__ import annotations

import time

# By the monotonic clock. The keys are as in MilestoneReached.
reached: dict[str, int] = {}


def reach(what: str) -> None:
    """Keep when this rank has first come so far."""
    reached.setdefault(what, time.monotonic_ns())
