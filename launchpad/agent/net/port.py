"""The job's rendezvous port: reserved from the start, and listened on when a rank asks for the store."""

from __future__ import annotations

import _socket
import contextlib
import os
import time

from ... import linux
from ...protocol.events import PortsHeld

BACKLOG = 4096  # the kernel caps it at net.core.somaxconn

ADDRESS = "127.0.0.1"


class Port:
    """A reserved port: bound but not listening. With SO_REUSEADDR, rank 0 can still listen on it, and no one else.

    Where rank 0 serves the store, torch listens on all addresses, so the port is reserved on all of them: another
    process could otherwise be given the same port at another address.
    """

    def __init__(self, wanted: int, address: str = ADDRESS) -> None:
        """`wanted`: 0 for any free port. `number` is the port, or -1 if the wanted one is in use."""
        self.address = address
        self._socket: _socket.socket | None = None
        self._everywhere: _socket.socket | None = None
        self.number = wanted
        try:
            if wanted == 0:
                self._everywhere = bound(0, "")
                self.number = self._everywhere.getsockname()[1]
            # A socket keeps its port after it stops listening only if it was bound to it by number.
            self._socket = bound(self.number, address)
        except OSError:
            self.number = -1
            return
        if self._everywhere is None:
            with contextlib.suppress(OSError):  # in use at another address, which matters only to torch in rank 0
                self._everywhere = bound(self.number, "")

    def listen(self) -> bool:
        """Start to listen. Returns False if another process is already listening there."""
        assert self._socket is not None
        try:
            self._socket.listen(BACKLOG)
        except OSError:
            return False
        return True

    def stop_listening(self) -> None:
        """Go back to only reserving the port. Copies of this socket in other processes stop listening too."""
        assert self._socket is not None
        try:
            self._socket.shutdown(_socket.SHUT_RDWR)
        except OSError:  # it was not listening
            pass

    def fileno(self) -> int:
        """The socket's descriptor."""
        assert self._socket is not None
        return self._socket.fileno()

    def close(self) -> None:
        """Release the port."""
        for held in (self._socket, self._everywhere):
            if held is not None:
                held.close()


def bound(number: int, address: str) -> _socket.socket:
    """A socket that holds the port (0: any free one) at this address; "" for all IPv4 addresses. Raises OSError."""
    made = _socket.socket(linux.address_family(address) if address else _socket.AF_INET)
    try:
        made.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        made.bind((address, number))
    except OSError:
        made.close()
        raise
    return made


class FreePorts:
    """Free ports that are held for ranks."""

    def __init__(self) -> None:
        self._held: list[_socket.socket] = []

    def hold(self, count: int) -> PortsHeld:
        """Hold this many, instead of those held before."""
        for held in self._held:
            held.close()
        try:
            self._held = [bound(0, "") for _ in range(count)]
        except OSError as error:
            return PortsHeld(time.monotonic_ns(), [], error.strerror or "no port is free")
        return PortsHeld(time.monotonic_ns(), [held.getsockname()[1] for held in self._held], "")


class Bell:
    """A Unix socket in the job's private directory, on which a forked rank asks for the store."""

    def __init__(self, folder: str) -> None:
        """Raises OSError if the socket can't be created."""
        self.path = os.path.join(folder, "store")
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        linux.by_short_path(self.path, self._socket.bind)
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self.fileno = self._socket.fileno

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def answer(self, yes: bool, listener: int = -1) -> None:
        """Answer one rank that has rung. `listener`: where that rank is to serve the store itself."""
        from ...rank import passing

        try:
            caller = linux.accepted(self._socket)
        except OSError:
            return
        try:
            if yes and listener >= 0:
                passing.send(caller, b"s", listener)
            else:
                passing.send(caller, b"y" if yes else b"n")
        except OSError:  # the rank is gone
            pass
        finally:
            caller.close()
