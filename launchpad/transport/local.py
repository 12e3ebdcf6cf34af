"""The local node: guard and agent as child processes, frames over two pipes."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from launchpad import wire
from launchpad.commands import Command

_AGENT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "agent", "__main__.py")

# How much output may lie between agent and head: what the link holds, a control frame has to wait for.
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 20

# Guard and agent end by themselves, at the latest after guard.STUCK_AGENT and processes.SWEEP_SECONDS.
GUARD_EXIT_SECONDS = 20.0


class LocalLink:
    """A Link to an agent on this machine; making one starts the guard, and the agent waits for its Hello."""

    name = ""
    remote = False

    def __init__(self) -> None:
        """Rank 0 will read our standard input, unless it is a terminal that others are using."""
        stdin_fd = _stdin_to_pass_on()
        commands_in, commands_out = os.pipe()
        events_in, events_out = os.pipe()
        try:
            fcntl.fcntl(events_out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:  # the user's share of pipe memory is used up: the default does
            pass
        argv = [sys.executable, "-I", "-S", _AGENT]
        # dup2 in the child makes copies that survive exec; 3 and up are the child's to close.
        actions = [(os.POSIX_SPAWN_DUP2, commands_in, 0), (os.POSIX_SPAWN_DUP2, events_out, 1)]
        passed = -1
        if stdin_fd is not None:
            passed = os.dup(stdin_fd)
            os.set_inheritable(passed, True)
            argv.append(str(passed))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._pid = os.posix_spawn(
            sys.executable,
            argv,
            {name: value for name, value in os.environ.items() if name},
            file_actions=actions,
            setsid=True,  # a terminal's signals go to its session; the head decides what they mean for the ranks
            # Both may come to us blocked or ignored, and guard and agent live by them.
            setsigmask=mask - {signal.SIGCHLD},
            setsigdef=[signal.SIGCHLD],
        )
        for fd in (commands_in, events_out, passed):
            if fd >= 0:
                os.close(fd)
        self._out = commands_out
        self._in = events_in
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="local-link-writer", daemon=True)
        self._writer.start()

    def send(self, command: Command) -> None:
        """Queue a command for the writer thread: an agent that does not read must not stop the head."""
        self._outbox.put(wire.encode(command))

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            view = memoryview(frame)
            try:
                while view:
                    view = view[os.write(self._out, view) :]
            except OSError:  # the agent is gone; the reading side tells
                return

    def messages(self) -> Iterator[Any]:
        """The agent's events until end-of-file."""
        decoder = wire.Decoder()
        while data := os.read(self._in, READ_BYTES):
            yield from decoder.feed(data)

    def close(self) -> None:
        """Hang up, if that is still to be done; wait for the guard, which ends by itself once its agent has."""
        if self._pid == 0:
            return
        self._outbox.put(None)
        self._writer.join(timeout=1.0)
        os.close(self._out)
        deadline = time.monotonic() + GUARD_EXIT_SECONDS
        try:
            while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    break
                time.sleep(0.001)
        except ChildProcessError:  # somebody else in this process waits for all children
            pass
        self._pid = 0
        os.close(self._in)

    def abandon(self) -> None:
        """Its guard is on this machine, and ends: there is nothing to be done before `close`."""


def _stdin_to_pass_on() -> int | None:
    try:
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return None
    except OSError:  # a terminal, but not ours
        return None
    return 0
