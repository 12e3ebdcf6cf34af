"""Frames that the head may not have yet: numbered, in a file that has no name, so that it ends with the process."""

from __future__ import annotations

import os
import tempfile

from .. import linux

# So much that is not needed any more may stay in the file before the rest is copied into a new one.
STALE_BYTES = 32 << 20

_PIECE_BYTES = 1 << 20


class Backlog:
    """A queue of frames; one that was taken out stays until the head has acknowledged it."""

    def __init__(self, folder: str) -> None:
        """The file is in this folder's file system. Raises OSError."""
        self._folder = folder
        self._fd = _file_in(folder)
        self._sizes: list[int] = []  # of the frames that are kept
        self._first = 0  # the number of the first of them
        self._next = 0  # how many of them have been taken out
        self._start = self._end = self._read = 0  # bytes in the file: where they begin, end, and are read next

    @property
    def size(self) -> int:
        """In bytes."""
        return self._end - self._start

    @property
    def waiting(self) -> bool:
        """Whether there are frames to take out."""
        return self._next < len(self._sizes)

    @property
    def first(self) -> int:
        """The number of the first frame that is kept, which is how many have been acknowledged."""
        return self._first

    def add(self, frame: bytes) -> None:
        """Keep a frame. Raises OSError if there is no room for it; then nothing has changed."""
        left, at = memoryview(frame), self._end
        while left:
            written = os.pwrite(self._fd, left, at)
            left, at = left[written:], at + written
        self._sizes.append(len(frame))
        self._end = at

    def take(self, most: int) -> bytes:
        """The next frames: at least one, if there is one, and no more bytes than this besides."""
        upto, size = self._next, 0
        while upto < len(self._sizes) and (not size or size + self._sizes[upto] <= most):
            size += self._sizes[upto]
            upto += 1
        data = os.pread(self._fd, size, self._read)
        self._next, self._read = upto, self._read + size
        return data

    def rewind(self, count: int) -> None:
        """Take those after the first so many of all out once more. Raises ValueError if they are not there."""
        at = self._position(count)
        self._next, self._read = at, self._start + sum(self._sizes[:at])

    def acknowledge(self, count: int) -> None:
        """The head has so many frames, of all that there have been. Raises ValueError if it can't."""
        done = self._position(count)
        self._start += sum(self._sizes[:done])
        del self._sizes[:done]
        self._first, self._next, self._read = count, max(0, self._next - done), max(self._read, self._start)
        if not self._sizes:
            os.ftruncate(self._fd, 0)
            self._start = self._end = self._read = 0
        elif self._start > STALE_BYTES:
            self._move()

    def _position(self, count: int) -> int:
        """Of those that are kept. Raises ValueError."""
        at = count - self._first
        if not 0 <= at <= len(self._sizes):
            raise ValueError(f"{count} is not between {self._first} and {self._first + len(self._sizes)}")
        return at

    def _move(self) -> None:
        """Copy what is kept into a new file."""
        try:
            fd = _file_in(self._folder)
        except OSError:  # later, perhaps
            return
        try:
            at = self._start
            while piece := os.pread(self._fd, min(_PIECE_BYTES, self._end - at), at):
                linux.write_all(fd, piece)
                at += len(piece)
        except OSError:
            os.close(fd)
            return
        os.close(self._fd)
        self._fd, self._read = fd, self._read - self._start
        self._start, self._end = 0, self._end - self._start

    def close(self) -> None:
        """Forget all."""
        os.close(self._fd)


def _file_in(folder: str) -> int:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno())
