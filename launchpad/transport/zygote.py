"""The head's side of the zygote (agent/zygote.py), which forks and guards the agents of many nodes on this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launchpad.image import Cold, channel

if TYPE_CHECKING:
    import _socket

# How many agents are asked for at once. More may be more descriptors than can be in flight.
_MOST_ASKED = 32

_Answer = tuple[str, list[int]]


class Zygote:
    """A guard as what forks further agents, and guards them too."""

    def __init__(self, link: _socket.socket) -> None:
        """`link`: the `asks` of the guard's LocalLink."""
        self._asked = 0  # for so many agents that have not been forked yet
        self._answers: deque[_Answer] = deque()
        self._link = link
        self._link.settimeout(channel.ANSWER_SECONDS)

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
