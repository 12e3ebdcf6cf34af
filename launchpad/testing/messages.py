"""Messages between pytest, the forkserver and the ranks: pickled values, each after its length, on a stream socket.

Both ends are forks of one process, so all classes are known to both.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!Q")


def send(link: socket.socket, *words: Any) -> None:
    """Send a message. Raises OSError if the other end is gone."""
    data = _pickled(words)
    link.sendall(_LENGTH.pack(len(data)) + data)


def _pickled(words: Any) -> bytes:
    try:
        return pickle.dumps(words)
    except Exception:  # a user property that can't be pickled
        return pickle.dumps(_plain(words))


def _plain(value: Any) -> Any:
    """The value with everything replaced by its repr that can't be pickled."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


def receive(link: socket.socket) -> Any:
    """The next message, None if the other end is gone. Blocks."""
    head = _exactly(link, _LENGTH.size)
    data = _exactly(link, _LENGTH.unpack(head)[0]) if head else b""
    return pickle.loads(data) if data else None


def _exactly(link: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        try:
            chunk = link.recv(min(size, 1 << 20))
        except ConnectionError:
            chunk = b""
        if not chunk:
            return b""
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


class Incoming:
    """Puts messages together from the bytes of a non-blocking reader."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            yield message
