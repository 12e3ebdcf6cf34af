"""The guard: parent of the agent. When the agent dies, however it dies, the guard sweeps the node."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from . import processes, scratch, shm

# An agent that was stopped (or is stuck) can't see that its head is gone; after this many seconds the guard acts.
STUCK_AGENT = 5.0


def main(stdin_fd: int | None) -> None:
    """Split into guard and agent; frames are read from descriptor 0 and written to descriptor 1. Never returns.

    `stdin_fd` is the head's own standard input, for rank 0; None where there is none to pass on.
    """
    _close_inherited(keep=stdin_fd)
    if stdin_fd is not None:
        os.set_inheritable(stdin_fd, False)  # rank 0 gets it as its descriptor 0, and nobody as anything else
    try:
        folder = scratch.create()
    except OSError as error:
        _tell_head(str(error), time.monotonic_ns())
        os._exit(1)
    processes.become_subreaper()
    agent = os.fork()
    if agent == 0:
        code = 1
        try:
            from .agent import Agent

            code = Agent(0, 1, stdin_fd, folder).run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    if stdin_fd is not None:
        os.close(stdin_fd)
    status = _wait(agent)
    ended = time.monotonic_ns()
    processes.sweep(lambda: processes.reap(0))
    shm.remove(folder)
    scratch.remove(folder)
    if status != 0:
        _tell_head(f"the agent was killed by signal {-status}" if status < 0 else "the agent broke down", ended)
    os._exit(0 if status == 0 else 1)


def _wait(agent: int) -> int:
    """The agent's exit code (-n for signal n), once it is gone."""
    wakeup = processes.wakeup_on_exit()
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(0, 0)  # only whether the head has hung up: what it says is the agent's to read
    kill_at: float | None = None
    while True:
        status = processes.reap(agent)
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


def _tell_head(reason: str, at: int) -> None:
    """Say on the link, if it still can be said, why this node ends."""
    from .. import wire  # a job that goes well needs none of this in the guard
    from ..events import AgentFailed

    os.set_blocking(1, True)
    signal.alarm(5)  # the link may be full, and its reader stuck
    try:
        os.write(1, wire.encode(AgentFailed(at, reason)))
    except OSError:
        pass


def _close_inherited(keep: int | None) -> None:
    """Close what the head's own parent left open: it would stay open in every rank."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                pass
