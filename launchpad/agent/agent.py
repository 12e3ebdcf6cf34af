"""The agent: runs, watches, drains and kills the ranks of its node. It holds no policy: the head decides.

One thread, one loop over epoll. Output is read only when the link takes it and the head has given credit for it,
so memory stays bounded; control frames go before output, so a flood of it delays no exit status.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import wire
from ..events import (
    STDERR,
    STDOUT,
    AgentReady,
    Credit,
    Event,
    Finish,
    Hello,
    RankExited,
    RankRaised,
    RankStarted,
    Signal,
    Start,
    StartFailed,
    StraysEnded,
)
from . import memory, node, processes, rank, scratch

# Bytes of output in one frame: as long as one is under way, a control frame waits.
CHUNK = 256 << 10

# After a read the stream rests this long, so that a rank that writes line by line is read in bulk.
REST_SECONDS = 0.002

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
        self._control: deque[bytes] = deque()
        self._sending: list[memoryview] = []  # what is left of the frame under way
        self._ready: deque[rank.Stream] = deque()  # streams with bytes to read
        self._resting: deque[tuple[float, rank.Stream]] = deque()
        self._ranks: dict[int, rank.Rank] = {}  # by pid, until reaped
        self._streams: dict[tuple[int, int], rank.Stream] = {}
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._finishing = False
        self._head_gone = False
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._port = socket.socket()

    def run(self) -> int:
        """Serve until told to finish, or until the head is gone. Returns the process's exit code."""
        processes.become_subreaper()
        self._watch_children()
        self._raise_file_limit()
        self._memory_kills = memory.kills()
        os.set_blocking(self._link_in, False)
        os.set_blocking(self._link_out, False)
        self._watch(self._link_in, select.EPOLLIN, self._on_link_in)
        while not self._done():
            for fd, _ in self._epoll.poll(self._patience()):
                handler = self._handlers.get(fd)  # None where an earlier handler of this round closed it
                if handler is not None:
                    handler(fd)
            self._wake_resting()
            self._pump()
        processes.sweep(self._reap)
        scratch.remove(self._scratch)
        return 0

    # Waiting.

    def _watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _patience(self) -> float:
        if self._ready and not self._sending:
            return 0
        return max(0.0, self._resting[0][0] - time.monotonic()) if self._resting else -1

    def _done(self) -> bool:
        if self._head_gone:
            return True
        return self._finishing and not (self._streams or self._control or self._sending)

    def _watch_children(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch(reader, select.EPOLLIN, self._on_child)

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
        for command in self._decoder.feed(data):
            match command:
                case Hello():
                    self._hello(command)
                case Start():
                    self._start(command)
                case Signal(signum):
                    for started in self._ranks.values():
                        started.signal(signum)
                case Credit(number, stream, size):
                    self._credit(number, stream, size)
                case Finish():
                    self._finish()

    def _hello(self, hello: Hello) -> None:
        # Bound and not listening, with SO_REUSEADDR: nobody is given this port, and rank 0 can still listen on it.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self._say(
            AgentReady(
                time=time.monotonic_ns(),
                wall=time.time(),
                pid=os.getpid(),
                hostname=socket.gethostname(),
                cores=node.usable_cores(),
                gpus=node.visible_gpus() if hello.count_gpus else -1,
                open_files=node.open_file_limit(),
                processes=node.process_limit(),
                port=self._port.getsockname()[1],
                scratch=self._scratch,
            )
        )

    def _start(self, start: Start) -> None:
        shared = {**os.environ, **start.environ}
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
                self._say(StartFailed(time.monotonic_ns(), entry["rank"], failure))
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
        self._watch(started.status_fd, select.EPOLLIN, lambda fd: self._on_status(fd, started))
        self._say(RankStarted(time.monotonic_ns(), number, started.pid))
        for stream, fd in ((STDOUT, outlets.stdout), (STDERR, outlets.stderr)):
            self._open_stream(rank.Stream(number, stream, fd, start.window))

    def _finish(self) -> None:
        """All ranks are gone: kill what they left behind, then send what all of them wrote."""
        self._finishing = True
        left = [f"{pid} {processes.name_of(pid)}" for pid in processes.children() if not processes.is_zombie(pid)]
        if left:
            processes.sweep(self._reap)
            self._say(StraysEnded(time.monotonic_ns(), left))
        # Nobody is left who could write: what is in the pipes now is all there is.
        for stream in self._streams.values():
            self._unwatch(stream.fd)
            if stream.credit > 0 and stream not in self._ready:
                self._ready.append(stream)
        self._resting.clear()

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
        if started.status_fd in self._handlers:
            self._on_status(started.status_fd, started)
        killed = False
        if code == -signal.SIGKILL:
            before, self._memory_kills = self._memory_kills, memory.kills()
            killed = self._memory_kills > before
        try:
            with open(scratch.error_file(self._scratch, started.rank), errors="replace") as file:
                self._say(RankRaised(now, started.rank, file.read(ERROR_FILE_BYTES)))
        except OSError:
            pass
        self._say(RankExited(now, started.rank, code, largest, killed))

    def _on_status(self, fd: int, started: rank.Rank) -> None:
        reason = os.read(fd, 4096)
        self._unwatch(fd)
        os.close(fd)
        if reason:
            self._say(StartFailed(time.monotonic_ns(), started.rank, reason.decode("utf-8", "surrogateescape")))

    # Output.

    def _open_stream(self, stream: rank.Stream) -> None:
        self._streams[stream.rank, stream.stream] = stream
        # One event, then silence until armed again: a stream is armed, ready, resting, or without credit.
        self._watch(stream.fd, select.EPOLLIN | select.EPOLLONESHOT, lambda _: self._ready.append(stream))

    def _close_stream(self, stream: rank.Stream) -> None:
        self._unwatch(stream.fd)
        os.close(stream.fd)

        del self._streams[stream.rank, stream.stream]

    def _arm(self, stream: rank.Stream) -> None:
        self._epoll.modify(stream.fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _wake_resting(self) -> None:
        now = time.monotonic()
        while self._resting and self._resting[0][0] <= now:
            self._arm(self._resting.popleft()[1])

    def _credit(self, number: int, stream_number: int, size: int) -> None:
        stream = self._streams.get((number, stream_number))
        if stream is None:
            return
        exhausted = stream.credit <= 0
        stream.credit += size
        if exhausted and stream.credit > 0:
            self._ready.append(stream)

    # Events.

    def _say(self, event: Event) -> None:
        self._control.append(wire.encode(event))

    def _pump(self) -> None:
        """Write until the link takes no more: control frames first, then output, a chunk of each stream in turn."""
        while True:
            if not self._sending and not self._next_frame():
                break
            try:
                written = os.writev(self._link_out, self._sending)
            except BlockingIOError:
                written = 0
            except OSError:  # the head is gone; end-of-file on the other pipe says so too
                self._head_gone = True
                return
            while self._sending and written >= len(self._sending[0]):
                written -= len(self._sending.pop(0))
            if self._sending:
                self._sending[0] = self._sending[0][written:]
                if self._link_out not in self._handlers:
                    self._watch(self._link_out, select.EPOLLOUT, lambda _: None)
                return
        self._unwatch(self._link_out)

    def _next_frame(self) -> bool:
        if self._control:
            self._sending = [memoryview(self._control.popleft())]
            return True
        while self._ready:
            stream = self._ready.popleft()
            data = stream.read(min(CHUNK, stream.credit))
            if data:
                stream.credit -= len(data)
                header = wire.output_header(time.monotonic_ns(), stream.rank, stream.stream, len(data))
                self._sending = [memoryview(header), memoryview(data)]
                if stream.credit > 0:
                    if self._finishing or len(data) == CHUNK:
                        self._ready.append(stream)
                    else:
                        self._resting.append((time.monotonic() + REST_SECONDS, stream))
                return True
            if data == b"" or self._finishing:
                self._close_stream(stream)
            else:
                self._arm(stream)
        return False
