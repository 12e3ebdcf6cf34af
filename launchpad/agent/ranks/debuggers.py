"""Has the debuggers of this node's ranks listen, and leads the head's connections to them.

A rank is asked over the debug channel. One that has no thread there is first sent a signal, which makes it start one;
like the one for stacks, it is sent only to a process that has our file open and catches it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque

from ... import linux
from ...protocol.commands import Debug, Start, TunnelCredit, TunnelData, TunnelOpen
from ...protocol.events import DebuggerReady, TunnelRead, TunnelWritten
from ...rank.stack_server import starting_signal
from ..host import procfs
from ..part import AgentHub, AgentPart
from ..poll import earliest
from ..stacks.signalled import MEMFD
from . import rundir
from .rank import Rank

# How long a rank may take to answer: its main thread may be in C code, and then debugpy has to be imported.
ANSWER_SECONDS = 20.0

# The most bytes of a connection that are on the way to the head, and the most in one frame.
WINDOW_BYTES = 256 << 10
PIECE_BYTES = 64 << 10

NO_PYTHON = "it is not a Python rank with launchpad's hooks"
NO_ANSWER = f"it has not answered for {ANSWER_SECONDS:g} s: its main thread runs C code; try again"


class Debuggers(AgentPart):
    """The debuggers of the ranks, and the connections to them."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._channel = hub.channel
        self._folder = hub.folder
        self._ranks = hub.ranks
        # Ranks that have not answered, and until when they may; without limit those that are being started.
        self._wanted: dict[int, float | None] = {}
        self._tunnels: dict[int, _Tunnel] = {}
        self._channel.on_connect = self._on_connect
        self._channel.on_debugger = self._on_answer

    def on(self, command: Debug | TunnelOpen | TunnelData | TunnelCredit) -> None:
        """Have a debugger listen, or carry out the head's side of a connection to one."""
        match command:
            case Debug():
                self._ask(command.rank)
            case TunnelOpen(number=number):
                path = rundir.debugger_socket(self._folder, command.rank)
                self._tunnels[number] = _Tunnel(self._hub, number, path)
            case TunnelData(number=number) if number in self._tunnels:
                if command.data:
                    self._tunnels[number].write(command.data)
                else:
                    self._tunnels.pop(number).close()
            case TunnelCredit(number=number) if number in self._tunnels:
                self._tunnels[number].credit(command.size)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Some ranks begin their program only when their debugger listens."""
        self._wanted.update({entry["rank"]: None for entry in start.ranks if entry.get("debug")})

    def started(self, rank: Rank) -> None:
        """This rank has a process. It may have connected before we knew that."""
        if rank.rank in self._wanted:
            self._on_connect(rank.pid)

    def _ask(self, rank: int) -> None:
        """Have the debugger of a running rank listen."""
        pid = next((one.pid for one in self._ranks.values() if one.rank == rank), 0)
        if not pid:
            self._say(rank, "it is not running")
            return
        self._wanted[rank] = time.monotonic() + ANSWER_SECONDS
        if self._channel.ask_for_debugger(pid, rundir.debugger_socket(self._folder, rank)):
            return
        status = procfs.status(pid)
        if not linux.descriptor(pid, (MEMFD,)) or not procfs.has_signal(status, "SigCgt", starting_signal()):
            self._say(rank, NO_PYTHON)
            return
        try:
            os.kill(pid, starting_signal())
        except OSError as error:
            self._say(rank, f"it can't be asked: {error.strerror}")

    def _on_connect(self, pid: int) -> None:
        rank = self._ranks[pid].rank if pid in self._ranks else -1
        if rank in self._wanted:
            self._channel.ask_for_debugger(pid, rundir.debugger_socket(self._folder, rank))

    def _on_answer(self, pid: int, problem: str) -> None:
        rank = self._ranks[pid].rank if pid in self._ranks else -1
        if rank in self._wanted:
            self._say(rank, problem)

    def _say(self, rank: int, problem: str) -> None:
        self._wanted.pop(rank, None)
        self._hub.outbox.say(DebuggerReady(time.monotonic_ns(), rank, problem))

    def exited(self, rank: Rank, code: int) -> None:
        """It needs no debugger any more."""
        if rank.rank in self._wanted:
            self._say(rank.rank, "it has exited")

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return earliest(self._wanted.values())

    def tick(self, now: float) -> None:
        """Give up on ranks that don't answer."""
        for rank in [rank for rank, until in self._wanted.items() if until is not None and until <= now]:
            self._say(rank, NO_ANSWER)


class _Tunnel:
    """One connection to a debugger."""

    def __init__(self, hub: AgentHub, number: int, path: str) -> None:
        self._poll = hub.poll
        self._outbox = hub.outbox
        self._number = number
        self._room = WINDOW_BYTES
        self._backlog: deque[memoryview] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)  # first: connecting waits while others wait to be accepted
        try:
            linux.by_short_path(path, self._socket.connect)
        except OSError:
            self._hang_up()
            return
        self._watch()

    def _watch(self) -> None:
        """Watch for what can be done now."""
        fd = self._socket.fileno()
        if fd < 0:
            return
        self._poll.unwatch(fd)
        events = (select.EPOLLIN if self._room > 0 else 0) | (select.EPOLLOUT if self._backlog else 0)
        if events:
            self._poll.watch(fd, self._ready, events)

    def _ready(self, fd: int) -> None:
        if self._room > 0 and (data := linux.read_now(fd, min(self._room, PIECE_BYTES))) is not None:
            if not data:
                self._hang_up()
                return
            self._room -= len(data)
            self._outbox.say(TunnelRead(time.monotonic_ns(), self._number, data))
        self._write()

    def write(self, data: bytes) -> None:
        """Bytes for the debugger."""
        if self._socket.fileno() < 0:
            return
        self._backlog.append(memoryview(data))
        self._write()

    def _write(self) -> None:
        written = 0
        try:
            while self._backlog and self._socket.fileno() >= 0:
                count = self._socket.send(self._backlog[0])
                written += count
                self._backlog[0] = self._backlog[0][count:]
                if not self._backlog[0]:
                    self._backlog.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
        if written:
            self._outbox.say(TunnelWritten(time.monotonic_ns(), self._number, written))
        self._watch()

    def credit(self, size: int) -> None:
        """The head has passed on so many bytes."""
        self._room += size
        self._watch()

    def _hang_up(self) -> None:
        """The debugger is gone: say so."""
        if self._socket.fileno() >= 0:
            self.close()
            self._outbox.say(TunnelRead(time.monotonic_ns(), self._number, b""))

    def close(self) -> None:
        """Hang up."""
        if self._socket.fileno() >= 0:
            self._poll.unwatch(self._socket.fileno())
            self._socket.close()
