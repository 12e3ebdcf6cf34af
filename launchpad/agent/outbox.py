"""Sends to the head: events at once, and the ranks' output as fast as the link and the head's credit allow.

Output is read only when it can be sent, so memory stays bounded. Events go before output, so a flood of output delays
no exit status.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from typing import Protocol

from .. import linux
from ..protocol import wire
from ..protocol.events import Event, Fenced
from .poll import Poll

# Bytes of output in one frame: an event has to wait for the frame in flight.
CHUNK = 256 << 10

# A stream rests this long after a read, so that a rank that writes line by line is read in bulk.
REST_SECONDS = 0.002


class OutputStream:
    """One output stream of a rank. It is watched, ready to be read, resting, or out of credit."""

    __slots__ = ("credit", "fd", "is_file", "rank", "stream")

    def __init__(self, rank: int, stream: int, fd: int, credit: int) -> None:
        self.rank = rank
        self.stream = stream
        self.fd = fd
        self.credit = credit  # bytes that the head still accepts
        self.is_file = False  # a complete file: everything can be read at once

    def read(self, size: int) -> bytes | None:
        """Up to `size` bytes of what is there now; b"" at the end, None if there is nothing yet."""
        return linux.read_now(self.fd, size)


class Listener(Protocol):
    """Whoever takes events from the agent's parts."""

    def say(self, event: Event) -> None:
        """Take an event."""


class Outbox:
    """The agent's writing side of the link."""

    def __init__(self, link: int, poll: Poll) -> None:
        self._link = link
        self._poll = poll
        self._events: deque[bytes] = deque()
        self._sending: list[memoryview] = []  # the rest of the frame in flight
        self._streams: dict[tuple[int, int], OutputStream] = {}
        self._ready: deque[OutputStream] = deque()
        self._resting: deque[tuple[float, OutputStream]] = deque()
        self._draining = False
        self._fences: deque[tuple[int, dict[OutputStream, int]]] = deque()  # number; bytes to be read before it
        self.broken = False  # the head no longer reads

    def say(self, event: Event) -> None:
        """Queue an event; it goes before all output."""
        self._events.append(wire.encode(event))

    def open(self, stream: OutputStream) -> None:
        """Send what this stream yields, until its end."""
        self._draining = False
        self._streams[stream.rank, stream.stream] = stream
        self._poll.watch_once(stream.fd, lambda _: self._ready.append(stream))

    def send_file(self, stream: OutputStream) -> None:
        """Send a complete file as if it were output."""
        stream.is_file = True
        self._streams[stream.rank, stream.stream] = stream
        self._ready.append(stream)

    def credit(self, rank: int, number: int, size: int) -> None:
        """The head accepts `size` more bytes of this stream."""
        stream = self._streams.get((rank, number))
        if stream is None:
            return
        exhausted = stream.credit <= 0
        stream.credit += size
        if exhausted and stream.credit > 0:
            self._ready.append(stream)

    def fence(self, number: int) -> None:
        """Say Fenced once what the ranks have written by now is on its way."""
        written = {stream: linux.readable(stream.fd) for stream in self._streams.values() if not stream.is_file}
        written = {stream: size for stream, size in written.items() if size}
        resting = [stream for _, stream in self._resting if stream in written]
        self._resting = deque(one for one in self._resting if one[1] not in written)
        self._ready.extend(resting)
        self._fences.append((number, written))

    def drain(self) -> None:
        """Send what is left in the pipes, and close them: nobody is left to write."""
        self._draining = True
        for stream in self._streams.values():
            self._poll.unwatch(stream.fd)
            if stream.credit > 0 and stream not in self._ready:
                self._ready.append(stream)
        self._resting.clear()

    @property
    def drained(self) -> bool:
        """Whether no stream is left."""
        return not self._streams

    @property
    def empty(self) -> bool:
        """Whether everything has been written to the link."""
        return not (self._streams or self._events or self._sending)

    @property
    def deadline(self) -> float | None:
        """When `tick` has to be called even if no descriptor becomes ready."""
        if self._ready and not self._sending:
            return 0.0
        return self._resting[0][0] if self._resting else None

    def tick(self, now: float) -> None:
        """Read again from the streams that have rested, and write."""
        while self._resting and self._resting[0][0] <= now:
            self._poll.arm(self._resting.popleft()[1].fd)
        self.write()

    def write(self) -> None:
        """Write until the link is full: events first, then output, a chunk of each stream in turn."""
        while self._sending or self._next_frame():
            try:
                written = os.writev(self._link, self._sending)
            except BlockingIOError:
                written = 0
            except OSError:
                self.broken = True
                return
            while self._sending and written >= len(self._sending[0]):
                written -= len(self._sending.pop(0))
            if self._sending:
                self._sending[0] = self._sending[0][written:]
                if self._link not in self._poll:
                    self._poll.watch(self._link, lambda _: None, select.EPOLLOUT)
                return
        self._poll.unwatch(self._link)

    def flush(self, seconds: float) -> None:
        """Write the queued events, blocking for at most `seconds`."""
        deadline = time.monotonic() + seconds
        self.write()
        while (self._events or self._sending) and not self.broken:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self._link], [], left)[1]:
                return
            self.write()

    def _next_frame(self) -> bool:
        if self._events:
            self._sending = [memoryview(self._events.popleft())]
            return True
        while self._ready or self._fences:
            if self._fences and not self._fences[0][1]:
                self._sending = [memoryview(wire.encode(Fenced(time.monotonic_ns(), self._fences.popleft()[0])))]
                return True
            if not self._ready:
                return False
            stream = self._ready.popleft()
            data = stream.read(min(CHUNK, stream.credit))
            self._pass(stream, len(data or b""))
            if data:
                stream.credit -= len(data)
                header = wire.output_header(time.monotonic_ns(), stream.rank, stream.stream, len(data))
                self._sending = [memoryview(header), memoryview(data)]
                if stream.credit > 0:
                    if self._draining or stream.is_file or len(data) == CHUNK:
                        self._ready.append(stream)
                    else:
                        self._resting.append((time.monotonic() + REST_SECONDS, stream))
                return True
            if data == b"" or self._draining:
                self._poll.unwatch(stream.fd)
                os.close(stream.fd)
                del self._streams[stream.rank, stream.stream]
            else:
                self._poll.arm(stream.fd)
        return False

    def _pass(self, stream: OutputStream, size: int) -> None:
        """So many bytes of a stream were read; with none there is nothing left that was written before."""
        for _, written in self._fences:
            if stream in written:
                written[stream] -= size
                if not size or written[stream] <= 0:
                    del written[stream]
