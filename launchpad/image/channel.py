"""Sockets between callers, keeper, images, agent and forkserver: messages of any size, with descriptors."""

from __future__ import annotations

import _socket  # socket takes 3 ms to import: it makes enumerations of all constants
import errno
import marshal  # json takes 4 ms
import os
import sys

from .. import linux
from . import place

TYPE_CHECKING = False  # typing would take as long as all the rest
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from typing import Any

    Message = dict[str, Any]

_MOST_DESCRIPTORS = 253  # SCM_MAX_FD
_INT = 4  # bytes of a C int

# The version of marshal's format: the newest that all Pythons know that may run ranks.
_FORMAT = 4

# A keeper or an image that doesn't answer for this long is stuck.
ANSWER_SECONDS = 5.0


def listen(environ: Mapping[str, str]) -> socket.socket:
    """Listen there. Raises OSError; FileExistsError if another keeper does."""
    folder = place.folder(environ)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    if not place.is_private(folder):
        raise PermissionError(1, "not a folder that only you can enter", folder)
    if connect(place.path(environ)) is not None:
        raise FileExistsError(17, "another one listens", place.path(environ))
    try:
        os.unlink(place.path(environ))
    except FileNotFoundError:
        pass
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    linux.by_short_path(place.path(environ), listener.bind)
    listener.listen(64)
    return listener


def connect(path: str) -> _socket.socket | None:
    """A connection to the keeper that listens there, if one runs as this user."""
    if not place.is_private(os.path.dirname(path)):
        return None
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.settimeout(ANSWER_SECONDS)  # or it would wait for a keeper that has been stopped to accept others
    try:
        linux.by_short_path(path, connection.connect)
        connection.settimeout(None)
        if peer(connection)[1] != os.geteuid():
            raise PermissionError
    except OSError:
        connection.close()
        return None
    return connection


def peer(connection: _socket.socket) -> tuple[int, int]:
    """The pid (0 for one of another namespace) and the user of the process at the other end."""
    pid, uid, _ = _ints(connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 3 * _INT))
    return pid, uid


def send(link: _socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message of any size with descriptors. Raises OSError."""
    memfd = os.memfd_create("launchpad-message")
    try:
        linux.write_all(memfd, marshal.dumps(message, _FORMAT))
        os.lseek(memfd, 0, os.SEEK_SET)
        rights = b"".join(fd.to_bytes(_INT, sys.byteorder) for fd in (memfd, *fds))
        link.sendmsg([b"m"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    finally:
        os.close(memfd)


def receive(link: _socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None at the end. Raises OSError (TimeoutError), ValueError."""
    fds: list[int] = []
    data, ancillary, flags, _ = link.recvmsg(1, _socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT), _socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += _ints(payload)
    if flags & _socket.MSG_CTRUNC:  # we may not have as many open
        close(fds)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not data or not fds:
        close(fds)
        return None
    try:
        with open(fds[0], "rb") as file:
            message = marshal.load(file)
        if not isinstance(message, dict):
            raise ValueError("not a message")
    except (EOFError, TypeError) as error:
        close(fds[1:])
        raise ValueError(str(error)) from None
    except BaseException:
        close(fds[1:])
        raise
    return message, fds[1:]


def _ints(data: bytes) -> list[int]:
    """The C ints in these bytes."""
    return [int.from_bytes(data[at : at + _INT], sys.byteorder, signed=True) for at in range(0, len(data), _INT)]


def receive_in_time(link: _socket.socket) -> tuple[Message, list[int]] | None:
    """Like `receive`. Once that has timed out, the other side can't send any more."""
    try:
        return receive(link)
    except TimeoutError:
        link.shutdown(_socket.SHUT_RDWR)
        came_just_now = receive(link)
        if came_just_now is None:
            raise
        return came_just_now


def close(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
