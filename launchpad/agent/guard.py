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

# A stopped or stuck agent can't notice that its head is gone; the guard kills it after this many seconds. One that is
# stopped while its head is there has as long to be continued.
STUCK_AGENT = 5.0

# If the guard wakes up this late, it was stopped too: whoever continues it is about to continue the agent.
LATE_SECONDS = 1.0

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
    shared = prepare(stdin_fd, held)
    agent = os.fork()
    if agent == 0:
        run_agent(stdin_fd, shared, why_cold=why_cold)
    watch(agent, stdin_fd, shared)


def prepare(stdin_fd: int | None, held: int | None = None) -> tuple[str, int]:
    """Make this process the guard that is to fork the agent.

    Returns the job's folder, and an eventfd that an agent writes to if its head would notice that it is silent.
    """
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
    processes.continue_with_end_of_parent()
    return folder, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def run_agent(
    stdin_fd: int | None, shared: tuple[str, int], kept: KeptFork | None = None, why_cold: str = ""
) -> NoReturn:
    """Be the agent. `shared`: what `prepare` returned.

    `kept`: the forkserver that a kept image provides; `why_cold`: why there is none.
    """
    code = 1
    try:
        from .loop import Agent

        processes.continue_with_end_of_parent()
        code = Agent(0, 1, stdin_fd, *shared, kept, why_cold).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def watch(agent: int, stdin_fd: int | None, shared: tuple[str, int]) -> NoReturn:
    """Be the guard until the agent is gone, and see to it that nothing else is left."""
    folder, heartbeats = shared
    if stdin_fd is not None:
        os.close(stdin_fd)
    _tidy_up()
    begun = time.time()
    reaped: set[int] = set()
    status, reason = _Watch(agent, heartbeats, reaped).wait()
    ended = time.monotonic_ns()
    # Of an agent that broke down, the last frame may not be whole.
    seconds = SIGN_OF_LIFE_SECONDS if status == 0 else 0.0
    processes.sweep(processes.telling(lambda: processes.reap(0, reaped), seconds, _give_sign_of_life))
    shared_memory.remove(reaped, begun)
    shm.remove(folder)
    rundir.remove(folder)
    if status != 0:
        _report(reason, ended)
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


class _Watch:
    """Waits for the end of the agent, and kills one that can't notice what it has to."""

    def __init__(self, agent: int, heartbeats: int, reaped: set[int]) -> None:
        """All that is reaped is added to `reaped`."""
        self._agent = agent
        self._heartbeats = heartbeats
        self._watched = False  # by a head that hears its heartbeats
        self._reaped = reaped
        self._stopped = 0  # the signal that has stopped the agent
        self._kill_at: float | None = None
        self._hung_up = False

    def wait(self) -> tuple[int, str]:
        """The agent's exit code (-n for signal n), and why it has ended, unless with 0."""
        wakeup = processes.wakeup_on_exit()
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        poll.register(0, 0)  # reports only a hang-up; the agent reads the data
        while (status := processes.reap(self._agent, self._reaped)) is None:
            self._look()
            ready = poll.poll(None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic()) * 1000)
            self._look()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            for fd, _ in ready:
                if fd == wakeup:
                    os.read(wakeup, 4096)
                else:
                    poll.unregister(0)
                    self._hung_up = True
                    self._kill_at = time.monotonic() + STUCK_AGENT
        return status, self._reason(status)

    def _look(self) -> None:
        """Note whether the agent has been stopped or continued."""
        while (change := processes.stopped_or_continued(self._agent)) is not None:
            if self._hung_up:
                continue
            self._stopped = change
            self._kill_at = time.monotonic() + STUCK_AGENT if change and not self._head_watches() else None

    def _head_watches(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._watched = os.eventfd_read(self._heartbeats) > 0 or self._watched
        return self._watched

    def _kill(self) -> None:
        assert self._kill_at is not None
        if not self._hung_up and time.monotonic() > self._kill_at + LATE_SECONDS:
            self._kill_at = time.monotonic() + STUCK_AGENT
            return
        os.kill(self._agent, signal.SIGKILL)
        self._kill_at = None

    def _reason(self, status: int) -> str:
        if status >= 0:
            return "the agent crashed"
        if self._stopped:
            name = signal.Signals(self._stopped).name
            return f"the agent was stopped by another process's {name}, and not continued within {STUCK_AGENT:g} s"
        return f"the agent was killed by signal {-status}"


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
