"""The agent: runs, watches, drains and kills the ranks of its node. It holds no policy: the head decides.

One thread, one loop: wait for commands, children and output (poll.py), then send what there is to say (outbox.py).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from .. import wire
from ..events import (
    STDERR,
    STDOUT,
    AgentReady,
    Credit,
    Drained,
    Finish,
    Hello,
    RankExited,
    RankRaised,
    RankStarted,
    Signal,
    Start,
    StartFailed,
    StraysEnded,
    Suspended,
)
from . import memory, node, processes, rank, scratch
from .outbox import Outbox, Stream
from .poll import Poll

# The most that is taken from an error file: a traceback, not a log.
ERROR_FILE_BYTES = 256 << 10


class Agent:
    """Serves one link: commands come from `link_in`, events leave through `link_out`."""

    def __init__(self, link_in: int, link_out: int, stdin_fd: int | None, folder: str) -> None:
        self._link_in = link_in
        self._link_out = link_out
        self._stdin_fd = stdin_fd
        self._scratch = folder
        self._decoder = wire.Decoder()
        self._ranks: dict[int, rank.Rank] = {}  # by pid, until reaped
        self._poll = Poll()
        self._outbox = Outbox(link_out, self._poll)
        self._finishing = False  # all ranks are gone; what they wrote is being sent
        self._leaving = False  # and when it is, so are we
        self._head_gone = False
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._port = socket.socket()

    def run(self) -> int:
        """Serve until told to finish, or until the head is gone. Returns the process's exit code."""
        processes.become_subreaper()
        self._poll.watch(processes.wakeup_on_exit(), self._on_child)
        self._raise_file_limit()
        self._memory_kills = memory.kills()
        os.set_blocking(self._link_in, False)
        os.set_blocking(self._link_out, False)
        self._poll.watch(self._link_in, self._on_link_in)
        while not (self._head_gone or self._outbox.broken or (self._leaving and self._outbox.empty)):
            self._poll.wait(self._outbox.patience)
            self._outbox.pump()
            if self._finishing and not self._leaving and self._outbox.drained:
                self._finishing = False
                self._outbox.say(Drained(time.monotonic_ns()))
                self._outbox.pump()
        processes.sweep(self._reap)
        scratch.remove(self._scratch)
        return 0

    # Getting ready.

    def _raise_file_limit(self) -> None:
        _, hard = self._files
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass

    # Commands.

    def _on_link_in(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._head_gone = True
        try:
            for command in self._decoder.feed(data):
                self._obey(command)
        except (
            wire.WireError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            OSError,
        ) as error:  # no head of ours speaks like this
            sys.stderr.write(f"launchpad: the agent was asked for nonsense: {error}\n")
            self._head_gone = True

    def _obey(self, command: Any) -> None:
        match command:
            case Hello():
                self._hello(command)
            case Start():
                self._start(command)
            case Signal(signum):
                for started in self._ranks.values():
                    started.signal(signum)
                if signum == signal.SIGSTOP:
                    self._outbox.say(Suspended(time.monotonic_ns()))
            case Credit(number, stream, size):
                self._outbox.credit(number, stream, size)
            case Finish(leave):
                self._finish(leave)

    def _hello(self, hello: Hello) -> None:
        # Bound and not listening, with SO_REUSEADDR: nobody is given this port, and rank 0 can still listen on it.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._port.bind(("127.0.0.1", hello.port))
            port = self._port.getsockname()[1]
        except OSError:
            port = -1
        self._outbox.say(
            AgentReady(
                time=time.monotonic_ns(),
                wall=time.time(),
                pid=os.getpid(),
                hostname=socket.gethostname(),
                cores=node.usable_cores(),
                gpus=node.visible_gpus() if hello.count_gpus else -1,
                visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                open_files=node.open_file_limit(),
                processes=node.process_limit(),
                port=port,
                scratch=self._scratch,
            )
        )

    def _start(self, start: Start) -> None:
        shared = {**os.environ, **start.environ}
        shared.pop("", None)  # some shells export one; exec takes none
        for name, value in start.defaults.items():
            shared.setdefault(name, value)
        null = os.open(os.devnull, os.O_RDONLY)
        failure = ""
        for entry in start.ranks:
            if not failure:
                try:
                    self._start_rank(start, entry, shared, null)
                except OSError as error:
                    failure = f"no process could be made for it: {error.strerror}"
            if failure:
                self._outbox.say(StartFailed(time.monotonic_ns(), entry["rank"], failure))
            self._reap()  # who dies while others are still being started is to be told in the order of the deaths
        os.close(null)

    def _start_rank(self, start: Start, entry: dict[str, Any], shared: dict[str, str], null: int) -> None:
        number = entry["rank"]
        stdin, terminal = null, []
        if number == start.stdin_rank and self._stdin_fd is not None:
            stdin, terminal = self._stdin_fd, start.terminal
        outlets = rank.open_outlets(terminal)
        try:
            environ = {**shared, **entry["environ"]}
            started = rank.start(number, entry["argv"], environ, start.cwd, stdin, outlets, self._files)
        except OSError:
            os.close(outlets.stdout)
            os.close(outlets.stderr)
            raise
        finally:
            os.close(outlets.rank_stdout)
            os.close(outlets.rank_stderr)
        self._ranks[started.pid] = started
        self._poll.watch(started.status_fd, lambda fd: self._on_status(fd, started))
        self._outbox.say(RankStarted(time.monotonic_ns(), number, started.pid))
        for stream, fd in ((STDOUT, outlets.stdout), (STDERR, outlets.stderr)):
            self._outbox.open(Stream(number, stream, fd, start.window))

    def _finish(self, leave: bool) -> None:
        """All ranks are gone: kill what they left behind, then send what all of them wrote."""
        self._finishing = True
        self._leaving = leave
        killed = processes.sweep(self._reap)
        if killed:
            self._outbox.say(StraysEnded(time.monotonic_ns(), killed))
        self._outbox.drain()

    # Children.

    def _on_child(self, fd: int) -> None:
        os.read(fd, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            started = self._ranks.pop(pid, None)
            if started is not None:
                self._exited(started, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)

    def _exited(self, started: rank.Rank, code: int, largest: int) -> None:
        now = time.monotonic_ns()
        if started.status_fd in self._poll:
            self._on_status(started.status_fd, started)
        before, self._memory_kills = self._memory_kills, memory.kills() if code else self._memory_kills
        killed = code == -signal.SIGKILL and self._memory_kills > before
        error = scratch.take_error_file(self._scratch, started.rank, ERROR_FILE_BYTES)
        if error:
            self._outbox.say(RankRaised(now, started.rank, error))
        self._outbox.say(RankExited(now, started.rank, code, largest, killed))

    def _on_status(self, fd: int, started: rank.Rank) -> None:
        reason = os.read(fd, 4096)
        self._poll.unwatch(fd)
        os.close(fd)
        if reason:
            self._outbox.say(StartFailed(time.monotonic_ns(), started.rank, reason.decode("utf-8", "surrogateescape")))
