"""Hands the agent over to a node: the exchange with bootstrap.py, over any stream of bytes that leads to it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from launchpad.errors import ConnectError
from launchpad.transport.ssh.bootstrap import HAVE, MARK, NEED
from launchpad.transport.ssh.bundle import ENTERED, Startup, bootstrap, bundle

# If a node's Python has not started by then, it never will.
START_SECONDS = 30.0

# How much of a node's output before the bootstrap to keep, and of its stderr.
GREETING_BYTES = 64 << 10
STDERR_BYTES = 2000

# Exit codes of a shell that can't execute a program, or can't find it.
_CANT_RUN = (126, 127)


class HungUp(Exception):
    """The stream ended before the bootstrap answered. `output`: what came instead."""

    def __init__(self, output: bytes) -> None:
        super().__init__()
        self.output = output


class Unfit(Exception):
    """The bootstrap answered that the node can't run the agent; the text says why."""


def hand_over(send: Callable[[bytes], object], receive: Callable[[], bytes], startup: Startup, deadline: float) -> None:
    """Send the agent to the bootstrap, which runs it. `receive` returns b"" at the end of the stream.

    Raises HungUp, Unfit, TimeoutError, and what `send` and `receive` raise.
    """
    digest, data = bundle()
    send(bootstrap() + f"{digest} {len(data)} {startup.asked}\n".encode())
    received = b""
    while time.monotonic() < deadline:
        start = received.find(MARK)  # a shell's greeting may come before it
        if start >= 0 and b"\n" in received[start:]:
            # The bootstrap sends nothing after this line until we send something.
            answer = received[start + len(MARK) :].partition(b"\n")[0]
            if answer == NEED:
                send(data)
            elif answer != HAVE:
                raise Unfit(answer.decode(errors="replace"))
            return
        piece = receive()
        if not piece:
            raise HungUp(received)
        received = (received + piece)[-GREETING_BYTES:]
    raise TimeoutError


def too_slow(name: str, seconds: float, startup: Startup) -> ConnectError:
    """The error for a node whose bootstrap has not answered in time."""
    text = f"the agent did not start within {seconds:g} s; is the host overloaded, or does its sshd run"
    if startup.enter:
        text = f"{text} another command (ForceCommand), or {shlex.join(startup.enter)} wait for something?"
    else:
        text = f"{text} another command (ForceCommand)?"
    return ConnectError("timed out", name, text)


def not_started(name: str, code: int, output: bytes, stderr: bytes, startup: Startup) -> ConnectError:
    """The error for a node whose shell, or what was to enter its container, exited with `code` instead.

    A negative code: the connection ended before it was known.
    """
    _, entered, rest = output.rpartition(ENTERED)
    text = in_one_line(rest + stderr)
    quoted = f" ({text})" if text else ""
    if startup.enter and not entered:
        failed = f"{shlex.join(startup.enter)} exited with code {code} before the agent started{quoted}"
        return ConnectError("enter", name, f"{failed}; is the program there, and what it enters running?")
    if startup.enter and b"SyntaxError" in stderr:  # Python took the end of its input for the program
        text = f"{shlex.join(startup.enter)} doesn't pass standard input on; docker and podman need -i"
        return ConnectError("enter", name, text)
    if code in _CANT_RUN:
        python = startup.python
        return ConnectError("no Python", name, f"can't run {python} there{quoted}; name another one with --python")
    ended = f"its shell exited with code {code}" if code >= 0 else "the connection ended"
    return ConnectError("protocol", name, f"{ended} before the agent started{quoted}")


def in_one_line(output: bytes) -> str:
    """What a node has printed, for a message."""
    lines = output.decode(errors="replace").split("\n")
    return "; ".join(line.strip() for line in lines if line.strip())[:300]
