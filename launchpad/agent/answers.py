"""The agent's Unix socket, by which ranks that have made a process group can be asked for their collectives."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from .poll import Poll

_BACKLOG = 1024
_MOST_BYTES = 1 << 18  # as they are sent
_MOST_UNPACKED = 8 << 20


class Answers:
    """Ranks call once, and are asked by what they have called with. Who calls is known by the kernel's word."""

    def __init__(self, poll: Poll, folder: str) -> None:
        """The socket is made in the job's private folder; where none can be, nobody calls: `path` is ""."""
        self.path = ""
        self.said: dict[int, dict[str, Any]] = {}  # by pid: the last answer
        self._poll = poll
        self._lines: dict[int, socket.socket] = {}  # by pid
        self._unanswered: dict[int, int] = {}  # by pid: the first question since it has answered
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inside = -1
        try:
            inside = os.open(folder, os.O_PATH)
            # By way of /proc, as a socket's path may have 107 bytes at most.
            self._socket.bind(f"/proc/self/fd/{inside}/answers")
            self._socket.listen(_BACKLOG)
            self.path = os.path.join(folder, "answers")
        except OSError:
            return
        finally:
            if inside >= 0:
                os.close(inside)
        self._socket.setblocking(False)
        poll.watch(self._socket.fileno(), lambda _: self._accept())

    def _accept(self) -> None:
        try:
            line, _ = self._socket.accept()
        except OSError:
            return
        line.setblocking(False)
        pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._forget(pid)
        self._lines[pid] = line
        self._poll.watch(line.fileno(), lambda _: self._take(pid))

    def _take(self, pid: int) -> None:
        try:
            data = self._lines[pid].recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unanswered.pop(pid, None)
        if not data:
            self._forget(pid)
            return
        import zlib  # a library to be mapped, before a rank has started

        try:
            answer = json.loads(zlib.decompressobj().decompress(data, _MOST_UNPACKED))
        except (ValueError, zlib.error, RecursionError):
            return
        if isinstance(answer, dict):
            self.said[pid] = answer

    def _forget(self, pid: int) -> None:
        self._unanswered.pop(pid, None)
        line = self._lines.pop(pid, None)
        if line is not None:
            self._poll.unwatch(line.fileno())
            line.close()

    def ask(self, pid: int, number: int, *, everything: bool) -> bool:
        """Ask one; False where it can't be asked. The answer will be in `said`."""
        self.said.pop(pid, None)
        try:
            self._lines[pid].send(json.dumps({"number": number, "all": everything}).encode())
        except (KeyError, OSError):
            return False
        self._unanswered.setdefault(pid, number)
        return True

    def unanswered(self, pid: int) -> int:
        """The first question since it has answered one; 0 where it has answered, or can't be asked."""
        return self._unanswered.get(pid, 0)

    def answer(self, pid: int, number: int) -> dict[str, Any] | None:
        """What it has answered to that question; {} where it can't be asked, None where it has not answered yet."""
        if pid not in self._lines:
            return {}
        said = self.said.get(pid, {})
        return said if said.get("number") == number else {} if said.get("number") == -1 else None
