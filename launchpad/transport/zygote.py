"""The head's side of the zygote (agent/zygote.py), which forks and guards the agents of many nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence

from launchpad.image import Cold, channel
from launchpad.transport.local import guard_command, reap, spawn

# How many agents are asked for at once. More may be more descriptors than can be in flight.
_MOST_ASKED = 32

_Answer = tuple[str, list[int]]


class Zygote:
    """A guard that has imported what agents need, and forks them."""

    def __init__(self, *, leaves: bool = False) -> None:
        """Start it. `leaves`: see LocalLink. Raises OSError."""
        self._asked = 0  # for so many agents that have not been forked yet
        self._answers: deque[_Answer] = deque()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(channel.ANSWER_SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            self._pid = spawn([*guard_command(None), "zygote"], (theirs.fileno(), null, null if leaves else 2))
        except OSError:
            self._link.close()
            raise
        finally:
            theirs.close()
            os.close(null)

    def ask_to_fork(
        self, commands: int, events: int, stderr: int, stdin_fd: int | None, _: Sequence[str], __: Mapping[str, str]
    ) -> None:
        """Ask for an agent with these ends of the link; `forked` gives the answers, in this order. Raises Cold."""
        if self._asked >= _MOST_ASKED:
            self._answers.append(self._answer())
        fds = [commands, events, stderr, *([] if stdin_fd is None else [stdin_fd])]
        try:
            channel.send(self._link, {}, fds)
        except OSError as error:
            raise Cold(f"it can't be asked ({error})") from None
        self._asked += 1

    def forked(self) -> int:
        """Wait until the next agent has been forked; returns a pidfd of it. Raises Cold."""
        why_not, fds = self._answers.popleft() if self._answers else self._answer()
        if not fds:
            raise Cold(why_not)
        return fds[0]

    def _answer(self) -> _Answer:
        self._asked -= 1
        try:
            answer = channel.receive_in_time(self._link)
        except (OSError, ValueError) as error:
            return f"it doesn't answer ({error})", []
        return ("it has ended", []) if answer is None else (str(answer[0].get("cold", "")), answer[1])

    def close(self) -> None:
        """End it, after its agents. A rank may have stopped it."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        reap(self._pid)
