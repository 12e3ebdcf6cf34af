"""Adds to an exception that a rank could not listen on a TCP port which process has that port."""

from __future__ import annotations

import re
import time
from typing import Any

from ... import listeners

# Compiled on first use: few ranks fail like this.
_IN_USE = r"EADDRINUSE|[Aa]ddress already in use"
# As torch, asyncio and others name the port.
_PORT = r"\bport[:= ]+(\d{1,5})\b|\('[^']*', (\d{1,5})[,)]|:(\d{2,5})\b"

# All ranks may fail on the same port, one soon after the other: what was found holds for so many seconds.
FOUND_HOLDS = 2.0

_found: dict[int, tuple[float, str]] = {}  # by port: until when it holds


def explain(traceback: dict[str, Any]) -> None:
    """If the recorded exception, or one that it is due to, says that a port is taken, add who has it."""
    link: Any = traceback
    while isinstance(link, dict):
        message = str(link.get("message"))
        if re.search(_IN_USE, message) and (named := re.search(_PORT, message)):
            link["why"] = taken(int(named[1] or named[2] or named[3]))
        link = link.get("cause") or link.get("context")


def taken(port: int) -> str:
    """That the port is taken, and by whom as far as we may know."""
    until, text = _found.get(port, (0.0, ""))
    if time.monotonic() >= until:
        text = _look_up(port)
        _found[port] = time.monotonic() + FOUND_HOLDS, text
    return text


def _look_up(port: int) -> str:
    who = listeners.holder(port)
    return f"the port {port} is taken" + (f" (by {who})" if who else "")
