"""The agent's end of the node's PMIx server: starts the helper, tells it of worlds, and carries its messages."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ... import linux
from ..poll import Poll
from . import pmix_helper
from .frames import framed, unframed


class PmixServer:
    """The helper's process. `hear` is called with each of its messages, `lost` with the reason when it is gone."""

    def __init__(
        self,
        poll: Poll,
        library: str,
        environ: Mapping[str, str],
        folder: str,
        host: str,
        hear: Callable[[tuple[Any, ...]], None],
        lost: Callable[[str], None],
    ) -> None:
        """`library`: libpmix; `environ`, `folder`: the environment of the ranks, and a folder for their files.

        Raises OSError.
        """
        self._poll = poll
        self._hear = hear
        self._lost = lost
        self._why = "died"
        self._read = bytearray()
        self._unsent = b""
        os.makedirs(folder, 0o700, exist_ok=True)
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                pmix_helper.run(theirs, library, environ, folder, host, parent)
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        self._link: socket.socket | None = ours
        poll.watch(ours.fileno(), lambda _: self.catch_up())

    def send(self, *message: Any) -> None:
        """Send a message to the helper."""
        self._unsent += framed(message)
        self._write()

    def _write(self) -> None:
        if self._link is None:
            return
        fd = self._link.fileno()
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, and reading will say so
            self._unsent = b""
        self._poll.change(fd, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def catch_up(self) -> None:
        """Handle what the helper has sent so far, and go on sending."""
        if self._unsent:
            self._write()
        while self._link is not None:
            data = linux.read_now(self._link.fileno(), 1 << 16)
            if data is None:
                return
            if not data:
                self.close()
                self._lost(self._why)
                return
            self._read += data
            for message in unframed(self._read):
                if message[0] == "failed":
                    self._why = f"failed: {message[1]}"
                else:
                    self._hear(message)

    def close(self) -> None:
        """Hang up: the helper exits."""
        if self._link is not None:
            self._poll.unwatch(self._link.fileno())
            self._link.close()
            self._link = None
