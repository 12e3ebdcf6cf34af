"""A Link over SSH: one channel per node, to the node's guard and agent."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko

from launchpad.errors import ConnectError
from launchpad.protocol import wire
from launchpad.protocol.commands import Command
from launchpad.transport import CLOSE_SECONDS, READ_BYTES
from launchpad.transport.ssh import handover
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

# How long to wait for the rest of stderr once the channel has ended.
_STDERR_SECONDS = 1.0


class SshLink:
    """A Link to an agent that is sent over the connection and started on the node."""

    remote = True

    def __init__(self, name: str, transport: paramiko.Transport, startup: Startup) -> None:
        """Start the agent. Raises ConnectError."""
        self.name = name
        self.python_sought = startup.sought
        self._transport = transport
        self._stderr = b""
        seconds = handover.START_SECONDS
        deadline = time.monotonic() + seconds
        try:
            self._channel = transport.open_session(timeout=seconds)
            self._channel.settimeout(seconds)
            self._channel.exec_command(startup.command)
            self._first = hand_over(self._send_all, lambda: self._receive(deadline), startup)
            self._channel.settimeout(None)
        except HungUp as ended:
            raise not_started(name, self._exit_code(), ended.output, self._said(), startup) from None
        except Unfit as reason:
            raise ConnectError("no Python", name, str(reason)) from None
        except paramiko.ChannelException as error:
            text = f"its sshd refused a session ({error.text}); check MaxSessions in its sshd_config"
            raise ConnectError("protocol", name, text) from None
        except TooSlow as silent:
            raise too_slow(name, seconds, silent.output, self._said(), startup) from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            text = f"can't start the agent: {str(error) or type(error).__name__}"
            raise ConnectError("protocol", name, text) from None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"ssh-writer-{name}", daemon=True).start()
        self._stderr_reader = threading.Thread(target=self._read_stderr, name=f"ssh-stderr-{name}", daemon=True)
        self._stderr_reader.start()

    @property
    def own_address(self) -> str:
        """This machine's address on the route to the node; "" if a jump host or a ProxyCommand is in between."""
        try:
            return str(self._transport.sock.getsockname()[0]).removeprefix("::ffff:")  # type: ignore[union-attr]
        except (AttributeError, TypeError, IndexError, OSError):
            return ""

    def _send_all(self, data: bytes) -> None:
        """Send everything, unless the far end has ended, which reading tells. Raises TimeoutError."""
        try:
            self._channel.sendall(data)
        except TimeoutError:
            raise
        except OSError:
            pass

    def _receive(self, deadline: float) -> bytes:
        """The next output, b"" at its end. Raises TimeoutError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)
        return self._channel.recv(READ_BYTES)

    def _exit_code(self) -> int:
        """The exit code of the command, -1 if the connection ended first."""
        deadline = time.monotonic() + handover.START_SECONDS
        while not self._channel.exit_status_ready() and time.monotonic() < deadline and not self._channel.closed:
            self._channel.status_event.wait(0.1)
        return self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1

    def _said(self) -> bytes:
        """The end of the node's stderr so far."""
        while self._channel.recv_stderr_ready():
            self._stderr = (self._stderr + self._channel.recv_stderr(READ_BYTES))[-STDERR_BYTES:]
        return self._stderr

    def send(self, command: Command) -> None:
        """Queue a command for the writer thread: a node that doesn't read must not block the head."""
        self._outbox.put(wire.encode(command))

    def _write(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                # Of bytes, paramiko would copy the rest for each packet.
                self._channel.sendall(memoryview(frame))  # type: ignore[arg-type]
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):  # the reader reports it
            pass

    def _read_stderr(self) -> None:
        while data := self._channel.recv_stderr(READ_BYTES):
            self._stderr = (self._stderr + data)[-STDERR_BYTES:]

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it or the connection ends."""
        decoder = wire.Decoder()
        yield from decoder.feed(self._first)
        silent = not self._first
        while data := self._channel.recv(READ_BYTES):
            silent = False
            yield from decoder.feed(data)
        if silent:  # the agent never came up, so only stderr can say why
            self._stderr_reader.join(_STDERR_SECONDS)
            if text := in_one_line(self._said()):
                raise OSError(f"it said: {text}")

    def close(self) -> None:
        """Hang up and wait for the agent, which kills its ranks and leaves nothing behind."""
        self._outbox.put(None)
        self._channel.status_event.wait(CLOSE_SECONDS)
        self._transport.close()

    def abandon(self) -> None:
        """Hang up on a node that doesn't answer."""
        self._channel.status_event.set()
        self._transport.close()
