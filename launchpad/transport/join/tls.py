"""TLS connections that never block: one thread moves the bytes of all of them.

A peer is a stranger until it has proven that it knows the secret. What strangers may cost is bounded here, for whoever
listens and whoever dials: so many bytes each, and a few steps of work for all of them between two looks at the others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import itertools
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from launchpad.protocol.printable import printable

READ_BYTES = 1 << 18

# What a stranger may send in all, most of it for TLS, and what is read of it at once.
STRANGER_BYTES = 16 << 10
_STRANGER_READ = 4 << 10

# How many strangers are heard before it is the turn of the others again. TLS's handshake takes up to 1 ms of each.
_STRANGERS_A_TURN = 4

# A node that loses power sends no FIN, so the kernel probes after 10 s of silence and gives up 15 s later.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Reactor:
    """The thread. Everything that it calls runs in it, one at a time, and must not block.

    It ends with `close` only, whatever is raised by what it calls.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        """`failed` is told, in the thread, of an exception that is no connection's own."""
        self._failed = failed
        self._selector = selectors.DefaultSelector()
        self._strangers = select.epoll()  # gives those that have waited longest first
        self._strange: dict[int, Callable[[int], None]] = {}  # what to call, by descriptor
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: dict[object, tuple[int, Callable[[], None]]] = {}  # by key; the number tells it from earlier ones
        self._due: list[tuple[float, int, object]] = []  # a heap of them, and of timers that have been cancelled
        self._number = itertools.count()
        self._over = False
        self._lock = threading.Lock()  # guards _over and the pipe's writing end
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._selector.register(self._strangers, selectors.EVENT_READ, lambda _: None)  # it is read in each turn
        self._thread = threading.Thread(target=self._run, name="join", daemon=True)
        self._thread.start()

    def call(self, task: Callable[[], None]) -> None:
        """Have the thread call this soon. From any thread; dropped if the thread has ended."""
        with self._lock:
            if self._over:
                return
            self._tasks.append(task)
            with contextlib.suppress(BlockingIOError):  # it has been woken already
                os.write(self._wake, b"\0")

    def close(self) -> None:
        """End the thread. Connections must be closed before."""
        self.call(self._end)
        self._thread.join()

    # For what runs in the thread.

    def watch(self, sock: socket.socket, ready: Callable[[int], None], events: int, *, stranger: bool = False) -> None:
        """Call `ready` with the selector's events whenever the socket has one of them; 0 for none."""
        if stranger:
            self._watch_stranger(sock.fileno(), ready, events)
            return
        self._watch_stranger(sock.fileno(), ready, 0)
        try:
            known = self._selector.get_key(sock)
        except KeyError:
            if events:
                self._selector.register(sock, events, ready)
            return
        if not events:
            self._selector.unregister(sock)
        elif known.events != events:
            self._selector.modify(sock, events, ready)

    def _watch_stranger(self, fd: int, ready: Callable[[int], None], events: int) -> None:
        wanted = (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
            select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
        )
        if fd in self._strange and not events:
            del self._strange[fd]
            self._strangers.unregister(fd)
        elif fd in self._strange:
            self._strangers.modify(fd, wanted)
        elif events:
            self._strange[fd] = ready
            self._strangers.register(fd, wanted)

    def later(self, key: object, seconds: float, task: Callable[[], None]) -> None:
        """Call `task` after this time, unless `forget(key)` comes first."""
        number = next(self._number)
        self._timers[key] = number, task
        heapq.heappush(self._due, (time.monotonic() + seconds, number, key))

    def forget(self, key: object) -> None:
        """Cancel a `later`."""
        self._timers.pop(key, None)

    def _run(self) -> None:
        while not self._over:
            due = self._next_timer()
            wait = None if due is None else max(0.0, due - time.monotonic())
            for key, events in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # not closed by one of those before it
                    self._do(functools.partial(key.data, events))
            while self._tasks and not self._over:
                self._do(self._tasks.popleft())
            now = time.monotonic()
            while not self._over and (due := self._next_timer()) is not None and due <= now:
                self._do(self._timers.pop(heapq.heappop(self._due)[2])[1])
            if self._strange and not self._over:
                self._hear_strangers()

    def _hear_strangers(self) -> None:
        for fd, events in self._strangers.poll(0, _STRANGERS_A_TURN):
            if fd in self._strange:  # not closed by one of those before it
                seen = (selectors.EVENT_READ if events & ~select.EPOLLOUT else 0) | (
                    selectors.EVENT_WRITE if events & ~select.EPOLLIN else 0
                )
                self._do(functools.partial(self._strange[fd], seen))

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            try:
                self._failed(bug(error))
            except Exception:  # there is nobody else to tell
                pass

    def _next_timer(self) -> float | None:
        """When the next timer is due."""
        while self._due:
            at, number, key = self._due[0]
            if key in self._timers and self._timers[key][0] == number:
                return at
            heapq.heappop(self._due)  # cancelled, or set anew
        return None

    def _drain(self, _: int) -> None:
        os.read(self._woken, 4096)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            self._selector.close()
            self._strangers.close()
            os.close(self._woken)
            os.close(self._wake)


