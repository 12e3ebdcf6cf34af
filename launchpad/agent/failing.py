"""Turns the exception that ends the agent into a report for the head: invalid input, a system error, or our own bug."""

from __future__ import annotations

import errno
import os
import time

from ..protocol import wire
from ..protocol.events import AgentFailed

# System errors that point to a bug in the caller, not to a full disk or a missing permission.
_CALLER_ERRORS = (errno.EBADF, errno.EINVAL, errno.EFAULT, errno.ENOTSOCK)


def failure_of(error: Exception) -> AgentFailed:
    """The report: one sentence, and for a bug the traceback."""
    now = time.monotonic_ns()
    if isinstance(error, wire.WireError):
        return AgentFailed(now, f"its agent received invalid data: {error}")
    if isinstance(error, OSError) and error.strerror and error.errno not in _CALLER_ERRORS:
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        return AgentFailed(now, f"its agent failed: {error.strerror}{where}")
    import traceback

    what = " ".join("".join(traceback.format_exception_only(error)).split())
    return AgentFailed(
        now, f"its agent crashed because of a bug in launchpad: {what}", "".join(traceback.format_exception(error))
    )
