"""Signals that reach the head become events."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from launchpad.events import StopRequested

HANDLED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),  # end the job
    *(signal.SIGUSR1, signal.SIGUSR2),  # go on to the ranks
    *(signal.SIGTSTP, signal.SIGCONT),  # stop us and the ranks, and continue
    signal.SIGQUIT,  # shows where the ranks are
)


def catch(post: Callable[[StopRequested], None], more: Iterable[int] = ()) -> None:
    """From here on, `post` what comes. A signal that was ignored when we were started (nohup) stays ignored.

    `more`: what is to be passed on to the ranks beside HANDLED.
    """
    handled = {signum for signum in (*HANDLED, *more) if signal.getsignal(signum) != signal.SIG_IGN}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Not in the handlers: one that came just before the loop goes to sleep would run only at its next event.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(reader, handled, post), name="signals", daemon=True).start()
    for signum in handled:
        signal.signal(signum, lambda *_: None)


def _read(reader: int, handled: set[int], post: Callable[[StopRequested], None]) -> None:
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number in handled:
                post(StopRequested(time.monotonic_ns(), number))
