"""Messages between the agent and the helper with the PMIx server: tuples in marshal's format, behind their length."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")


def framed(message: tuple[Any, ...]) -> bytes:
    """A message as it is sent."""
    data = marshal.dumps(message)
    return _LENGTH.pack(len(data)) + data


def unframed(buffer: bytearray) -> Iterator[tuple[Any, ...]]:
    """The complete messages at the start of a buffer, which are removed from it."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = marshal.loads(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield message
