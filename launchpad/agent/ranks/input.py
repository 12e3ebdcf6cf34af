"""Standard input of the node's ranks: one has the job's, from here or in frames from the head, the others have none."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from ... import linux
from ...protocol.commands import Start
from ...protocol.events import StdinTaken, StdinUnused
from ..outbox import Outbox
from ..part import AgentHub
from ..poll import Poll
from . import rank

# What a terminal takes for the end of input (Ctrl-D), where it is in line mode.
_END_OF_INPUT = b"\x04"


class Input:
    """What each rank reads."""

    def __init__(self, hub: AgentHub, own: int | None) -> None:
        """`own`: the descriptor that the rank with the job's input gets, if the head is on this machine."""
        self._hub = hub
        self._own = own
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._feed: _Feed | None = None
        self._reader = -1  # the rank that has the job's input; -1: none
        self._sent = False  # it comes in frames
        self._typed = False  # a person can type it
        self._size: list[int] = []  # of that rank's terminal

    def starting(self, start: Start) -> None:
        """Ranks are about to start."""
        self._sent = start.sends_input
        self._reader = start.stdin_rank if self._sent or self._own is not None else -1
        self._typed = start.typed
        self._size = start.terminal

    def take(self, data: bytes) -> None:
        """Pass on bytes from the head's standard input."""
        if self._feed is not None:
            self._feed.take(data)

    def is_typed(self, number: int) -> bool:
        """Whether a person can type what this rank reads."""
        return self._typed and number == self._reader

    def terminal(self, number: int) -> list[int]:
        """The size of this rank's terminal; [] if it has none."""
        return self._size if number == self._reader else []

    def open(self, number: int, outlets: rank.Outlets) -> None:
        """Have what the head sends written to where this rank will read it, if it will. Raises OSError."""
        if number != self._reader or not self._sent:
            return
        if os.isatty(outlets.rank_stdout):
            if self._feed is not None:
                self._feed.close()
            self._feed = _Feed(self._hub.poll, self._hub.outbox, outlets)
        elif self._feed is None:
            self._feed = _Feed(self._hub.poll, self._hub.outbox)

    def descriptor(self, number: int, outlets: rank.Outlets) -> int:
        """What becomes this rank's standard input."""
        if number != self._reader:
            return self._null
        if self._sent:
            assert self._feed is not None
            return self._feed.reader if self._feed.reader >= 0 else outlets.rank_stdout
        assert self._own is not None
        return self._own

    def report_unused(self) -> None:
        """The job is over, and nobody is left who could read what the head sent."""
        if self._feed is not None:
            self._hub.outbox.say(StdinUnused(time.monotonic_ns(), self._feed.unread))


class _Feed:
    """Standard input for a rank whose head is on another machine: writes what arrives in frames.

    The head sends more bytes once it hears that the previous ones were written.
    """

    def __init__(self, poll: Poll, outbox: Outbox, terminal: rank.Outlets | None = None) -> None:
        """`terminal`: the outlets of the rank that is to read what is written, if they are a pseudo-terminal.

        Otherwise `reader` is the end of a pipe, for one rank after the other.
        """
        self._poll = poll
        self._outbox = outbox
        if terminal is None:
            self.reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._end = b""
        else:
            self.reader = -1
            self._writer = os.dup(terminal.stdout)
            self._end = _END_OF_INPUT
        self._backlog: deque[memoryview] = deque()

    def take(self, data: bytes) -> None:
        """Write these bytes as room permits. Empty data is the end, once the backlog is written."""
        if self._writer >= 0:
            self._backlog.append(memoryview(data or self._end))
            self._write()

    @property
    def unread(self) -> int:
        """How many of the bytes that were written no rank has read."""
        return linux.readable(self.reader) if self.reader >= 0 else 0

    def close(self) -> None:
        """Write no more."""
        if self._writer < 0:
            return
        self._poll.unwatch(self._writer)
        os.close(self._writer)
        self._writer = -1
        self._backlog.clear()

    def _write(self) -> None:
        taken = 0
        while self._backlog:
            data = self._backlog[0]
            if not data:
                self.close()
                break
            try:
                written = os.write(self._writer, data)
            except BlockingIOError:
                if self._writer not in self._poll:
                    self._poll.watch(self._writer, lambda _: self._write(), select.EPOLLOUT)
                break
            except OSError:  # the rank has closed its terminal
                written = len(data)
            taken += written
            self._backlog[0] = data[written:]
            if written == len(data):
                self._backlog.popleft()
        else:
            self._poll.unwatch(self._writer)
        if taken:
            self._outbox.say(StdinTaken(time.monotonic_ns(), taken))
