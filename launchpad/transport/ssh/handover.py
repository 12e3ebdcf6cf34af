"""Hands the agent over to a node: the exchange with bootstrap.py, over any stream of bytes that leads to it.

Or with agent/bridge.py, which answers as if the node had the agent.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from launchpad.errors import ConnectError
from launchpad.transport.ssh.bootstrap import HAVE, MARK, NEED
from launchpad.transport.ssh.bundle import CUT, ENTERED, Startup, digest, packed

# If a node's Python has not started by then, it never will.
START_SECONDS = 30.0

# How much of a node's output before the bootstrap to keep, and of its stderr.
GREETING_BYTES = 64 << 10
STDERR_BYTES = 2000

# Exit codes of a shell that can't execute a program, or can't find it.
_CANT_RUN = (126, 127)

# How much of a node's words to quote, and how many characters of ours in a row are no accident in them.
_QUOTED = 300
_OURS = 24


class Unanswered(Exception):
    """The bootstrap did not answer. `output`: what came instead."""

    def __init__(self, output: bytes) -> None:
        super().__init__()
        self.output = output


class HungUp(Unanswered):
    """The stream ended."""


class TooSlow(Unanswered):
    """The time was up."""


class Unfit(Exception):
    """The bootstrap answered that the node can't run the agent; the text says why."""


def hand_over(send: Callable[[bytes], object], receive: Callable[[], bytes], startup: Startup) -> bytes:
    """Send the agent to the bootstrap, which runs it. Returns what has come of its frames.

    `receive` returns b"" at the end of the stream; both raise TimeoutError when the time is up. Raises HungUp, TooSlow,
    Unfit, and what else these two raise.
    """
    received = b""
    try:
        send(_greeting(startup))
        while piece := receive():
            received += piece
            start = received.find(MARK)  # a shell's greeting may come before it
            if start >= 0 and b"\n" in received[start:]:
                answer, _, frames = received[start + len(MARK) :].partition(b"\n")
                if answer == NEED:
                    send(packed())
                elif answer != HAVE:
                    raise Unfit(answer.decode(errors="replace"))
                return frames
            received = received[-GREETING_BYTES:]
    except TimeoutError:
        raise TooSlow(received) from None
    raise HungUp(received)


def _greeting(startup: Startup) -> bytes:
    """The two lines with which the exchange begins."""
    if startup.held:
        return startup.program + f"{startup.held}\n".encode()
    return startup.program + f"{digest()} {startup.asked}\n".encode()


def too_slow(name: str, seconds: float, output: bytes, stderr: bytes, startup: Startup) -> ConnectError:
    """The error for a node whose bootstrap has not answered in time, and has printed this instead."""
    said = _quoted(_last(output.rpartition(ENTERED)[2]), _last(stderr), startup)
    asks = "does a start-up file of its shell ask for something"
    if said:
        text = f"the agent did not start within {seconds:g} s (it said: {said}); {asks}"
    else:
        text = f"the agent did not start within {seconds:g} s; is the host overloaded, {asks}"
    if startup.enter:
        text += f", or {shlex.join(startup.enter)} wait for something"
    return ConnectError("timed out", name, f"{text}, or does its sshd run another command (ForceCommand)?")


def not_started(name: str, code: int, output: bytes, stderr: bytes, startup: Startup) -> ConnectError:
    """The error for a node whose shell, or what was to enter its container, exited with `code` instead.

    A negative code: the connection ended before it was known.
    """
    _, entered, rest = output.rpartition(ENTERED)
    text = _quoted(rest, stderr, startup)
    quoted = f" ({text})" if text else ""
    if startup.enter and not entered:
        failed = f"{shlex.join(startup.enter)} exited with code {code} before the agent started{quoted}"
        return ConnectError("enter", name, f"{failed}; is the program there, and what it enters running?")
    if code == CUT and startup.enter:
        text = f"{shlex.join(startup.enter)} doesn't pass standard input on{quoted}; docker and podman need -i"
        return ConnectError("enter", name, text)
    if code == CUT:
        text = f"a start-up file of its shell (~/.bashrc?) read what was meant for the agent{quoted}"
        return ConnectError("protocol", name, f"{text}; let it read only in interactive shells")
    if code in _CANT_RUN:
        python, todo = startup.python, "name another one with --python"
        if not startup.exact and python != "python3":
            python, todo = f"{python} or python3", "install Python 3.10 or newer, or name one with --python"
        return ConnectError("no Python", name, f"can't run {python} there{quoted}; {todo}")
    ended = f"its shell exited with code {code}" if code >= 0 else "the connection ended"
    return ConnectError("protocol", name, f"{ended} before the agent started{quoted}")


def in_one_line(output: bytes) -> str:
    """What a node has printed, for a message: each line once."""
    return _joined(output.decode(errors="replace").split("\n"))


def _joined(lines: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, map(str.strip, lines))))[:_QUOTED]


def _last(output: bytes) -> bytes:
    """The last whole lines, for a half of what is quoted."""
    part = output[-_QUOTED // 2 :]
    return part if part == output else part.partition(b"\n")[2] or part


def _quoted(output: bytes, stderr: bytes, startup: Startup) -> str:
    """What a node has printed, without what it repeats of ours: a shell may read and print that."""
    sent = _plain(_greeting(startup).decode() + startup.words[-1])
    lines = (output + b"\n" + stderr).decode(errors="replace").split("\n")
    own = [_up_to(sent, line) for line in lines]
    return _joined(lines if own == lines else [line for line in own if _plain(line) not in sent])


def _up_to(sent: str, line: str) -> str:
    """The part of the line before it repeats what was sent."""
    plain = _plain(line)
    for start in range(len(plain) - _OURS + 1):
        if plain[start : start + _OURS] in sent:
            return plain[:start]
    return line


def _plain(text: str) -> str:
    """Without backslashes, of which a shell's `read` takes some away."""
    return text.replace("\\", "").strip()
