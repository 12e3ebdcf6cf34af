"""The SSH handshake over a stream: banner, key exchange, host key."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, cast

import paramiko
from paramiko.packet import Packetizer

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import Destination
from launchpad.transport.ssh.known_hosts import KnownHosts

# A key exchange is work: on a busy host it takes its time when the connection no longer does.
HANDSHAKE_FACTOR = 3
AUTH_SECONDS = 60.0

# What sshd says before it hangs up on a connection too many, or on one from an address that it is cross with.
_TURNED_AWAY = ("Exceeded MaxStartups", "Not allowed at this time")

# With no handler at all, Python prints paramiko's errors to stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Dropped(Exception):
    """The host hung up where it might not the next time; `error` is what to tell if it does."""

    def __init__(self, error: ConnectError) -> None:
        super().__init__(str(error))
        self.error = error


class _Packets(Packetizer):
    """Keeps what a server says instead of a banner."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.said: list[str] = []

    def readline(self, timeout: float) -> str:
        line: str = super().readline(timeout)
        self.said.append(line)
        return line


class Session(paramiko.Transport):
    """A Transport that knows why it ended, and leaves nothing behind when it has."""

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

    def open_way(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """A channel to where the server connects for us; a ChannelException has the server's own words.

        paramiko keeps one exception for all threads that open a channel, and of a refusal only its number.
        """
        try:
            # The origin is for the server's log only.
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

    def shake_hands(self, hosts: KnownHosts) -> None:
        """Agree on keys, and make sure of the host's. Raises ConnectError, or Dropped."""
        self._prefer(hosts.key_types(self._destination))
        done = threading.Event()
        self.start_client(event=done)
        deadline = time.monotonic() + self.banner_timeout + self.handshake_timeout
        # Neither a time-out nor a close from elsewhere sets the event.
        while not done.wait(0.1) and self.is_active() and time.monotonic() < deadline:
            pass
        try:
            key = self.get_remote_server_key()
        except paramiko.SSHException:  # there is none: not agreed upon, or the host is gone again
            raise self._failure() from None
        hosts.check(self._destination, key)

    def _prefer(self, known: tuple[str, ...]) -> None:
        """Ask first for the key types that are known: a host has several, and shows the one that it is asked for."""
        options = self.get_security_options()
        first = [name for kind in known for name in options.key_types if _signs(kind, name)]
        options.key_types = tuple(dict.fromkeys([*first, *options.key_types]))
        # paramiko asks for these last; they need no HMAC, which costs more than the cipher.
        options.ciphers = tuple(sorted(options.ciphers, key=lambda name: "-gcm@" not in name))

    def _failure(self) -> ConnectError | Dropped:
        place, name = self._destination.place, self._destination.name
        error = self.get_exception()
        said = [line for line in self._packets.said if line.strip()]
        if self.remote_version:
            return self._kex_failure(error)
        if isinstance(error, paramiko.SSHException) and not isinstance(error.__context__, (EOFError, OSError)):
            return ConnectError("protocol", name, f"{place} speaks another protocol ({error}); is it sshd's port?")
        if said and not said[-1].startswith(_TURNED_AWAY):
            text = f"{place} is not sshd: it said {said[-1][:80]!r}; correct the port"
            return ConnectError("protocol", name, text)
        if error is None or isinstance(error.__context__, TimeoutError):
            text = (
                f"{place} took the connection, then said nothing for {self.banner_timeout:g} s; is it sshd's port, and"
            )
            return ConnectError("timed out", name, f"{text} is the host well?")
        why = f"saying {said[-1]!r}" if said else "with no word"
        text = f"{place} closed the connection {why}; its sshd's log says why (MaxStartups, a firewall, hosts.deny)"
        return Dropped(ConnectError("protocol", name, text))

    def _kex_failure(self, error: Exception | None) -> ConnectError:
        place, name = self._destination.place, self._destination.name
        if isinstance(error, paramiko.SSHException):
            text = f"{place} ({self.remote_version}) and launchpad agree on no keys: {error}; update its sshd, or"
            return ConnectError("protocol", name, f"{text} look into Ciphers, KexAlgorithms, HostKeyAlgorithms there")
        if error is None or self.packetizer.handshake_timed_out():
            text = f"{place} ({self.remote_version}) did not end the key exchange in {self.handshake_timeout:g} s;"
            return ConnectError("timed out", name, f"{text} is it overloaded, or are large packets lost (MTU)?")
        said = f" ({self.farewell})" if self.farewell else ""
        text = f"{place} ({self.remote_version}) closed the connection during the key exchange{said}; its sshd's log"
        return ConnectError("protocol", name, f"{text} says why")

    def hang_up(self) -> None:
        """Close, without waiting for the thread to end."""
        # paramiko's handshake timer is a thread that outlives a failed handshake, and holds up the interpreter's exit.
        self.packetizer.complete_handshake()
        self.close()
        self.sock.close()

    def gone(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self.ident is not None:
            self.join(timeout)


def _signs(key_type: str, algorithm: str) -> bool:
    return algorithm.startswith("rsa-") if key_type == "ssh-rsa" else algorithm == key_type
