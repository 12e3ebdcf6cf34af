"""The debug channel: the agent's Unix socket, over which it asks ranks for stacks, collectives and a debugger."""

import _socket
import json
import os
import struct
from collections.abc import Callable
from typing import Any, TypedDict

from ... import linux
from ...protocol.events import Arrivals, Awaited, Entered
from ...protocol.typed import typed
from ..poll import Poll

_BACKLOG = 1024
_MAX_BYTES = 1 << 18  # of a compressed answer
_MAX_UNPACKED = 8 << 20


def _ignore(*_: object) -> None:
    """Where nobody has asked."""


RankFrame = tuple[str, int, str]  # file, line, function


class RankThread(TypedDict):
    """A thread, innermost frame first."""

    name: str
    frames: list[RankFrame]


class StackAnswer(TypedDict, total=False):
    """To a request for stacks; `number` is -1 if the rank could not answer any request, because of a `problem`."""

    number: int
    thread: int  # the one that answers
    beats: int
    threads: list[RankThread]
    collectives: Entered
    awaits: Awaited
    problem: str


class SampleAnswer(TypedDict):
    """What a rank does: its main thread's frames; the number of the collective that it waits in, and for how long."""

    sample: int  # the number of the request
    frames: list[RankFrame]
    mpi: bool
    wait: tuple[int, float] | None
    gpus: list[str]


class EnteredAnswer(TypedDict):
    """The collectives that a rank has entered since it was asked last, and the time to which theirs relate."""

    entered: list[Arrivals]
    now: int


class DebuggerAnswer(TypedDict):
    """Why the rank's debugger does not listen; "" if it does."""

    debugger: str


# By what tells them apart.
_ANSWERS = {"debugger": DebuggerAnswer, "sample": SampleAnswer, "entered": EnteredAnswer, "number": StackAnswer}


class DebugChannel:
    """Each rank connects once and is queried over that connection; the kernel vouches for its pid."""

    def __init__(self, poll: Poll, folder: str, drop: Callable[[int, str], None] = _ignore) -> None:
        """Listen in the job's private folder. If that fails, `path` is "" and no rank connects.

        `drop` is told why the answer of a pid can't be used.
        """
        self.path = ""
        self._poll = poll
        self._drop = drop
        self.on_connect: Callable[[int], None] = _ignore  # called with the pid of a rank that can be asked from now on
        self.on_debugger: Callable[[int, str], None] = _ignore  # with a pid, and why its debugger does not listen
        self.on_sample: Callable[[int, SampleAnswer], None] = _ignore  # with a pid, and what it does
        self.on_entered: Callable[[int, EnteredAnswer], None] = _ignore  # with a pid, and its latest collectives
        self._answers: dict[int, StackAnswer] = {}  # by pid: the last answer
        self._connections: dict[int, _socket.socket] = {}  # by pid
        self._unanswered: dict[int, int] = {}  # by pid: the first question since the last answer
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        path = os.path.join(folder, "answers")
        try:
            linux.by_short_path(path, self._socket.bind)
            self._socket.listen(_BACKLOG)
        except OSError:
            return
        self.path = path
        self._socket.setblocking(False)
        poll.watch(self._socket.fileno(), lambda _: self._accept())

    def _accept(self) -> None:
        try:
            connection = linux.accepted(self._socket)
        except OSError:
            return
        connection.setblocking(False)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
        self._disconnect(pid)
        self._connections[pid] = connection
        self._poll.watch(connection.fileno(), lambda _: self._receive(pid))
        self.on_connect(pid)

    def _receive(self, pid: int) -> None:
        data = linux.read_now(self._connections[pid].fileno(), _MAX_BYTES)
        if data is None:
            return
        self._unanswered.pop(pid, None)
        if not data:
            self._disconnect(pid)
            return
        import zlib  # late: loading the library would delay the start of the ranks

        try:
            said = json.loads(zlib.decompressobj().decompress(data, _MAX_UNPACKED))
            kind = next((kind for key, kind in _ANSWERS.items() if key in said), StackAnswer)
            answer = typed(kind, said)
        except (ValueError, TypeError, RecursionError, zlib.error) as error:
            self._drop(pid, str(error))
            return
        if kind is DebuggerAnswer:
            self.on_debugger(pid, answer["debugger"])
        elif kind is SampleAnswer:
            self.on_sample(pid, answer)
        elif kind is EnteredAnswer:
            self.on_entered(pid, answer)
        else:
            self._answers[pid] = answer

    def _disconnect(self, pid: int) -> None:
        self._unanswered.pop(pid, None)
        connection = self._connections.pop(pid, None)
        if connection is not None:
            self._poll.unwatch(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Stop listening, and disconnect all ranks."""
        for pid in list(self._connections):
            self._disconnect(pid)
        self._poll.unwatch(self._socket.fileno())
        self._socket.close()
        if self.path:
            os.unlink(self.path)

    def ask(self, pid: int, number: int, *, everything: bool) -> bool:
        """Send a rank question `number`; False if it can't be asked."""
        self._answers.pop(pid, None)
        if not self._send(pid, {"number": number, "all": everything}):
            return False
        self._unanswered.setdefault(pid, number)
        return True

    def ask_for_debugger(self, pid: int, path: str) -> bool:
        """Have a rank's debugger listen at this socket; False if it can't be asked."""
        return self._send(pid, {"debug": path})

    def ask_for_sample(self, pid: int, number: int) -> bool:
        """Ask a rank what it does; False if it can't be asked."""
        return self._send(pid, {"sample": number})

    def ask_what_it_entered(self, pid: int) -> bool:
        """Ask a rank which collectives it has entered since it was asked last; False if it can't be asked."""
        return self._send(pid, {"entered": True})

    def _send(self, pid: int, question: dict[str, Any]) -> bool:
        try:
            self._connections[pid].send(json.dumps(question).encode())
        except (KeyError, OSError):
            return False
        return True

    def unanswered(self, pid: int) -> int:
        """The first question since the rank's last answer; 0 if none is open, or the rank can't be asked."""
        return self._unanswered.get(pid, 0)

    def answer(self, pid: int, number: int) -> StackAnswer | None:
        """A rank's answer to question `number`; {} if it can't be asked, None if it has not answered yet."""
        if pid not in self._connections:
            return {}
        answer = self._answers.get(pid, StackAnswer())
        return answer if answer.get("number") == number else {} if answer.get("number") == -1 else None
