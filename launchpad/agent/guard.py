"""The guard: the agent's parent process. When the agent dies, for whatever reason, the guard sweeps the node."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from .. import linux
from .host import processes
from .mpi import shm
from .ranks import rundir, shared_memory

if TYPE_CHECKING:
    from .ranks.forkserver_client import KeptFork

# A stopped or stuck agent can't notice that its head is gone; the guard kills it after this many seconds.
STUCK_AGENT = 5.0

# How often the guard lets the head know that it still ends processes.
SIGN_OF_LIFE_SECONDS = 1.0

_NO_CHILDREN = (
    b"launchpad: /proc is not mounted here, or shows another PID namespace: processes that ranks leave behind can't be "
    b"found and will not be killed (mount -t proc proc /proc)\n"
)


def main(stdin_fd: int | None, why_cold: str = "", held: int | None = None) -> NoReturn:
    """Fork into guard and agent, which reads frames from descriptor 0 and writes them to descriptor 1. Never returns.

    `stdin_fd` is the head's own standard input, for a rank; None if there is none to pass on. `why_cold`: why a kept
    image was not used, if there is one; `held`: a descriptor to keep open meanwhile.
    """
    folder = prepare(stdin_fd, held)
    agent = os.fork()
    if agent == 0:
        run_agent(stdin_fd, folder, why_cold=why_cold)
    watch(agent, stdin_fd, folder)


def prepare(stdin_fd: int | None, held: int | None = None) -> str:
    """Make this process the guard that is to fork the agent. Returns the job's folder."""
    processes.outlive_signals()
    processes.close_inherited(keep=(stdin_fd, held))
    if stdin_fd is not None:
        os.set_inheritable(stdin_fd, False)  # only that rank gets it, as its descriptor 0
    try:
        folder = rundir.create()
    except OSError as error:
        _report(str(error), time.monotonic_ns())
        os._exit(1)
    if not linux.shows_our_pids():
        _warn(_NO_CHILDREN)
    processes.become_subreaper()
    return folder


def run_agent(stdin_fd: int | None, folder: str, kept: KeptFork | None = None, why_cold: str = "") -> NoReturn:
    """Be the agent. `kept`: the forkserver that a kept image provides; `why_cold`: why there is none."""
    code = 1
    try:
        from .loop import Agent

        code = Agent(0, 1, stdin_fd, folder, kept, why_cold).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def watch(agent: int, stdin_fd: int | None, folder: str) -> NoReturn:
    """Be the guard until the agent is gone, and see to it that nothing else is left."""
    if stdin_fd is not None:
        os.close(stdin_fd)
    _tidy_up()
    begun = time.time()
    reaped: set[int] = set()
    status = _wait(agent, reaped)
    ended = time.monotonic_ns()
    # Of an agent that broke down, the last frame may not be whole.
    seconds = SIGN_OF_LIFE_SECONDS if status == 0 else 0.0
    processes.sweep(processes.telling(lambda: processes.reap(0, reaped), seconds, _give_sign_of_life))
    shared_memory.remove(reaped, begun)
    shm.remove(folder)
    rundir.remove(folder)
    if status != 0:
        _report(f"the agent was killed by signal {-status}" if status < 0 else "the agent crashed", ended)
    os._exit(0 if status == 0 else 1)


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


def _wait(agent: int, reaped: set[int]) -> int:
    """Wait for the agent to exit; return its exit code (-n for signal n). Add all that is reaped to `reaped`."""
    wakeup = processes.wakeup_on_exit()
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(0, 0)  # reports only a hang-up; the agent reads the data
    kill_at: float | None = None
    while True:
        status = processes.reap(agent, reaped)
        if status is not None:
            return status
        ready = poll.poll(None if kill_at is None else max(0.0, kill_at - time.monotonic()) * 1000)
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(agent, signal.SIGKILL)
            kill_at = None
        for fd, _ in ready:
            if fd == wakeup:
                os.read(wakeup, 4096)
            else:
                poll.unregister(0)
                kill_at = time.monotonic() + STUCK_AGENT


def _give_sign_of_life() -> None:
    from ..protocol import wire  # needed only for a process that can't be killed
    from ..protocol.events import Pong

    with contextlib.suppress(OSError):  # the link is full, or the head is gone
        os.write(1, wire.encode(Pong(time.monotonic_ns(), 0)))


def _report(reason: str, at: int) -> None:
    """Tell the head why this node is going down, if the link still works."""
    from ..protocol import wire  # needed only if something fails
    from ..protocol.events import AgentFailed

    os.set_blocking(1, True)
    signal.alarm(5)  # the link may be full and its reader stuck
    try:
        os.write(1, wire.encode(AgentFailed(at, reason)))
    except OSError:
        pass
