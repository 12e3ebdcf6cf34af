"""Which check tells whether a node is healthy (--health). Pure."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from launchpad.errors import UsageError

# How long a check may take, in seconds, if nothing else is said.
HEALTH_SECONDS = 60.0

# What only a shell understands.
_SHELLS = frozenset(("|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", ">/dev/null", "&>"))


class HealthCheck(NamedTuple):
    """A command, or the quick part of launchpad doctor."""

    words: tuple[str, ...]  # none: doctor's
    seconds: float

    @property
    def text(self) -> str:
        """As the user would type it."""
        return shlex.join(self.words) if self.words else "doctor"


def parse_health(text: str, seconds: float) -> HealthCheck:
    """Parse a command, or `doctor`. Raises UsageError."""
    if text.strip() == "doctor":
        return HealthCheck((), seconds)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--health {text}: {str(error).lower()}; quote it as in a shell") from None
    if not words or "\0" in text:
        raise UsageError("--health: give a command like 'dcgmi diag -r 1', or doctor")
    for word in words:
        if word in _SHELLS or (word.endswith(";") and word != words[-1]):
            raise UsageError(f"--health {text!r}: {word!r} is for a shell, and none runs it; write sh -c '…'")
    return HealthCheck(tuple(words), seconds)
