"""Turns signals to the head into events, or, before there is a job, into its exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from launchpad import caller
from launchpad.job.outcome import STOPPING
from launchpad.protocol.events import StopRequested

# A signal to all processes with some command line, or of a cgroup, comes to a kept head itself and from its caller,
# which passes it on when it next gets a CPU. Who presses Ctrl-C twice is heeded at the latest at the third time.
_TWICE_NS = 250_000_000

HANDLED = (
    *STOPPING,
    *(signal.SIGUSR1, signal.SIGUSR2),  # are forwarded to the ranks
    *(signal.SIGTSTP, signal.SIGCONT),  # suspend and resume us and the ranks
    signal.SIGQUIT,  # shows the stacks of the ranks
)


_asked: list[int] = []  # the signals in STOPPING that have come since the first `catch`
_current: tuple[set[int], Callable[[StopRequested], None]] = set(), lambda _: None  # of the latest `catch`
_reads = 0  # the process that has the thread


class Stopped(SystemExit):
    """A signal has stopped us before there was a job."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def catch(post: Callable[[StopRequested], None], more: Iterable[int] = ()) -> None:
    """From now on, `post` signals as events. A signal that was ignored when we were started (nohup) stays ignored.

    `more`: signals to forward to the ranks, besides those in HANDLED.
    """
    global _current, _reads
    handled = {signum for signum in (*HANDLED, *more) if signal.getsignal(signum) != signal.SIG_IGN}
    _current = handled, post
    if _reads != os.getpid():
        _reads = os.getpid()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Don't post from a handler: that of a signal just before the loop sleeps would run only at the next event.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_read, args=[reader], name="signals", daemon=True).start()
    for signum in handled:
        signal.signal(signum, lambda *_: None)


def _read(reader: int) -> None:
    last: dict[int, int] = {}
    while numbers := os.read(reader, 64):
        for number in numbers:
            now = time.monotonic_ns()
            if caller.is_another_process() and now - last.get(number, 0) <= _TWICE_NS:
                continue
            last[number] = now
            handled, post = _current  # the latest: who listened when it came may have ended by now
            if number in handled:
                if number in STOPPING:
                    _asked.append(number)
                post(StopRequested(now, number))


def asked_to_stop() -> int:
    """The signal that has asked us to end the job or to leave it, whoever it was posted to. 0: none has."""
    return _asked[-1] if _asked else 0


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let Ctrl-C, TERM and HUP raise Stopped meanwhile, or until `catch`.

    In another thread than the main one, nothing changes.
    """
    handled = [one for one in STOPPING if signal.getsignal(one) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # in launchpad.run, which handles Ctrl-C itself
        handled = []
    before = {one: signal.signal(one, _exit) for one in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is _exit:
                signal.signal(signum, handler)


def _exit(signum: int, _: object) -> NoReturn:
    raise Stopped(signum)
