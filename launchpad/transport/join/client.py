"""A node's side of joining: finds the head, proves the secret, and makes its offer."""

from __future__ import annotations

import hmac
import json
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

from launchpad._version import __version__
from launchpad.protocol import wire
from launchpad.protocol.events import Event
from launchpad.protocol.printable import printable
from launchpad.transport.join.proof import node_context, nonce, proof
from launchpad.transport.join.tls import Reactor, TlsConnection, connect

# How long the head has for all its answers.
ANSWER_SECONDS = 30.0

CONNECT_SECONDS = 5.0

_NOT_LAUNCHPAD = "something other than a launchpad that waits for nodes answers there"


class JoinRefused(Exception):
    """The head doesn't let this node in, or is not the job's head; says why."""


class HeadConnection:
    """A node's connection to the head, once it has been let in."""

    def __init__(self, address: tuple[str, int], secret: bytes, offer: dict[str, Any]) -> None:
        """Join. Raises OSError if nobody listens there yet, or hangs up, and JoinRefused."""
        sock = connect(address, CONNECT_SECONDS)
        self._reactor = Reactor(lambda reason: self._deliver(reason))
        self._inbox: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        self._deliver: Callable[[bytes | str], None] = self._inbox.put
        self._rest = b""
        self._connection = TlsConnection(
            self._reactor,
            sock,
            node_context(),
            server=False,
            opened=lambda: None,
            received=lambda data: self._deliver(data),
            ended=lambda reason: self._deliver(reason),
        )
        try:
            self._until = time.monotonic() + ANSWER_SECONDS
            self.notes = self._greet(secret, offer)
        except BaseException:
            self.close()
            raise

    def _greet(self, secret: bytes, offer: dict[str, Any]) -> list[str]:
        own = nonce()
        answer = self._ask({"launchpad": __version__, "nonce": own})
        nonces = (own, str(answer.get("nonce")))
        certificate = self._connection.certificate
        answer = self._ask({"proof": proof(secret, "node", nonces, certificate)})
        proven = str(answer.get("proof")).encode("utf-8", "replace")
        if not hmac.compare_digest(proven, proof(secret, "head", nonces, certificate).encode()):
            raise JoinRefused("what listens there doesn't know the job's secret (--rdzv-id, --rdzv-secret-file)")
        self._reactor.call(self._connection.trust)
        answer = self._ask({"offer": offer})
        return [str(note) for note in answer.get("welcome") or []]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._connection.send(json.dumps(message).encode() + b"\n")
        data = self._rest
        while b"\n" not in data:
            try:
                more = self._inbox.get(timeout=max(0.0, self._until - time.monotonic()))
            except queue.Empty:
                said = "no whole line" if data else "nothing"
                raise JoinRefused(f"{_NOT_LAUNCHPAD}: it says {said}") from None
            if isinstance(more, str):
                if more.startswith(("it doesn't speak TLS", "it says too much")):
                    raise JoinRefused(f"{_NOT_LAUNCHPAD}: {more}")
                raise ConnectionResetError(0, more or "it hung up")
            data += more
        line, _, self._rest = data.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise JoinRefused(f"{_NOT_LAUNCHPAD}: it says {line[:60]!r}")
        if "error" in answer:
            raise JoinRefused(printable(str(answer["error"])))  # perhaps by a peer that has proven nothing yet
        return answer

    def begin(self, take: Callable[[Any], None]) -> None:
        """Pass each command from the head to `take`, in a thread; at the end None."""
        decoder = wire.Decoder()

        def feed(data: bytes | str) -> None:
            if isinstance(data, str):
                take(None)
                return
            try:
                for command in decoder.feed(data):
                    take(command)
            except wire.WireError:
                self._connection.end("")

        def start() -> None:  # in the reactor's thread, so that nothing overtakes what is here already
            rest, self._rest = self._rest, b""
            if rest:
                feed(rest)
            while not self._inbox.empty():
                feed(self._inbox.get())
            self._deliver = feed

        self._reactor.call(start)

    def send(self, event: Event) -> None:
        """Queue an event for the head."""
        self._connection.send(wire.encode(event))

    def close(self) -> None:
        """Hang up."""
        self._connection.abort()
        self._reactor.close()


def resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a host. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise OSError(0, "no valid host name") from None
    return list(dict.fromkeys(str(place[4][0]) for place in found))


def no_address(host: str, error: OSError) -> str:
    """Why `resolve` has found no address."""
    return f"{host} can't be resolved ({error.strerror})"
