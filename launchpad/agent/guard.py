"""The guard: the agent's parent process. When the agent dies, for whatever reason, the guard sweeps the node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from .. import linux
from .host import processes
from .mpi import shm
from .ranks import rundir
from .wards import Guard, Shared, Ward, report, run_agent, share

if TYPE_CHECKING:
    from .ranks.forkserver_client import KeptFork

_NO_CHILDREN = (
    b"launchpad: /proc is not mounted here, or shows another PID namespace: processes that ranks leave behind can't be "
    b"found and will not be killed (mount -t proc proc /proc)\n"
)


def main(stdin_fd: int | None, why_cold: str = "", held: int | None = None, asked: int | None = None) -> NoReturn:
    """Fork into guard and agent, which reads frames from descriptor 0 and writes them to descriptor 1. Never returns.

    `stdin_fd` is the head's own standard input, for a rank; None if there is none to pass on. `why_cold`: why a kept
    image was not used, if there is one; `held`: a descriptor to keep open meanwhile; `asked`: a socket over which this
    guard may be asked for further agents (zygote.py).
    """
    shared = prepare(stdin_fd, held, asked)
    agent = os.fork()
    if agent == 0:
        if asked is not None:
            os.close(asked)
        run_agent(stdin_fd, shared, why_cold=why_cold)
    watch(agent, stdin_fd, shared, asked)


def prepare(stdin_fd: int | None, *held: int | None) -> Shared:
    """Make this process the guard that is to fork the agent. `held`: descriptors that stay open too."""
    processes.outlive_signals()
    processes.close_inherited(keep=(stdin_fd, *held))
    for fd in (stdin_fd, *held):
        if fd is not None:
            os.set_inheritable(fd, False)  # of the ranks, only one gets the first, as its descriptor 0
    try:
        shared, _ = share()
    except OSError as error:
        report(1, str(error), time.monotonic_ns())
        os._exit(1)
    if not linux.shows_our_pids():
        _warn(_NO_CHILDREN)
    processes.become_subreaper()
    processes.continue_with_end_of_parent()
    return shared


def watch(
    agent: int,
    stdin_fd: int | None,
    shared: Shared,
    asked: int | None = None,
    begin_forkserver: Callable[[], KeptFork | None] = lambda: None,
) -> NoReturn:
    """Be the guard until the agent is gone, and see to it that nothing else is left. `asked`: as in `main`.

    `begin_forkserver` is called in each further agent; it forks what a kept image provides.
    """
    if stdin_fd is not None:
        os.close(stdin_fd)
    _tidy_up()
    guard = Guard()
    guard.watch(Ward(agent, shared, (0, 1)))
    if asked is not None:
        _heed(asked, guard, begin_forkserver)
    guard.run()


def _heed(asked: int, guard: Guard, begin_forkserver: Callable[[], KeptFork | None]) -> None:
    """Have further agents forked if that is asked for."""

    def first(events: int) -> None:
        guard.hear_no_more(asked)
        if events & select.POLLHUP:
            os.close(asked)
        else:
            from .zygote import AgentForks

            AgentForks(guard, asked, begin_forkserver)

    guard.hear(asked, first, select.POLLIN)


def _tidy_up() -> None:
    """Remove what other jobs' guards and agents left on this machine when both were killed at once."""
    for folder in rundir.abandoned():
        # The ranks' environment names their error files in it (TORCHELASTIC_ERROR_FILE), and its name is unique.
        mark = f"/{os.path.basename(folder)}/".encode()
        if any(mark in value for value in os.environb.values()):  # we descend from one of them
            continue
        processes.kill_those_with(mark)
        shm.remove(folder)
        rundir.remove(folder)


def _warn(text: bytes) -> None:
    try:
        os.write(2, text)
    except OSError:
        pass
