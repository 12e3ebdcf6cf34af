"""The job's rendezvous port: held from the start, listened on when a rank asks for the store."""

from __future__ import annotations

import os
import socket

BACKLOG = 4096  # the kernel's own limit (net.core.somaxconn) cuts it

ADDRESS = "127.0.0.1"


class Port:
    """Bound and not listening, with SO_REUSEADDR: nobody is given this port, and rank 0 can still listen on it."""

    def __init__(self, wanted: int, address: str = ADDRESS) -> None:
        """`wanted` may be 0 for any that is free. `number` is the port, -1 where the wanted one is taken."""
        self.address = address
        self._socket: socket.socket | None = None
        try:
            first = _bound(wanted, address)
            self.number: int = first.getsockname()[1]
            # Only a port that was asked for by its number is kept when a socket stops listening.
            self._socket = _bound(self.number, address) if wanted == 0 else first
            if wanted == 0:
                first.close()
        except OSError:
            self.number = -1

    def listen(self) -> bool:
        """Begin to listen; False where another process does by now."""
        assert self._socket is not None
        try:
            self._socket.listen(BACKLOG)
        except OSError:
            return False
        return True

    def stop_listening(self) -> None:
        """Hold the port as at first. Who else has this socket has it no more as a listener."""
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was not listening
            pass

    def fileno(self) -> int:
        """The socket's descriptor."""
        assert self._socket is not None
        return self._socket.fileno()

    def close(self) -> None:
        """Hold it no more."""
        if self._socket is not None:
            self._socket.close()


def _bound(number: int, address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, number))
    except OSError:
        made.close()
        raise
    return made


class Bell:
    """A Unix socket in the job's private folder, by which a forked rank asks for the store."""

    def __init__(self, folder: str) -> None:
        """Raises OSError where none can be made."""
        self.path = os.path.join(folder, "store")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inside = os.open(folder, os.O_PATH)
        try:
            # By way of /proc, as a socket's path may have 107 bytes at most.
            self._socket.bind(f"/proc/self/fd/{inside}/store")
            self._socket.listen(BACKLOG)
        finally:
            os.close(inside)
        self._socket.setblocking(False)
        self.fileno = self._socket.fileno

    def answer(self, yes: bool) -> None:
        """Answer one who has rung."""
        try:
            caller, _ = self._socket.accept()
        except OSError:
            return
        with caller:
            try:
                caller.send(b"y" if yes else b"n")
            except OSError:  # it is gone
                pass
