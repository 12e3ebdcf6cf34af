"""The zygote: forks the agents of a job with several nodes on this machine, and guards them all.

So only one interpreter starts, and each agent takes one process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from ..image import channel
from ..rank.command_line import drop_word
from . import guard
from .guard import Guard, Ward
from .host import processes
from .ranks import rundir


def main() -> NoReturn:
    """Fork an agent for each request from descriptor 0, with the ends of its link, its standard error, and an input."""
    link = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)  # /dev/null
    guard.become_guard(keep=(link.fileno(),))
    drop_word(len(sys.orig_argv) - 1)
    _rehearse()
    gc.collect()
    gc.freeze()
    _ForkingGuard(link).run()


def _rehearse() -> None:
    """Load, compile and keep what each agent would when it is first needed."""
    import _ctypes
    import importlib

    from .. import mpi_library
    from ..protocol.commands import Finish, Hello, Start
    from ..protocol.typed import converter
    from . import loop
    from .mpi import own_worlds
    from .ranks import shared_memory

    del _ctypes, importlib, loop, mpi_library, own_worlds
    for command in (Hello, Start, Finish):
        converter(command)
    shared_memory.remove([0], time.time())  # no process has this pid


class _ForkingGuard(Guard):
    """Forks the agents that it guards."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__()
        self._link = link
        self.hear(link.fileno(), self._asked, select.POLLIN)

    def _asked(self) -> None:
        asked = None
        with contextlib.suppress(OSError, ValueError):  # there is no head any more
            asked = channel.receive(self._link)
        if asked is None:
            self.hear_no_more(self._link.fileno())
            self._link.close()
            return
        commands, events, stderr, *stdin = asked[1]
        self._fork(commands, events, stderr, *stdin)
        channel.close([stderr, *stdin])

    def _fork(self, commands: int, events: int, stderr: int, stdin_fd: int | None = None) -> None:
        """Fork an agent. The answer is a pidfd of it, or why there is none."""
        try:
            shared, lock = guard.share()
        except OSError as error:
            self._answer({"cold": str(error)})
            channel.close([commands, events])
            return
        try:
            pid = os.fork()
        except OSError as error:
            self._answer({"cold": f"its fork failed ({error.strerror})"})
            rundir.remove(shared.folder)
            channel.close([commands, events, shared.heartbeats, *([lock] if lock >= 0 else [])])
            return
        if pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number, fd in enumerate((commands, events, stderr)):
                os.dup2(fd, number)
            processes.close_inherited(keep=(stdin_fd, shared.heartbeats, lock))
            guard.run_agent(stdin_fd, shared)
        self.watch(Ward(pid, shared, (commands, events), lock))
        forked = os.pidfd_open(pid)
        self._answer({"agent": pid}, forked)
        os.close(forked)

    def _answer(self, message: dict[str, object], *fds: int) -> None:
        # An agent that the head has not been told of finds nobody at the other ends of its link, and exits.
        with contextlib.suppress(OSError):
            channel.send(self._link, message, fds)
