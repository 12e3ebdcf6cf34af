"""The byte stream that an SSH connection runs over: a TCP socket, a ProxyCommand, or a channel of a jump host."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import tempfile
import threading

import paramiko

from launchpad.errors import ConnectError, ConnectFailure
from launchpad.transport.ssh.config import Destination
from launchpad.transport.ssh.session import Session

# How long a ProxyCommand may take to end once its connection has.
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
            f"the name {destination.address} has no address here ({reason}); correct it, or give it a HostName in "
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
    raise _unreached(destination, failures)


def _kind(error: OSError) -> ConnectFailure:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timed out"
    return "unreachable"


def _unreached(destination: Destination, failures: dict[ConnectFailure, list[str]]) -> ConnectError:
    texts: dict[ConnectFailure, str] = {
        "refused": f"nothing listens at {destination.place}; start sshd there, or correct the port",
        "timed out": f"{destination.place} took no connection within {destination.connect_timeout:g} s; is the host "
        "up, and does a firewall let the port through?",
        "unreachable": f"there is no way to {destination.place}; check the address and this machine's network",
    }
    kind = next(kind for kind in texts if kind in failures)
    details = "; ".join(text for several in failures.values() for text in several)
    return ConnectError(kind, destination.name, f"{texts[kind]} ({details})")


def open_channel(jump: Session, jump_name: str, destination: Destination) -> paramiko.Channel:
    """Have the jump host connect to the destination. Raises ConnectError."""
    try:
        return jump.open_way(destination.address, destination.port, destination.connect_timeout)
    except paramiko.ChannelException as error:
        reason = error.text.lower()
        if error.code == _FORBIDDEN:
            mend = "allow it there: AllowTcpForwarding and PermitOpen in sshd_config"
            text = f"the jump host {jump_name} forbids connections to {destination.place}; {mend}"
            raise ConnectError("refused", destination.name, text) from None
        kinds: dict[str, ConnectFailure] = {"refused": "refused", "timed out": "timed out", "name": "unresolvable"}
        kind: ConnectFailure = next((kinds[word] for word in kinds if word in reason), "unreachable")
        text = f"the jump host {jump_name} can't connect to {destination.place} ({error.text}); check the address as"
        raise ConnectError(kind, destination.name, f"{text} {jump_name} knows it, and that sshd runs there") from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if "imeout" in str(error):
            text = f"{destination.place} took no connection from the jump host {jump_name} within"
            mend = f"{destination.connect_timeout:g} s; is the host up?"
            raise ConnectError("timed out", destination.name, f"{text} {mend}") from None
        text = f"the connection to the jump host {jump_name} ended ({error or type(error).__name__}); try again"
        raise ConnectError("protocol", destination.name, text) from None


class Command:
    """A ProxyCommand, with a socket for its standard input and output.

    Not paramiko's: that one never sees the command end, spins meanwhile, and leaves a zombie.
    """

    def __init__(self, destination: Destination) -> None:
        """Start it as ssh does, with the user's shell; in a session of its own, so that Ctrl-C doesn't reach it."""
        self.line = destination.proxy_command
        self._ending = threading.Lock()  # both a connection that fails and the Dialer's close end it
        self.stream, theirs = socket.socketpair()
        shell = os.environ.get("SHELL") or "/bin/sh"
        # Unnamed, and so gone with its descriptor.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {self.line}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._complaints,
                start_new_session=True,
            )
        except OSError as error:
            self.stream.close()
            self._complaints.close()
            text = f"ProxyCommand {self.line!r}: {shell}: {error.strerror}; set SHELL to one that is there"
            raise ConnectError("protocol", destination.name, text) from None
        finally:
            theirs.close()

    def hang_up(self) -> None:
        """Tell it, and what it has started, to end, as ssh does at its own end; don't wait for it."""
        with self._ending:
            if self._complaints.closed:
                return
            try:
                os.killpg(self._process.pid, signal.SIGHUP)
            except OSError:  # all of the group has become another user (sudo)
                pass

    def end(self) -> str:
        """End the command, unless it has; what it said on standard error, in one line."""
        self.stream.close()
        with self._ending:
            if self._complaints.closed:
                return ""
            try:
                self._process.wait(COMMAND_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._complaints.seek(0)
            said = self._complaints.read()
            self._complaints.close()
        return " ".join(said.decode(errors="replace").split())[-300:]
