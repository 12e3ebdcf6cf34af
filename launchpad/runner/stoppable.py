"""What may take long before the ranks start can be stopped: a signal ends it, and the user is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from launchpad.head import own_signals
from launchpad.job.outcome import signal_name


@contextlib.contextmanager
def stoppable(say: Callable[[str], None]) -> Iterator[None]:
    """As `exit_on_signals`, and `say` what has happened."""
    try:
        with own_signals.exit_on_signals():
            yield
    except own_signals.Stopped as stopped:
        say(f"stopped by {signal_name(stopped.signum)} before any rank was started")
        raise
