"""The byte stream under an SSH connection: a TCP socket, a ProxyCommand, or a channel of a jump host."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

import paramiko

from launchpad import linux
from launchpad.errors import ConnectError, ConnectFailure
from launchpad.transport.ssh.config import Destination
from launchpad.transport.ssh.session import Session

# How long a ProxyCommand may outlive its connection.
COMMAND_END_SECONDS = 1.0

_FORBIDDEN = 1  # RFC 4254: SSH_OPEN_ADMINISTRATIVELY_PROHIBITED


def open_tcp(destination: Destination) -> socket.socket:
    """Connect to the first of the host's addresses that answers. Raises ConnectError."""
    try:
        found = socket.getaddrinfo(destination.address, destination.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise ConnectError(
            "unresolvable",
            destination.name,
            f"can't resolve {destination.address} ({reason}); correct the name, or set a HostName for it in "
            "~/.ssh/config",
        ) from None
    failures: dict[ConnectFailure, list[str]] = {}
    for family, kind, protocol, _, address in found:
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(destination.connect_timeout)
            stream.connect(address)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream
        except OSError as error:
            stream.close()
            failures.setdefault(_kind(error), []).append(f"{address[0]}: {error.strerror or 'no answer'}")
    raise _not_reached(destination, failures)


def _kind(error: OSError) -> ConnectFailure:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timed out"
    return "unreachable"


def _not_reached(destination: Destination, failures: dict[ConnectFailure, list[str]]) -> ConnectError:
    texts: dict[ConnectFailure, str] = {
        "refused": f"nothing listens at {destination.place}; start sshd there, or correct the port",
        "timed out": f"{destination.place} did not accept a connection within {destination.connect_timeout:g} s; is "
        "the host up, and does a firewall let the port through?",
        "unreachable": f"there is no route to {destination.place}; check the address and this machine's network",
    }
    kind = next(kind for kind in texts if kind in failures)
    details = "; ".join(text for several in failures.values() for text in several)
    return ConnectError(kind, destination.name, f"{texts[kind]} ({details})")


def open_channel(jump: Session, jump_name: str, destination: Destination) -> paramiko.Channel:
    """Have the jump host connect to the destination. Raises ConnectError."""
    try:
        return jump.open_tunnel(destination.address, destination.port, destination.connect_timeout)
    except paramiko.ChannelException as error:
        reason = error.text.lower()
        if error.code == _FORBIDDEN:
            fix = "allow them in its sshd_config with AllowTcpForwarding and PermitOpen"
            text = f"the jump host {jump_name} forbids connections to {destination.place}; {fix}"
            raise ConnectError("refused", destination.name, text) from None
        kinds: dict[str, ConnectFailure] = {"refused": "refused", "timed out": "timed out", "name": "unresolvable"}
        kind: ConnectFailure = next((kinds[word] for word in kinds if word in reason), "unreachable")
        text = f"the jump host {jump_name} can't connect to {destination.place} ({error.text}); check that"
        fix = f"{jump_name} can resolve the address and that sshd runs there"
        raise ConnectError(kind, destination.name, f"{text} {fix}") from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if "imeout" in str(error):
            text = f"{destination.place} did not accept a connection from the jump host {jump_name} within"
            text = f"{text} {destination.connect_timeout:g} s; is the host up?"
            raise ConnectError("timed out", destination.name, text) from None
        text = f"the connection to the jump host {jump_name} ended ({error or type(error).__name__}); try again"
        raise ConnectError("protocol", destination.name, text) from None


class ProxyCommand:
    """A ProxyCommand, with a socket as its stdin and stdout.

    paramiko's own never notices that the command has exited, spins in the meantime, and leaves a zombie.
    """

    def __init__(self, destination: Destination) -> None:
        """Start it like ssh does, with the user's shell, but in its own session, out of reach of Ctrl-C."""
        self.line = destination.proxy_command
        self._ending = threading.Lock()  # a failed connection and ConnectionPool.close may both end it
        self.stream, theirs = socket.socketpair()
        shell = os.environ.get("SHELL") or "/bin/sh"
        # Unnamed, so it disappears with its descriptor.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {self.line}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self.stream.close()
            self._stderr.close()
            text = f"ProxyCommand {self.line!r}: {shell}: {error.strerror}; set SHELL to an existing shell"
            raise ConnectError("protocol", destination.name, text) from None
        finally:
            theirs.close()

    def hang_up(self) -> None:
        """Tell it and its children to exit, as ssh does when it exits, without waiting."""
        with self._ending:
            if self._stderr.closed:
                return
            try:
                os.killpg(self._process.pid, signal.SIGHUP)
            except OSError:  # the whole group now runs as another user (sudo)
                pass

    def kill_at(self, deadline: float) -> None:
        """See to it that it and its children are gone soon after this time (`time.monotonic()`)."""
        with self._ending:
            if self._stderr.closed:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            linux.end_group(self._process.pid, max(0.0, deadline - time.monotonic()))

    def end(self) -> str:
        """End the command if it is still running. Returns its stderr, in one line."""
        self.stream.close()
        with self._ending:
            if self._stderr.closed:
                return ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(COMMAND_END_SECONDS)
            linux.end_group(self._process.pid, COMMAND_END_SECONDS)  # a script may have left others
            self._process.wait()
            self._stderr.seek(0)
            output = self._stderr.read()
            self._stderr.close()
        return " ".join(output.decode(errors="replace").split())[-300:]
