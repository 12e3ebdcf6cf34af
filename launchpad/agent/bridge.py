"""Joins a connection to a node with what holds a job's agent there (agent/holder.py), until one of them ends.

A head that comes back sends this file as text, as the first line on the link (transport/ssh/bundle.py), which saves the
node the import of an agent. So it imports nothing of ours, and even Python 3.6 can run it. It doesn't import `socket`,
`signal` and `typing` either, each of which takes as long as a Python's whole start.
"""

import io
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from typing import NoReturn
else:
    import _signal as signal
    import _socket as socket

# The name of the holder's socket in its folder.
SOCKET = "link"

# How much to read or write at once.
_PIECE_BYTES = 256 << 10

# Schedulers and init systems send these to every process of a job: the holder decides what ends it.
_OUTLIVED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main(stdin: io.FileIO) -> "NoReturn":
    """Read from the second line, in hexadecimal, what to answer, and then what `join` takes. Never returns."""
    answer, folder, greeting, farewell = (bytes.fromhex(word) for word in stdin.readline().decode().split())
    _write(1, answer)
    join(os.fsdecode(folder), greeting, farewell)


def join(folder: str, greeting: bytes, farewell: bytes) -> "NoReturn":
    """Greet the holder in this folder, and pass on what both sides say. Without one, say farewell. Never returns."""
    for signum in _OUTLIVED:
        signal.signal(signum, signal.SIG_IGN)
    holder = socket.socket(socket.AF_UNIX)
    try:
        os.chdir(folder)
        holder.connect(SOCKET)  # a whole path may be too long
        _write(holder.fileno(), greeting)
    except OSError:
        try:
            _write(1, farewell)
        finally:
            os._exit(1)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(holder.fileno(), select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                data = os.read(fd, _PIECE_BYTES)
                if data:
                    _write(holder.fileno() if fd == 0 else 1, data)
                elif fd == 0:  # the holder decides whether that is the end
                    poll.unregister(0)
                    holder.shutdown(socket.SHUT_WR)
                else:
                    os._exit(0)
    except OSError:
        os._exit(0)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
