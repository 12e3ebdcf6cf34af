"""What goes to the head: events at once, and the ranks' output as the link and the head's credit allow.

Output is read only when it can be sent, so memory stays bounded; events go before output, so a flood of it delays no
exit status.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

from .. import wire
from ..events import Event
from ..failures import Failure
from ..stacks import Examined
from .poll import Poll

# Bytes of output in one frame: as long as one is under way, an event waits.
CHUNK = 256 << 10

# After a read the stream rests this long, so that a rank that writes line by line is read in bulk.
REST_SECONDS = 0.002


class Stream:
    """One output stream of a rank. It is watched, ready to be read, resting, or without credit."""

    __slots__ = ("credit", "fd", "is_file", "rank", "stream")

    def __init__(self, rank: int, stream: int, fd: int, credit: int) -> None:
        self.rank = rank
        self.stream = stream
        self.fd = fd
        self.credit = credit  # bytes that the head still takes
        self.is_file = False  # all that will ever come can be read at once

    def read(self, most: int) -> bytes | None:
        """What is there now; b"" at its end; None where there is nothing yet."""
        try:
            return os.read(self.fd, most)
        except BlockingIOError:
            return None
        except OSError:  # EIO: every holder of the terminal's other side has closed it
            return b""


class Outbox:
    """The agent's writing side of the link."""

    def __init__(self, link: int, poll: Poll) -> None:
        self._link = link
        self._poll = poll
        self._events: deque[bytes] = deque()
        self._sending: list[memoryview] = []  # what is left of the frame under way
        self._streams: dict[tuple[int, int], Stream] = {}
        self._ready: deque[Stream] = deque()
        self._resting: deque[tuple[float, Stream]] = deque()
        self._draining = False
        self.broken = False  # the head reads no more

    def say(self, event: Event | Failure | Examined) -> None:
        """Send an event before all output."""
        self._events.append(wire.encode(event))

    def open(self, stream: Stream) -> None:
        """Send what comes from this stream, until its end."""
        self._draining = False
        self._streams[stream.rank, stream.stream] = stream
        self._poll.watch_once(stream.fd, lambda _: self._ready.append(stream))

    def send_file(self, stream: Stream) -> None:
        """Send a file that has its full size, as if it were output."""
        stream.is_file = True
        self._streams[stream.rank, stream.stream] = stream
        self._ready.append(stream)

    def credit(self, rank: int, number: int, size: int) -> None:
        """The head takes so many bytes more of this stream."""
        stream = self._streams.get((rank, number))
        if stream is None:
            return
        exhausted = stream.credit <= 0
        stream.credit += size
        if exhausted and stream.credit > 0:
            self._ready.append(stream)

    def drain(self) -> None:
        """Nobody is left who could write: what is in the pipes now is all there is."""
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
        """Whether all was written to the link."""
        return not (self._streams or self._events or self._sending)

    @property
    def patience(self) -> float:
        """Seconds until `pump` has something to do without any event; -1 for never."""
        if self._ready and not self._sending:
            return 0
        return max(0.0, self._resting[0][0] - time.monotonic()) if self._resting else -1

    def pump(self) -> None:
        """Write until the link takes no more: events first, then output, a chunk of each stream in turn."""
        now = time.monotonic()
        while self._resting and self._resting[0][0] <= now:
            self._poll.arm(self._resting.popleft()[1].fd)
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

    def _next_frame(self) -> bool:
        if self._events:
            self._sending = [memoryview(self._events.popleft())]
            return True
        while self._ready:
            stream = self._ready.popleft()
            data = stream.read(min(CHUNK, stream.credit))
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
