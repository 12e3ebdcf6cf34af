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
from launchpad.transport.ssh import bundle
from launchpad.transport.ssh.bootstrap import HAVE, MARK, NEED

READ_BYTES = 1 << 20

# If a node's Python has not started by then, it never will.
START_SECONDS = 30.0

# Guard and agent exit by themselves, within guard.STUCK_AGENT plus processes.SWEEP_SECONDS.
CLOSE_SECONDS = 20.0

# How much of a node's stderr to keep for error messages, and of its output before the bootstrap.
_STDERR_BYTES = 2000
_GREETING_BYTES = 64 << 10

# How long to wait for the rest of stderr once the channel has ended.
_STDERR_SECONDS = 1.0


class SshLink:
    """A Link to an agent that is sent over the connection and started on the node."""

    remote = True

    def __init__(self, name: str, transport: paramiko.Transport, python: str, *, exact: bool) -> None:
        """Start the agent. Raises ConnectError. `exact`: use no other Python than `python`."""
        self.name = name
        self._transport = transport
        self._stderr = b""
        try:
            self._channel = transport.open_session(timeout=START_SECONDS)
            self._channel.settimeout(START_SECONDS)
            self._channel.exec_command(bundle.command(python, exact=exact))
            self._start(python)
            self._channel.settimeout(None)
        except paramiko.ChannelException as error:
            text = f"its sshd refused a session ({error.text}); check MaxSessions in its sshd_config"
            raise self._failure("protocol", text) from None
        except TimeoutError:
            text = f"the agent did not start within {START_SECONDS:g} s; is the host overloaded, or does its sshd run"
            raise self._failure("timed out", f"{text} another command (ForceCommand)?") from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._failure("protocol", f"can't start the agent: {str(error) or type(error).__name__}") from None
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

    def _start(self, python: str) -> None:
        digest, data = bundle.bundle()
        self._channel.sendall(bundle.bootstrap() + f"{digest} {len(data)}\n".encode())
        answer = self._answer(python)
        if answer == NEED:
            self._channel.sendall(data)
        elif answer != HAVE:
            raise self._failure("no Python", answer.decode(errors="replace"))

    def _answer(self, python: str) -> bytes:
        """The bootstrap's answer; a shell's greeting before it is skipped."""
        received = b""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            start = received.find(MARK)
            if start >= 0 and b"\n" in received[start:]:
                # The bootstrap sends nothing after this line until we send something.
                return received[start + len(MARK) :].partition(b"\n")[0]
            data = self._channel.recv(READ_BYTES)
            if not data:
                raise self._no_python(python, received)
            received = (received + data)[-_GREETING_BYTES:]
        raise TimeoutError

    def _no_python(self, python: str, output: bytes) -> ConnectError:
        deadline = time.monotonic() + START_SECONDS
        while not self._channel.exit_status_ready() and time.monotonic() < deadline and not self._channel.closed:
            self._channel.status_event.wait(0.1)
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        text = self._text(output)
        quoted = f" ({text})" if text else ""
        if code in (126, 127):
            return self._failure("no Python", f"can't run {python} there{quoted}; name another one with --python")
        return self._failure("protocol", f"its shell exited with code {code} before the agent started{quoted}")

    def _text(self, output: bytes = b"") -> str:
        """The node's output and stderr so far, in one line."""
        while self._channel.recv_stderr_ready():
            self._stderr = (self._stderr + self._channel.recv_stderr(READ_BYTES))[-_STDERR_BYTES:]
        lines = (output + self._stderr).decode(errors="replace").split("\n")
        return "; ".join(line.strip() for line in lines if line.strip())[:300]

    def _failure(self, kind: Any, text: str) -> ConnectError:
        return ConnectError(kind, self.name, text)

    def send(self, command: Command) -> None:
        """Queue a command for the writer thread: a node that doesn't read must not block the head."""
        self._outbox.put(wire.encode(command))

    def _write(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                self._channel.sendall(frame)
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):  # the reader reports it
            pass

    def _read_stderr(self) -> None:
        while data := self._channel.recv_stderr(READ_BYTES):
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    def messages(self) -> Iterator[Any]:
        """The agent's events, until it or the connection ends."""
        decoder = wire.Decoder()
        silent = True
        while data := self._channel.recv(READ_BYTES):
            silent = False
            yield from decoder.feed(data)
        if silent:  # the agent never came up, so only stderr can say why
            self._stderr_reader.join(_STDERR_SECONDS)
            if text := self._text():
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
