"""Passes calls on to the ranks of a session on a node that is not the head's, and their outcomes to the head.

On its own machine the head does this itself (api/session.py). A rank connects to a socket, says its number, and gets
each call as a descriptor of a file in memory. It answers likewise; what is in those files goes to the head as the
rank's RESULT stream.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from ... import linux
from ...protocol.commands import NextCall
from ...protocol.events import RESULT
from ...rank.call_server import END, NAME_BYTES, admitted
from ...rank.passing import receive, send
from ..outbox import Outbox, OutputStream
from ..poll import Poll


class Outcomes(OutputStream):
    """What a rank's calls have come to, one file after the other."""

    __slots__ = ("_file", "_line")

    def __init__(self, rank: int, line: socket.socket, credit: int) -> None:
        super().__init__(rank, RESULT, os.dup(line.fileno()), credit)  # the outbox closes it
        self.is_file = True
        self._line = line
        self._file = -1

    def read(self, size: int) -> bytes | None:
        """Up to `size` bytes of the next outcome; b"" when the rank has gone, None if there is nothing yet."""
        while True:
            if self._file < 0:
                try:
                    message, self._file = receive(self._line)
                except BlockingIOError:
                    return None
                except OSError:
                    return b""
                if self._file < 0:
                    if not message:
                        return b""
                    continue
            if data := os.read(self._file, size):
                return data
            os.close(self._file)
            self._file = -1


class CallLines:
    """The sockets of a node's ranks."""

    def __init__(self, poll: Poll, outbox: Outbox, ranks: Collection[int], window: int) -> None:
        self.name = f"launchpad-{os.urandom(NAME_BYTES).hex()}"
        self._poll = poll
        self._outbox = outbox
        self._awaited = set(ranks)
        self._window = window
        self._lines: dict[int, socket.socket] = {}
        self._call = -1  # the file of a call that is not complete yet
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(len(ranks))
        poll.watch(self._listener.fileno(), lambda _: self._accept())

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        rank = admitted(line)
        if rank not in self._awaited:
            line.close()
            return
        self._awaited.discard(rank)
        line.setblocking(False)
        self._lines[rank] = line
        self._outbox.open(Outcomes(rank, line, self._window))

    def admitted(self, rank: int) -> bool:
        """Whether the rank has connected: its outcomes come over the socket."""
        return rank in self._lines

    def take(self, piece: NextCall) -> None:
        """Add to a call; pass it on once it is complete."""
        if self._call < 0:
            self._call = os.memfd_create("launchpad-call")
        linux.write_all(self._call, piece.data)
        if piece.left:
            return
        for line in self._lines.values():
            send(line, b"c", self._call)
        os.close(self._call)
        self._call = -1

    def end_call(self, rank: int) -> None:
        """Have a rank exit as the call that failed in it would have made it exit."""
        if rank in self._lines:
            send(self._lines[rank], END)

    def close(self) -> None:
        """There are no more calls."""
        if self._listener.fileno() >= 0:
            self._poll.unwatch(self._listener.fileno())
            self._listener.close()
        for line in self._lines.values():
            try:
                line.shutdown(socket.SHUT_WR)  # its outcomes are still read
            except OSError:
                pass
