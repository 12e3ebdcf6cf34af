"""The end of what a rank has written: for the verdict, for `launchpad top`, and for the sections of CI systems."""

from __future__ import annotations

from collections import deque

# How much is kept of each stream.
TAIL_BYTES = 16384

# The order is kept of so many changes from one stream to the other.
_MOST_RUNS = 256


class OutputTail:
    """The end of each stream, and in which order they came."""

    __slots__ = ("_ends", "_runs", "written")

    def __init__(self) -> None:
        self._ends: dict[int, bytes] = {}  # by stream
        self._runs: deque[tuple[int, int]] | None = None  # (stream, bytes), in order; a deque alone has 600 bytes
        self.written = 0  # bytes in all

    def add(self, stream: int, data: bytes) -> None:
        """The rank has written this."""
        self.written += len(data)
        self._ends[stream] = (self.of(stream) + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        size = len(data)
        if self._runs is None:
            self._runs = deque(maxlen=_MOST_RUNS)
        if self._runs and self._runs[-1][0] == stream:
            size += self._runs.pop()[1]
        self._runs.append((stream, size))

    def of(self, stream: int) -> bytes:
        """The end of one stream."""
        return self._ends.get(stream, b"")

    def last(self, most: int) -> bytes:
        """The last bytes of all streams, in the order in which they came; at most TAIL_BYTES."""
        pieces: list[bytes] = []
        left = {stream: len(end) for stream, end in self._ends.items()}
        for stream, size in reversed(self._runs or ()):
            taken = min(size, left[stream], most)
            end = left[stream]
            pieces.append(self._ends[stream][end - taken : end])
            left[stream] -= taken
            most -= taken
            if taken < size:  # what came before is forgotten, or not wanted
                break
        return b"".join(reversed(pieces))
