"""A Link over SSH: one channel per node, whose far end is the node's guard and agent."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko

from launchpad import wire
from launchpad.commands import Command
from launchpad.errors import ConnectError
from launchpad.transport.ssh import parcel
from launchpad.transport.ssh.bootstrap import HAVE, MARK, NEED

READ_BYTES = 1 << 20

# A node whose Python has not come up by then is not going to.
START_SECONDS = 30.0

# Guard and agent end by themselves, at the latest after guard.STUCK_AGENT and processes.SWEEP_SECONDS.
CLOSE_SECONDS = 20.0

# Of what a node says on stderr so much is kept, for the case that it fails; and of what it says before the bootstrap.
_STDERR_BYTES = 2000
_GREETING_BYTES = 64 << 10

# What it has said on stderr comes with its end, or never.
_LAST_WORDS_SECONDS = 1.0


class SshLink:
    """A Link to an agent that is sent over the connection and started there."""

    remote = True

    def __init__(self, name: str, transport: paramiko.Transport, python: str, *, exact: bool) -> None:
        """Start the agent; ConnectError where that can't be done. `exact`: no other Python will do."""
        self.name = name
        self._transport = transport
        self._stderr = b""
        try:
            self._channel = transport.open_session(timeout=START_SECONDS)
            self._channel.settimeout(START_SECONDS)
            self._channel.exec_command(parcel.command(python, exact=exact))
            self._start(python)
            self._channel.settimeout(None)
        except paramiko.ChannelException as error:
            text = f"its sshd opens no session ({error.text}); look into MaxSessions in its sshd_config"
            raise self._failure("protocol", text) from None
        except TimeoutError:
            text = f"no answer to the command that starts the agent within {START_SECONDS:g} s; is the host well, and"
            raise self._failure("timed out", f"{text} does its sshd run another command (ForceCommand)?") from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._failure(
                "protocol", f"the agent can't be started: {str(error) or type(error).__name__}"
            ) from None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"ssh-writer-{name}", daemon=True).start()
        self._stderr_reader = threading.Thread(target=self._read_stderr, name=f"ssh-stderr-{name}", daemon=True)
        self._stderr_reader.start()

    @property
    def own_address(self) -> str:
        """This machine's address on the way to the node; "" where a jump host or a command stands between."""
        try:
            return str(self._transport.sock.getsockname()[0]).removeprefix("::ffff:")  # type: ignore[union-attr]
        except (AttributeError, TypeError, IndexError, OSError):
            return ""

    def _start(self, python: str) -> None:
        digest, data = parcel.parcel()
        self._channel.sendall(parcel.bootstrap() + f"{digest} {len(data)}\n".encode())
        answer = self._answer(python)
        if answer == NEED:
            self._channel.sendall(data)
        elif answer != HAVE:
            raise self._failure("no Python", answer.decode(errors="replace"))

    def _answer(self, python: str) -> bytes:
        """What the bootstrap says; a shell's greeting before it is skipped."""
        said = b""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            start = said.find(MARK)
            if start >= 0 and b"\n" in said[start:]:
                # Nothing follows the line until we have spoken.
                return said[start + len(MARK) :].partition(b"\n")[0]
            data = self._channel.recv(READ_BYTES)
            if not data:
                raise self._no_python(python, said)
            said = (said + data)[-_GREETING_BYTES:]
        raise TimeoutError

    def _no_python(self, python: str, said: bytes) -> ConnectError:
        deadline = time.monotonic() + START_SECONDS
        while not self._channel.exit_status_ready() and time.monotonic() < deadline and not self._channel.closed:
            self._channel.status_event.wait(0.1)
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        words = self._last_words(said)
        if code in (126, 127):
            return self._failure("no Python", f"{python} can't be run there{words}; name one with --python")
        return self._failure("protocol", f"its shell ended with exit code {code} before the agent was started{words}")

    def _last_words(self, said: bytes = b"") -> str:
        while self._channel.recv_stderr_ready():
            self._stderr = (self._stderr + self._channel.recv_stderr(READ_BYTES))[-_STDERR_BYTES:]
        lines = (said + self._stderr).decode(errors="replace").split("\n")
        text = "; ".join(line.strip() for line in lines if line.strip())
        return f" ({text[:300]})" if text else ""

    def _failure(self, kind: Any, text: str) -> ConnectError:
        return ConnectError(kind, self.name, text)

    def send(self, command: Command) -> None:
        """Queue a command for the writer thread: a node that does not read must not stop the head."""
        self._outbox.put(wire.encode(command))

    def _write(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                self._channel.sendall(frame)
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):  # the reading side tells
            pass

    def _read_stderr(self) -> None:
        while data := self._channel.recv_stderr(READ_BYTES):
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    def messages(self) -> Iterator[Any]:
        """The agent's events until its end, or the connection's."""
        decoder = wire.Decoder()
        silent = True
        while data := self._channel.recv(READ_BYTES):
            silent = False
            yield from decoder.feed(data)
        if silent:  # not even an agent that says why it ends
            self._stderr_reader.join(_LAST_WORDS_SECONDS)
            if words := self._last_words():
                raise OSError(f"it said{words}")

    def close(self) -> None:
        """Hang up; wait for the agent, which ends its ranks and leaves nothing."""
        self._outbox.put(None)
        self._channel.status_event.wait(CLOSE_SECONDS)
        self._transport.close()

    def abandon(self) -> None:
        """Hang up on a node that does not answer."""
        self._channel.status_event.set()
        self._transport.close()