class TlsConnection:
    """One connection. Made in any thread; all but `send`, `finish` and `abort` are for the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server: bool,
        opened: Callable[[], None],
        received: Callable[[bytes], None],
        ended: Callable[[str], None],
    ) -> None:
        """`opened`: TLS is up. `received`: bytes from the peer. `ended`: nothing more will come, and why ("": it left).

        All three are called in the reactor's thread, and `ended` once.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._reactor = reactor
        self._socket = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._opened, self._received, self._ended = opened, received, ended
        self._up = False
        self.certificate = b""  # the peer's (DER), once TLS is up
        self.broken = ""  # what was wrong with us when it was ended
        self._trusted = False
        self._left = STRANGER_BYTES
        self._over = False
        self._finishing = False
        self._waiting: list[bytes] = []  # until TLS is up
        self._pending = bytearray()  # encrypted, for the socket
        self._call(self._begin)

    def _call(self, task: Callable[[], None]) -> None:
        self._reactor.call(lambda: self._do(task))

    def _do(self, task: Callable[[], None]) -> None:
        """An exception ends this connection alone."""
        try:
            task()
        except Exception as error:
            if self._over:  # whoever is told of ends would not hear of this
                raise
            self.broken = bug(error)
            self.end(self.broken)

    def send(self, data: bytes) -> None:
        """Queue bytes for the peer. From any thread; dropped if the connection has ended."""
        self._call(lambda: self._send(data))

    def finish(self) -> None:
        """End the connection when everything queued has been sent. From any thread."""
        self._call(self._finish)

    def abort(self) -> None:
        """End the connection now; `ended` is called with "". From any thread."""
        self._call(lambda: self.end(""))

    def trust(self) -> None:
        """The peer has proven that it knows the secret. For the reactor's thread."""
        if not self._over:
            self._watch(0)
            self._trusted = True
            self._flush()

    def end(self, reason: str) -> None:
        """End the connection now, for this reason."""
        if self._over:
            return
        self._over = True
        self._watch(0)
        self._socket.close()
        self._ended(reason)

    def _watch(self, events: int) -> None:
        self._reactor.watch(self._socket, self._ready, events, stranger=not self._trusted)

    def _begin(self) -> None:
        if not self._over:
            self._step()

    def _send(self, data: bytes) -> None:
        if self._over:
            return
        if not self._up:
            self._waiting.append(data)
            return
        self._tls.write(data)
        self._flush()

    def _finish(self) -> None:
        self._finishing = True
        if not self._over:
            self._flush()

    def _ready(self, events: int) -> None:
        self._do(lambda: self._go_on(events))

    def _go_on(self, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                data = self._socket.recv(READ_BYTES if self._trusted else _STRANGER_READ)
            except BlockingIOError:
                data = None
            except OSError as error:
                self.end(error.strerror or str(error))
                return
            if data and not self._trusted:
                self._left -= len(data)
                if self._left < 0:
                    self.end("it says too much before it has proven that it knows the secret")
                    return
            if data:
                self._in.write(data)
            elif data is not None:
                self._in.write_eof()
        self._step()

    def _step(self) -> None:
        """Move on: the handshake, then what the peer has sent, then what waits for it."""
        try:
            if not self._up:
                self._tls.do_handshake()
                self._up = True
                self.certificate = self._tls.getpeercert(binary_form=True) or b""  # not to be had after an error
                self._opened()
                waiting, self._waiting = self._waiting, []
                for data in waiting:
                    self._send(data)
            while not self._over:
                data = self._tls.read(READ_BYTES)
                if not data:
                    self.end("")
                    return
                self._received(data)
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self.end("")
            return
        except ssl.SSLError as error:
            self.end(f"it doesn't speak TLS ({error.reason or error})")
            return
        if not self._over:
            self._flush()

    def _flush(self) -> None:
        self._pending += self._out.read()
        try:
            while self._pending:
                with memoryview(self._pending) as view:
                    sent = self._socket.send(view[: 1 << 18])
                del self._pending[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(error.strerror or str(error))
            return
        if self._finishing and self._up and not self._pending:
            self.end("")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending else 0)
        self._watch(wanted)


def bug(error: Exception) -> str:
    """An exception that nobody has expected, in words."""
    return printable(f"a bug in launchpad: {type(error).__name__}: {error}"[:300])


def connect(address: tuple[str, int], timeout: float) -> socket.socket:
    """A TCP connection. Raises OSError, also if it has connected to itself."""
    made = socket.create_connection(address, timeout)
    # To a port of this machine that nobody listens on, TCP can connect a socket to itself.
    if made.getsockname() == made.getpeername():
        made.close()
        raise ConnectionRefusedError(111, os.strerror(111))
    return made
