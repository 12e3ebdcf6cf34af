"""The zygote: forks the guards of a job with several nodes on this machine, so that only one interpreter starts."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time

from ..image import channel
from ..rank.command_line import drop_word
from .host import processes


def main() -> int | None:
    """Fork a guard for each request from descriptor 0, with the ends of its link, its standard error, and an input.

    Returns only in a guard, with the descriptor of a rank's standard input, if there is one to pass on.
    """
    processes.outlive_signals()
    processes.continue_with_end_of_parent()
    _rehearse()
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=os.dup(0))
    with contextlib.suppress(OSError, ValueError):  # there is no head any more
        while (asked := channel.receive(link)) is not None:
            fds = asked[1]
            if _fork(link) == 0:
                os.setsid()
                drop_word(len(sys.orig_argv) - 1)
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                return fds[3] if len(fds) > 3 else None
            channel.close(fds)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # until then the head knows them by their pidfds
            pass
    os._exit(0)


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


def _fork(link: socket.socket) -> int:
    """Like os.fork; the answer is a pidfd, or why there is none.

    A guard that the head has not been told of finds nobody at the other ends of its link, and exits.
    """
    try:
        pid = os.fork()
    except OSError as error:
        channel.send(link, {"cold": f"its fork failed ({error.strerror})"})
        return -1
    if pid:
        guard = os.pidfd_open(pid)
        try:
            channel.send(link, {"guard": pid}, [guard])
        finally:
            os.close(guard)
    return pid
