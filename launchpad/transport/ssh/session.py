"""The SSH handshake over a byte stream: banner, key exchange, host key."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any, cast

import paramiko
from paramiko.packet import Packetizer

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import Destination
from launchpad.transport.ssh.known_hosts import KnownHosts
from launchpad.transport.ssh.turns import Dropped

# The key exchange takes CPU time: a busy host that accepts a connection quickly may still be slow here.
HANDSHAKE_FACTOR = 3
AUTH_SECONDS = 60.0

# What sshd says before it drops a connection because there are too many, or because it penalises the address.
_TURNED_AWAY = ("Exceeded MaxStartups", "Not allowed at this time")

# Without a handler, Python prints paramiko's errors to stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _Packets(Packetizer):
    """Keeps the lines that a server sends before or instead of a banner."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.lines: list[str] = []

    def readline(self, timeout: float) -> str:
        line: str = super().readline(timeout)
        self.lines.append(line)
        return line


class Session(paramiko.Transport):
    """A Transport that knows why it ended and leaves nothing behind."""

    def __init__(self, stream: Any, destination: Destination) -> None:
        super().__init__(stream, packetizer_class=_Packets)
        self._packets = cast(_Packets, self.packetizer)
        self.farewell = ""  # the text of the server's disconnect message
        self.banner_timeout = destination.connect_timeout
        self.handshake_timeout = HANDSHAKE_FACTOR * destination.connect_timeout
        self.auth_timeout = AUTH_SECONDS
        self._destination = destination
        self._opening = threading.local()
        self._refusals: dict[int, tuple[int, str]] = {}

    def _parse_disconnect(self, m: Any) -> None:
        m.get_int()
        self.farewell = m.get_text()

    def open_tunnel(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """A channel to an address that the server connects to for us. A ChannelException has the server's own words.

        paramiko itself keeps one exception for all threads that open channels, and only the number of a refusal.
        """
        try:
            # The origin address is only for the server's log.
            return self.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout)
        except paramiko.SSHException:
            refusal = self._refusals.pop(self._opening.channel, None)
            if refusal is None:
                raise
            raise paramiko.ChannelException(*refusal) from None

    def _next_channel(self) -> int:
        self._opening.channel = super()._next_channel()  # type: ignore[misc]
        return cast(int, self._opening.channel)

    def _parse_channel_open_failure(self, m: Any) -> None:
        channel, code, text = m.get_int(), m.get_int(), m.get_text()
        self._refusals[channel] = code, text
        m.rewind()
        super()._parse_channel_open_failure(m)  # type: ignore[misc]

    def handshake(self, hosts: KnownHosts) -> None:
        """Exchange keys and check the host's. Raises ConnectError or Dropped."""
        self._prefer(hosts.key_types(self._destination))
        done = threading.Event()
        self.start_client(event=done)
        deadline = time.monotonic() + self.banner_timeout + self.handshake_timeout
        # Neither a timeout nor a close by another thread sets the event.
        while not done.wait(0.1) and self.is_active() and time.monotonic() < deadline:
            pass
        try:
            key = self.get_remote_server_key()
        except paramiko.SSHException:  # there is none: the key exchange failed, or the host hung up
            raise self._failure() from None
        hosts.check(self._destination, key)

    def _prefer(self, known: tuple[str, ...]) -> None:
        """Ask for known key types first: a host has several keys, and presents the type that is asked for first."""
        options = self.get_security_options()
        first = [name for kind in known for name in options.key_types if _signs(kind, name)]
        options.key_types = tuple(dict.fromkeys([*first, *options.key_types]))
        # paramiko ranks GCM last, but it needs no HMAC, which costs more than the cipher.
        options.ciphers = tuple(sorted(options.ciphers, key=lambda name: "-gcm@" not in name))

    def _failure(self) -> ConnectError | Dropped:
        place, name = self._destination.place, self._destination.name
        error = self.get_exception()
        lines = [line for line in self._packets.lines if line.strip()]
        if self.remote_version:
            return self._kex_failure(error)
        if isinstance(error, paramiko.SSHException) and not isinstance(error.__context__, (EOFError, OSError)):
            return ConnectError("protocol", name, f"{place} doesn't speak SSH ({error}); is this sshd's port?")
        if lines and not lines[-1].startswith(_TURNED_AWAY):
            text = f"{place} is not sshd: it said {lines[-1][:80]!r}; correct the port"
            return ConnectError("protocol", name, text)
        if error is None or isinstance(error.__context__, TimeoutError):
            text = f"{place} accepted the connection but sent nothing for {self.banner_timeout:g} s;"
            return ConnectError("timed out", name, f"{text} is this sshd's port, and is the host overloaded?")
        how = f"with {lines[-1]!r}" if lines else "without a word"
        text = f"{place} closed the connection {how}; see its sshd's log (MaxStartups, a firewall, hosts.deny)"
        return Dropped(ConnectError("protocol", name, text))

    def _kex_failure(self, error: Exception | None) -> ConnectError:
        place, name = self._destination.place, self._destination.name
        if isinstance(error, paramiko.SSHException):
            text = f"key exchange with {place} ({self.remote_version}) failed: {error}; update its sshd, or check"
            return ConnectError("protocol", name, f"{text} Ciphers, KexAlgorithms and HostKeyAlgorithms there")
        if error is None or self.packetizer.handshake_timed_out():
            text = f"{place} ({self.remote_version}) did not finish the key exchange in {self.handshake_timeout:g} s;"
            return ConnectError("timed out", name, f"{text} is it overloaded, or are large packets lost (MTU)?")
        reason = f" ({self.farewell})" if self.farewell else ""
        text = f"{place} ({self.remote_version}) closed the connection during the key exchange{reason};"
        return ConnectError("protocol", name, f"{text} see its sshd's log")

    def hang_up(self) -> None:
        """Close, without waiting for the thread."""
        # paramiko's handshake timer is a thread that outlives a failed handshake and delays the interpreter's exit.
        self.packetizer.complete_handshake()
        with contextlib.suppress(EOFError, OSError):  # the jump host's connection may end just now
            self.close()
        with contextlib.suppress(EOFError, OSError):
            self.sock.close()

    def wait_closed(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self.ident is not None:
            self.join(timeout)


def _signs(key_type: str, algorithm: str) -> bool:
    return algorithm.startswith("rsa-") if key_type == "ssh-rsa" else algorithm == key_type
