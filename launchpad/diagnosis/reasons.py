"""Says in plain words what an exception about the network means, where its own words don't. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launchpad.diagnosis.tracebacks import Traceback

if TYPE_CHECKING:
    from launchpad.diagnosis.history import RankHistory

OOM_KILLER = "the kernel's OOM killer"

# torch gives up after a minute, and only its warnings say that the name could not be resolved.
_CONNECT = re.compile(r"client socket has (?:timed out|failed to connect).*?\((?P<host>[^(),\s]+), \d+\)", re.DOTALL)
_UNKNOWN = r"network addresses of \({}, \d+\) cannot be retrieved \(gai error"


# breakpoint() and input() at the end of standard input.
_ENDED = ("bdb.BdbQuit", "EOFError: EOF when reading a line")


def plain_reason(traceback: Traceback, one: RankHistory) -> str:
    """What the exception means, or ""; `one` is the rank's."""
    for root in traceback.roots:
        if root.why:  # the agent has looked
            return root.why
        connect = _CONNECT.search(root.message)
        if connect and re.search(_UNKNOWN.format(re.escape(connect["host"])), one.errors):
            return f"{connect['host']} has no address"
        if root.title in _ENDED and not one.has_input:
            return f"it has no standard input; --input-rank {one.rank} gives it launchpad's, for prompts"
    return ""
