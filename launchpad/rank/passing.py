"""Passes messages over a Unix socket, each with a descriptor or without."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any


def send(line: Any, message: bytes, fd: int = -1) -> None:
    """Send a message, with a descriptor. Whoever has gone does not get it."""
    import _socket
    import array

    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    try:
        line.sendmsg([message], ancillary)
    except (BrokenPipeError, ConnectionError):
        pass


def receive(line: Any) -> tuple[bytes, int]:
    """The next message, b"" at the end, and its descriptor or -1. Raises BlockingIOError, ConnectionError."""
    import _socket

    message, ancillary, _, _ = line.recvmsg(64, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    for _, kind, data in ancillary:
        if kind == _socket.SCM_RIGHTS:
            return message, int.from_bytes(data[:4], sys.byteorder)
    return message, -1
