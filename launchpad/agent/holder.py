"""Holds the link of a node's agent while the head is away (--keep-running): ranks go on, and what they say waits.

On the node there are, from the head's end: the bridge, which sshd has started and which ends with the connection; the
holder, in a session of its own, to which each later bridge connects; and the guard with the agent, which know nothing
of all this. Whoever wants the agent's frames must know the job's secret, and be able to enter the holder's folder.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import time
from math import inf
from typing import Any, NoReturn

from .. import linux
from ..protocol import wire
from ..protocol.commands import EventsTaken, LetGo, Resume, Start
from ..protocol.events import AgentFailed, CommandsTaken, HoldEnded, LinkHeld
from . import bridge
from .backlog import Backlog
from .host import processes
from .poll import Poll, earliest
from .ranks import rundir

# What is kept at most for a head that is away. The ranks wait when there is more, as for a slow reader.
KEPT_BYTES = 256 << 20

# For how long an agent is kept at most whose ranks were not started: nobody could take them over.
_BEFORE_SECONDS = 30.0

# How much to read or write at once.
_PIECE_BYTES = 256 << 10

# How long the head has to fetch the last frames once it has hung up, and how often to try again on a full disk.
_LAST_SECONDS = 5.0
_RETRY_SECONDS = 1.0

# Of an agent that says nothing at all, how much of what stands in its standard error is passed on.
_STDERR_BYTES = 2000

_STDERR = "stderr"


def begin(seconds: float, secret: str) -> None:
    """Fork into bridge, holder and guard. Returns in the guard only, whose link is at its descriptors 0 and 1.

    `seconds`: for how long the agent is kept after the head was last heard.
    """
    processes.close_inherited(keep=())
    try:
        folder = rundir.create()
        listener = _listen(folder)
    except OSError as error:
        _end(str(error))
    if os.fork() > 0:
        listener.close()
        bridge.join(folder, wire.encode(Resume(secret, 0, -1)), b"")
    os.setsid()
    processes.outlive_signals()
    ours, its = socket.socketpair()
    guard = os.fork()
    if guard == 0:
        stderr = os.open(os.path.join(folder, _STDERR), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, standard in ((its.fileno(), 0), (its.fileno(), 1), (stderr, 2)):
            os.dup2(fd, standard)
        for opened in (listener, ours, its):
            opened.close()
        os.close(stderr)
        processes.heed_signals()
        return
    its.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # sshd waits for their end
        os.dup2(nothing, standard)
    os.close(nothing)
    try:
        Holder(ours, guard, listener, folder, secret, seconds).run()
    finally:
        rundir.remove(folder)
        os._exit(0)


def _listen(folder: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    linux.by_short_path(os.path.join(folder, bridge.SOCKET), listener.bind)
    listener.listen(8)
    return listener


def _end(reason: str) -> NoReturn:
    try:
        linux.write_all(1, wire.encode(HoldEnded(time.monotonic_ns(), reason)))
    finally:
        os._exit(1)


class _Bridge:
    """The connection to one, which may not have said yet that it knows the secret."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.received = bytearray()
        self.knows = False
        self.ended = False  # nothing else comes from it
        self.out = bytearray()  # whole frames

    def receive(self) -> list[tuple[Any, bytes]] | None:
        """The frames that have come; None at the end. Raises WireError."""
        data = linux.read_now(self.link.fileno(), _PIECE_BYTES)
        if data is None:
            return []
        if not data:
            return None
        self.received += data
        return wire.frames(self.received)

    def flush(self) -> bool:
        """Send what fits. Returns whether the far end still takes it."""
        try:
            while self.out:
                del self.out[: self.link.send(memoryview(self.out)[:_PIECE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class Holder:
    """Between an agent, and one bridge after the other."""

    def __init__(
        self, agent: socket.socket, guard: int, listener: socket.socket, folder: str, secret: str, seconds: float
    ) -> None:
        """`guard`: its pid; `seconds`: how long to keep the agent without a head."""
        self._agent = agent
        self._guard = guard
        self._listener = listener
        self._folder = folder
        self._secret = secret.encode()
        self._seconds = min(seconds, _BEFORE_SECONDS)
        self._after_start = seconds
        self._poll = Poll()
        self._backlog = Backlog(folder)
        self._from_agent = bytearray()
        self._unfiled: list[bytes] = []  # frames for which there was no room
        self._to_agent = bytearray()
        self._commands = 0  # from the head
        self._connections: dict[int, _Bridge] = {}
        self._head: _Bridge | None = None
        self._heard = time.monotonic()  # when the head was
        self._agent_gone = False
        self._let_go = False  # we have hung up on the agent
        self._closes_at: float | None = None  # when we wait no more, for it or for the head

    def run(self) -> None:
        """Until the agent has ended and the head knows it, or the head was away for too long."""
        self._agent.setblocking(False)
        self._poll.watch(self._agent.fileno(), self._on_agent)
        self._poll.watch(self._listener.fileno(), self._on_knock)
        while not self._over():
            self._poll.wait(self._deadline)
            if self._unfiled:
                self._file([])
            if not self._let_go and time.monotonic() >= self._heard + self._seconds:
                self._hang_up_on_agent()
            elif self._let_go and not self._agent_gone and time.monotonic() >= (self._closes_at or inf):
                self._closes_at = None
                with contextlib.suppress(OSError):
                    self._agent.shutdown(socket.SHUT_RDWR)  # the guard kills an agent that is stuck
            self._send()
        self._backlog.close()

    @property
    def _deadline(self) -> float | None:
        deadline = self._closes_at if self._let_go else self._heard + self._seconds
        return earliest((deadline, time.monotonic() + _RETRY_SECONDS if self._unfiled else None))

    def _over(self) -> bool:
        """Whether there is nothing left to do."""
        if not self._agent_gone:
            return False
        head, backlog = self._head, self._backlog
        left = backlog.waiting or (head is not None and head.out) if self._let_go else backlog.size
        told = head is not None and not left and not self._unfiled
        return told or (self._let_go and time.monotonic() >= (self._closes_at or 0.0))

    # The agent.

    def _on_agent(self, fd: int) -> None:
        data = linux.read_now(fd, _PIECE_BYTES)
        if data is None:
            return
        if data:
            self._from_agent += data
            try:
                self._file([frame for _, frame in wire.frames(self._from_agent)])
            except wire.WireError as error:
                self._file([wire.encode(AgentFailed(time.monotonic_ns(), f"its agent sent invalid data: {error}"))])
                self._hang_up_on_agent()
            return
        self._poll.unwatch(fd)
        self._agent.close()
        self._agent_gone = True
        self._closes_at = time.monotonic() + _LAST_SECONDS
        os.waitpid(self._guard, 0)
        silent = not self._backlog.first and not self._backlog.size
        self._file([*(self._last_words() if silent else []), wire.encode(HoldEnded(time.monotonic_ns(), ""))])

    def _last_words(self) -> list[bytes]:
        """Why an agent has never come up."""
        with open(os.path.join(self._folder, _STDERR), errors="replace") as file:
            text = "; ".join(filter(None, map(str.strip, file.read()[-_STDERR_BYTES:].splitlines())))
        return [wire.encode(AgentFailed(time.monotonic_ns(), f"it said: {text}"))] if text else []

    def _file(self, frames: list[bytes]) -> None:
        """Keep these frames. While there is no room for them, nothing is read from the agent."""
        self._unfiled += frames
        while self._unfiled and self._backlog.size < KEPT_BYTES:
            try:
                self._backlog.add(self._unfiled[0])
            except OSError:
                break
            del self._unfiled[0]
        if not self._agent_gone:
            events = (0 if self._unfiled else select.EPOLLIN) | (select.EPOLLOUT if self._to_agent else 0)
            self._poll.change(self._agent.fileno(), events)

    def _hang_up_on_agent(self) -> None:
        """It sweeps the node then, and ends."""
        self._let_go, self._closes_at = True, time.monotonic() + _LAST_SECONDS
        with contextlib.suppress(OSError):
            self._agent.shutdown(socket.SHUT_WR)

    # The head.

    def _on_knock(self, _: int) -> None:
        connection = _Bridge(self._listener.accept()[0])
        self._connections[connection.link.fileno()] = connection
        self._poll.watch(connection.link.fileno(), self._on_connection)

    def _on_connection(self, fd: int) -> None:
        connection = self._connections[fd]
        try:
            frames = connection.receive()
            for kind, frame in frames or ():
                self._take(connection, kind, frame)
        except (wire.WireError, ValueError, PermissionError):
            frames = None
        if frames is None and self._let_go and connection is self._head:  # it waits for the end
            self._poll.change(fd, 0)
            connection.ended = True
        elif frames is None:
            self._drop(connection)
        elif connection is self._head and frames:
            connection.out += wire.encode(CommandsTaken(time.monotonic_ns(), self._commands))

    def _take(self, connection: _Bridge, kind: Any, frame: bytes) -> None:
        """A frame from a bridge. Raises WireError, ValueError, PermissionError."""
        if not connection.knows:
            if kind is not Resume:
                raise PermissionError
            self._let_in(connection, wire.decode(frame))
            return
        self._heard = time.monotonic()
        if kind is EventsTaken:
            self._backlog.acknowledge(wire.decode(frame).events)
        elif kind is LetGo:
            self._hang_up_on_agent()
        else:
            if kind is Start:
                self._seconds = self._after_start
            self._commands += 1
            self._to_agent += frame

    def _let_in(self, connection: _Bridge, resume: Resume) -> None:
        """It is the head's, and the one before it, if it is still there, is dead."""
        if not hmac.compare_digest(resume.secret.encode(), self._secret):
            raise PermissionError
        taken = self._backlog.first if resume.taken < 0 else resume.taken
        self._backlog.acknowledge(taken if resume.done < 0 else max(self._backlog.first, resume.done))
        self._backlog.rewind(taken)
        connection.knows = True
        before, self._head = self._head, connection
        if before is not None:
            self._drop(before)
        self._heard = time.monotonic()
        connection.out += wire.encode(LinkHeld(time.monotonic_ns(), self._folder, self._commands, self._agent_gone))

    def _drop(self, connection: _Bridge) -> None:
        self._poll.unwatch(connection.link.fileno())
        del self._connections[connection.link.fileno()]
        connection.link.close()
        if connection is self._head:
            self._head = None

    def _send(self) -> None:
        """Send what there is to both sides."""
        head = self._head
        if head is not None:
            while self._backlog.waiting and len(head.out) < _PIECE_BYTES:
                head.out += self._backlog.take(_PIECE_BYTES)
                if not head.flush():
                    break
            if not head.flush():
                self._drop(head)
            else:
                events = (0 if head.ended else select.EPOLLIN) | (select.EPOLLOUT if head.out else 0)
                self._poll.change(head.link.fileno(), events)
        if not self._agent_gone:
            try:
                while self._to_agent:
                    del self._to_agent[: self._agent.send(memoryview(self._to_agent)[:_PIECE_BYTES])]
            except BlockingIOError:
                pass
            except OSError:  # it is ending
                self._to_agent.clear()
            self._file([])
