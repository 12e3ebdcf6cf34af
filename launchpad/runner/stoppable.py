"""What may take long before the ranks start can be stopped: a signal ends it, and the user is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from launchpad.head import own_signals
from launchpad.job.outcome import signal_name


def stopped_by(signum: int) -> str:
    """What the user is told."""
    return f"stopped by {signal_name(signum)} before any rank was started"


@contextlib.contextmanager
def stoppable(say: Callable[[str], None]) -> Iterator[None]:
    """As `exit_on_signals`, and `say` what has happened."""
    with told(say), own_signals.exit_on_signals():
        yield


@contextlib.contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """If a signal ends this, `say` so."""
    try:
        yield
    except own_signals.Stopped as stopped:
        say(stopped_by(stopped.signum))
        raise
