"""The connections of debugger clients on this machine: one listener a rank, on the loopback address.

A client is let in only if its end of the connection belongs to the user whom we run as, or to root. Per connection, two
threads read from it and write to it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from launchpad import linux
from launchpad.errors import UsageError

ADDRESS = "127.0.0.1"

# The most bytes of a connection that are on the way to the node, and the most in one frame.
WINDOW_BYTES = 256 << 10
PIECE_BYTES = 64 << 10


class DebugListener:
    """Where the debugger of one rank can be reached."""

    def __init__(self, rank: int, port: int, came: Callable[[socket.socket], None]) -> None:
        """`port`: 0 for any free one. `came` gets each client, in a thread of ours. Raises UsageError."""
        try:
            self._socket = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise UsageError(
                f"port {port} can't be used for the debugger of rank {rank}: {os.strerror(error.errno or 0)}"
            ) from None
        self.port = int(self._socket.getsockname()[1])
        self._came = came
        threading.Thread(target=self._accept, name="debugger", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._socket.accept()
            except OSError:  # it was closed
                return
            with suppress(OSError):
                if linux.owner_of_peer(peer, client.getsockname()) in (os.getuid(), 0):
                    self._came(client)
                    continue
            client.close()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._socket.close()


class DebugClient:
    """One connection to a client."""

    def __init__(
        self,
        number: int,
        rank: int,
        connection: socket.socket,
        read: Callable[[bytes], None],
        wrote: Callable[[int], None],
    ) -> None:
        """`read` gets bytes from it, none at its end; `wrote`: how many were written to it, or dropped at its end.

        Both are called in threads of ours.
        """
        self.rank = rank
        self._socket = connection
        self._took = read
        self._wrote = wrote
        self._room = WINDOW_BYTES
        self._more_room = threading.Condition()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"debugger-{number}", daemon=True).start()

    def _read(self) -> None:
        data = b"."
        while data:
            with self._more_room:
                while self._room <= 0:
                    self._more_room.wait()
                room = self._room
            try:
                data = self._socket.recv(min(room, PIECE_BYTES))
            except OSError:
                data = b""
            with self._more_room:
                self._room -= len(data)
            self._took(data)

    def _write(self) -> None:
        while data := self._outbox.get():
            with suppress(OSError):
                self._socket.sendall(data)
            self._wrote(len(data))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also ends the thread that reads
        with self._more_room:
            self._room = WINDOW_BYTES
            self._more_room.notify()

    def write(self, data: bytes) -> None:
        """Queue bytes for the client."""
        if data:
            self._outbox.put(data)

    def credit(self, size: int) -> None:
        """The node has written so many bytes."""
        with self._more_room:
            self._room += size
            self._more_room.notify()

    def close(self) -> None:
        """Hang up, once everything is written."""
        self._outbox.put(b"")
