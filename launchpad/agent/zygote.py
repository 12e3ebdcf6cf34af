"""The zygote: a guard of which further agents were asked, for other nodes of the job on this machine.

So only one interpreter starts, and each agent takes one process.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..image import channel
from .host import processes
from .ranks import rundir
from .wards import Guard, Shared, Ward, run_agent, share

if TYPE_CHECKING:
    from .ranks.forkserver_client import KeptFork


# How many files a guard has to be able to open besides, to remove what an agent leaves.
_SPARE_FILES = 12


def _rehearse() -> None:
    """Load, compile and keep what each agent would when it is first needed."""
    import _ctypes
    import importlib

    from .. import mpi_library
    from ..protocol.commands import Finish, Hello, Start
    from ..protocol.events import AgentReady, Drained, RankExited, RankStarted
    from ..protocol.typed import converter
    from . import loop
    from .mpi import own_worlds
    from .ranks import shared_memory

    del _ctypes, importlib, loop, mpi_library, own_worlds
    for command in (Hello, Start, Finish):
        converter(command)
    for message in (Hello, Start, Finish, AgentReady, RankStarted, RankExited, Drained):
        message.compile()
    shared_memory.remove([0], time.time())  # no process has this pid


class _Order(NamedTuple):
    """An agent that is to be forked."""

    commands: int
    events: int
    stderr: int
    stdin_fd: int | None
    shared: Shared
    lock: int


class AgentForks:
    """Forks agents for a guard."""

    def __init__(self, guarded_by: Guard, asked: int, begin_forkserver: Callable[[], KeptFork | None]) -> None:
        """Fork one for each request over this socket, with the ends of its link, its standard error, and an input.

        `begin_forkserver`: as in `guard.watch`.
        """
        _rehearse()
        gc.collect()
        gc.freeze()
        self._guard = guarded_by
        self._begin_forkserver = begin_forkserver
        self._link = socket.socket(fileno=asked)
        self._link.setblocking(False)
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # a ward takes four
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._files[1], self._files[1]))
        guarded_by.hear(asked, self._asked, select.POLLIN)

    def _asked(self, _: int) -> None:
        """Fork all that are asked for, one right after the other: what is written to between forks is copied."""
        asked = []
        over = True
        try:
            while (message := channel.receive(self._link)) is not None:
                asked.append((message[0].get("number"), message[1]))
        except BlockingIOError:
            over = False
        except (OSError, ValueError):  # there is no head any more
            pass
        orders = [(number, self._prepare(fds)) for number, fds in asked]
        forked = [(number, order, self._fork(order)) for number, order in orders if isinstance(order, _Order)]
        refused = [(number, order) for number, order in orders if isinstance(order, str)]
        for __, order, pid in forked:  # before the first answer, as there may be no head any more
            self._watch(order, pid)
        try:
            for number, answer in [*refused, *((number, pid) for number, __, pid in forked)]:
                self._answer(number, answer)
        except OSError:  # an answer can't be sent: the head has to do without us
            over = True
        if over:
            self._guard.hear_no_more(self._link.fileno())
            self._link.close()

    def _prepare(self, fds: list[int]) -> _Order | str:
        """What is to be forked, or why nothing is."""
        commands, events, stderr, *stdin = fds
        try:
            if max(fds) + _SPARE_FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return _Order(commands, events, stderr, stdin[0] if stdin else None, *share())
        except OSError as error:
            channel.close(fds)
            return str(error)

    def _fork(self, order: _Order) -> int | str:
        """The new agent's pid, or why there is none."""
        try:
            pid = os.fork()
        except OSError as error:
            return f"its fork failed ({error.strerror})"
        if pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number, fd in enumerate((order.commands, order.events, order.stderr)):
                os.dup2(fd, number)
            processes.close_inherited(keep=(order.stdin_fd, order.shared.heartbeats, order.lock))
            self._link.detach()
            resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
            run_agent(order.stdin_fd, order.shared, self._begin_forkserver())
        return pid

    def _watch(self, order: _Order, forked: int | str) -> None:
        channel.close([order.stderr, *([] if order.stdin_fd is None else [order.stdin_fd])])
        ward = Ward(forked if isinstance(forked, int) else 0, order.shared, (order.commands, order.events), order.lock)
        if isinstance(forked, int):
            self._guard.watch(ward)
        else:
            rundir.remove(order.shared.folder)
            ward.close()

    def _answer(self, number: object, forked: int | str) -> None:
        """Tell the head, with a pidfd of the agent."""
        if not isinstance(forked, int):
            channel.send(self._link, {"number": number, "cold": forked})
            return
        # If the head is not told of the agent, that finds nobody at the other ends of its link, and exits.
        try:
            agent = os.pidfd_open(forked)
        except OSError as error:
            channel.send(self._link, {"number": number, "cold": f"no pidfd ({error.strerror})"})
            return
        try:
            channel.send(self._link, {"number": number, "agent": forked}, [agent])
        finally:
            os.close(agent)
