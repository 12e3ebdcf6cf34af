"""Says in plain words what an exception about the network means, where its own words don't. Pure."""

from __future__ import annotations

import re

from launchpad.diagnosis.tracebacks import Traceback

OOM_KILLER = "the kernel's OOM killer"

# torch gives up after a minute, and only its warnings say that the name could not be resolved.
_CONNECT = re.compile(r"client socket has (?:timed out|failed to connect).*?\((?P<host>[^(),\s]+), \d+\)", re.DOTALL)
_UNKNOWN = r"network addresses of \({}, \d+\) cannot be retrieved \(gai error"


def plain_reason(traceback: Traceback, errors: str) -> str:
    """What the exception means, or "". `errors`: the last that the rank wrote to stderr."""
    for root in traceback.roots:
        if root.why:  # the agent has looked
            return root.why
        connect = _CONNECT.search(root.message)
        if connect and re.search(_UNKNOWN.format(re.escape(connect["host"])), errors):
            return f"{connect['host']} has no address"
    return ""
