"""The head's side of the zygote (agent/zygote.py), which forks and guards the agents of many nodes on this machine."""

from __future__ import annotations

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
        self._asked = 0  # how often
        self._answers: dict[int, _Answer] = {}  # by number, until they are wanted
        self._heard = 0  # how many answers have come
        self._ended = ""  # why no more come
        self._link = link
        self._link.settimeout(channel.ANSWER_SECONDS)

    def fork(self) -> ForkedAgent:
        """What asks for one agent."""
        return ForkedAgent(self)

    def ask(self, fds: Sequence[int]) -> int:
        """Ask for an agent. Returns the number of the answer. Raises Cold."""
        if self._asked - self._heard >= _MOST_ASKED:
            self._hear()
        try:
            channel.send(self._link, {"number": self._asked}, fds)
        except OSError as error:
            raise Cold(f"it can't be asked ({error})") from None
        self._asked += 1
        return self._asked - 1

    def answer(self, number: int) -> _Answer:
        """Why there is no agent, or a pidfd of it."""
        while number not in self._answers and not self._ended:
            self._hear()
        return self._answers.pop(number, (self._ended, []))

    def _hear(self) -> None:
        if self._ended:
            return
        try:
            answer = channel.receive_in_time(self._link)
        except (OSError, ValueError) as error:
            self._ended = f"it doesn't answer ({error})"
            return
        if answer is None:
            self._ended = "it has ended"
            return
        said, fds = answer
        self._heard += 1
        self._answers[int(said["number"])] = str(said.get("cold", "")), fds


class ForkedAgent:
    """One agent of a zygote's."""

    asks: _socket.socket | None = None  # it is no guard

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._number = -1

    def ask_to_fork(
        self, commands: int, events: int, stderr: int, stdin_fd: int | None, _: Sequence[str], __: Mapping[str, str]
    ) -> None:
        """Ask for it, with these ends of the link. Raises Cold."""
        self._number = self._zygote.ask([commands, events, stderr, *([] if stdin_fd is None else [stdin_fd])])

    def forked(self) -> int:
        """Wait until it has been forked; returns a pidfd of it. Raises Cold."""
        why_not, fds = self._zygote.answer(self._number)
        if not fds:
            raise Cold(why_not)
        return fds[0]
