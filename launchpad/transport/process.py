"""A Link over the standard streams of a child process that leads to a node: `ssh`, `docker exec -i`, `nsenter` …"""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launchpad import linux
from launchpad.errors import ConnectError
from launchpad.protocol import wire
from launchpad.protocol.commands import Command
from launchpad.transport import CLOSE_SECONDS, READ_BYTES
from launchpad.transport.ssh.bundle import Startup
from launchpad.transport.ssh.handover import (
    STDERR_BYTES,
    HungUp,
    TooSlow,
    Unfit,
    hand_over,
    in_one_line,
    not_started,
    too_slow,
)

# How long a process may take to exit once it has closed its standard output, or was told to end.
END_SECONDS = 2.0


class ProcessLink:
    """A Link to an agent that is sent through a child process and started behind it.

    Creating it starts the process, `begin` the agent. It counts as remote even on this machine: what a container has
    of our files, processes and terminal is not known.
    """

    remote = True
    apart = False  # whether the process can be ended without harm to the agent; this one may have become its guard

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start the process, in its own session, out of reach of the terminal's signals. Raises OSError."""
        self.name = name
        self.program = argv[0]
        self.stderr = b""  # the end of it
        self.python_sought = ""  # the interpreter for which there may have been another one
        self.deadline = 0.0  # when the agent must have started
        # We may have been started with SIGCHLD blocked, and a guard in a local container depends on it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environ,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        linux.widen_pipe(self._in.fileno())
        os.set_blocking(self._in.fileno(), False)
        self._hung_up = _Flag()
        self._begun = False
        self._first = b""  # frames that came with the answer to `begin`
        self._reading = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"writer-{name}", daemon=True)

    def begin(self, startup: Startup, seconds: float) -> None:
        """Start the agent, within so many seconds. Raises ConnectError; the process is then gone."""
        self.python_sought = startup.sought
        self.deadline = time.monotonic() + seconds
        try:
            self._first = hand_over(lambda data: self._write_all(data, self.deadline), self.receive, startup)
        except (HungUp, TooSlow, Unfit) as error:
            code = self._end()
            match error:
                case HungUp():
                    raise self.failure(code, error.output, startup) from None
                case TooSlow():
                    raise self.lateness(seconds, error.output, startup) from None
            raise ConnectError("no Python", self.name, str(error)) from None
        except BaseException:
            self._end()
            raise
        self._begun = True
        self._writer.start()

    def failure(self, code: int, output: bytes, startup: Startup) -> Exception:
        """Why there is no agent, if the process exited with `code` (-n for signal n) after this output."""
        return not_started(self.name, code, output, self.stderr, startup)

    def lateness(self, seconds: float, output: bytes, startup: Startup) -> ConnectError:
        """The error if the agent has not started within so many seconds, and this came instead."""
        return too_slow(self.name, seconds, output, self.stderr, startup)

    def receive(self) -> bytes:
        """The next output before there is an agent, b"" at its end. Raises TimeoutError."""
        if time.monotonic() >= self.deadline:  # something may be there for ever
            raise TimeoutError
        return self.read(self.deadline)

    def farewell(self, code: int) -> str:
        """Why a link that had an agent has ended, if that was the process's doing; else ""."""
        if code < 0:
            return f"{self.program} was killed by {signal.Signals(-code).name}"
        return ""

    def send(self, command: Command) -> None:
        """Queue a command for the writer thread: a node that doesn't read must not block the head."""
        self._outbox.put(wire.encode(command))

    def _write(self) -> None:
        with self._in:
            while (frame := self._outbox.get()) is not None:
                if not self._write_all(frame, None):
                    return

    def _write_all(self, data: bytes, deadline: float | None) -> bool:
        """Write everything, unless the process is gone, which the reader reports. Raises TimeoutError."""
        left = memoryview(data)
        waiting = select.poll()
        waiting.register(self._in, select.POLLOUT)
        waiting.register(self._hung_up, select.POLLIN)
        while left:
            ready = dict(waiting.poll(_milliseconds(deadline)))
            if self._hung_up.fileno() in ready:
                return False
            if not ready:
                raise TimeoutError
            try:
                left = left[os.write(self._in.fileno(), left) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def read(self, deadline: float | None = None) -> bytes:
        """The next output, b"" at its end. Keeps what comes on standard error meanwhile. Raises TimeoutError."""
        waiting = select.poll()
        for stream in (self._out, self._err, self._hung_up):
            waiting.register(stream, select.POLLIN)
        while ready := dict(waiting.poll(_milliseconds(deadline))):
            if self._err.fileno() in ready and not self._keep_stderr():
                waiting.unregister(self._err)
            if self._out.fileno() in ready:
                return os.read(self._out.fileno(), READ_BYTES)
            if self._hung_up.fileno() in ready:
                return b""
        raise TimeoutError

    def _keep_stderr(self) -> bool:
        data = os.read(self._err.fileno(), READ_BYTES)
        self.stderr = (self.stderr + data)[-STDERR_BYTES:]
        return bool(data)

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it or the process ends."""
        self._reading = True
        decoder = wire.Decoder()
        silent = not self._first
        try:
            yield from decoder.feed(self._first)
            while data := self.read():
                silent = False
                yield from decoder.feed(data)
            code = self._wait(END_SECONDS)
            self.keep_errors()
            reason = "" if code is None or self._hung_up.is_set else self.farewell(code)
            if not reason and silent and (text := in_one_line(self.stderr)):  # the agent never came up
                reason = f"it said: {text}"
            if reason:
                raise OSError(reason)
        finally:
            self.close_output()

    def close(self) -> None:
        """Hang up, and wait for the process, behind which the agent kills its ranks and leaves nothing behind."""
        if self._begun:
            self._outbox.put(None)
            self._wait(CLOSE_SECONDS)
        self._end()

    def abandon(self) -> None:
        """Hang up on a node that doesn't answer, and see to it that the process ends."""
        self._hung_up.set()  # the writer may be in the middle of a frame, or wait for one
        self._outbox.put(None)
        self.signal()
        if self._begun and not self.apart:
            self._wait(CLOSE_SECONDS)
        self._end()

    def signal(self) -> None:
        """Tell the process to end, and what it has started, without waiting."""
        if self._process.poll() is None and (self.apart or not self._begun):
            self._signal_group(signal.SIGTERM)

    def _signal_group(self, signum: int) -> None:
        try:
            os.killpg(self._process.pid, signum)
        except OSError:  # empty, or another user's by now (sudo)
            pass

    def _end(self) -> int:
        """Hang up, and see to it that the process is gone. Returns its exit code."""
        if not self._begun:
            self._in.close()
        code = self._wait(END_SECONDS)
        if code is None:
            self.signal()
            code = self._wait(END_SECONDS)
        if code is None:
            self._process.kill()
            code = self._wait(END_SECONDS)
        # ssh ends its ProxyCommand, but not the children of that; a wrapper leaves what it has started. Behind --enter
        # a guard may still end processes, which TERM doesn't hinder.
        linux.end_group(self._process.pid, END_SECONDS if self.apart or not self._begun else CLOSE_SECONDS)
        if not self._reading:
            self.keep_errors()
        self._hung_up.set()
        if not self._reading:
            self.close_output()
        return -signal.SIGKILL if code is None else code

    def keep_errors(self) -> None:
        """Keep what is still in standard error. Its end may never come: a background process may have it."""
        if self._err.closed:
            return
        waiting = select.poll()
        waiting.register(self._err, select.POLLIN)
        while waiting.poll(0) and self._keep_stderr():
            pass

    def close_output(self) -> None:
        """Close what only the reader needs."""
        self._out.close()
        self._err.close()

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Openings:
    """The links that are being opened, to be able to give all of them up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[ProcessLink] = set()
        self._closed = False

    def begin(self, name: str, make: Callable[[], ProcessLink], startup: Startup, seconds: float) -> ProcessLink:
        """Make the link to this host and start its agent. Raises ConnectError, and what `make` raises."""
        with self._lock:  # `abandon` must know of each process that has been started
            if self._closed:
                raise ConnectError("protocol", name, "given up; the run is ending")
            link = make()
            self._links.add(link)
        try:
            link.begin(startup, seconds)
        finally:
            with self._lock:
                self._links.discard(link)
        return link

    def abandon(self) -> None:
        """Tell the processes to end, without waiting."""
        with self._lock:
            self._closed = True
            for link in self._links:
                link.signal()


class _Flag:
    """A flag that poll() can wait for."""

    def __init__(self) -> None:
        self.is_set = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        self.is_set = True
        os.eventfd_write(self._fd, 1)

    def __del__(self) -> None:
        os.close(self._fd)


def _milliseconds(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
