"""A node's side of joining: dials a door, proves the secret, and asks or makes its offer."""

from __future__ import annotations

import errno
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
from launchpad.protocol.typed import typed
from launchpad.transport.join.proof import node_context, nonce, proof
from launchpad.transport.join.tls import Reactor, TlsConnection, connect

# How long the head has for all its answers.
ANSWER_SECONDS = 30.0

CONNECT_SECONDS = 5.0

# Why there is no connection, as long as nothing is heard: a host without a head would refuse one at once.
NO_ANSWER = "no answer; the host is down, or a firewall drops what is sent to it"

_NOT_LAUNCHPAD = "something other than a launchpad that waits for nodes answers there"


class JoinRefused(Exception):
    """The head doesn't let this node in, or is not the job's head; says why."""


class LedElsewhere(Exception):
    """The job is led from this place."""

    def __init__(self, place: tuple[str, int]) -> None:
        host, port = place
        super().__init__(f"the job is led from {f'[{host}]' if ':' in host else host}:{port}")
        self.place = place


class HeadConnection:
    """A node's connection to the head, or to a launcher that may lead soon, once it has been let in."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        offer: dict[str, Any] | None,
        *,
        tell: dict[str, Any] | None = None,
    ) -> None:
        """Join; without an offer, only ask, or `tell` who leads. Raises OSError if nobody listens there, or hangs up.

        Raises JoinRefused, and LedElsewhere for an offer. Where it is not known yet who leads, that is an OSError.
        """
        sock = connect(address, CONNECT_SECONDS)
        self.place = address
        self._reactor = Reactor(lambda reason: self._deliver(reason))
        self._inbox: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        self._deliver: Callable[[bytes | str], None] = self._inbox.put
        self._rest = b""
        self._ended = False
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
            self._greet(secret)
            self.answer = self._ask((tell or {"ask": True}) if offer is None else {"offer": offer})
            if offer is not None and "led" in self.answer:
                raise LedElsewhere(place_of(self.answer["led"]))
            if offer is not None and "later" in self.answer:
                raise BlockingIOError(errno.EAGAIN, "the launchpad there doesn't know yet who leads the job")
        except BaseException:
            self.close()
            raise

    @property
    def waits(self) -> bool:
        """The launcher there has no head either."""
        return "wait" in self.answer

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        return [str(note) for note in self.answer.get("welcome") or []]

    def _greet(self, secret: bytes) -> None:
        own = nonce()
        answer = self._ask({"launchpad": __version__, "nonce": own})
        nonces = (own, str(answer.get("nonce")))
        certificate = self._connection.certificate
        answer = self._ask({"proof": proof(secret, "node", nonces, certificate)})
        proven = str(answer.get("proof")).encode("utf-8", "replace")
        if not hmac.compare_digest(proven, proof(secret, "head", nonces, certificate).encode()):
            raise JoinRefused("what listens there doesn't know the job's secret (--rdzv-id, --rdzv-secret-file)")
        self._reactor.call(self._connection.trust)

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

    def watch(self, heard: Callable[[], None]) -> None:
        """Have this called, in a thread, whenever something comes, until `begin`."""

        def note(data: bytes | str) -> None:
            self._ended = self._ended or isinstance(data, str)
            self._inbox.put(data)
            heard()

        def start() -> None:
            for data in [self._inbox.get() for _ in range(self._inbox.qsize())]:
                note(data)
            self._deliver = note

        self._reactor.call(start)

    @property
    def ended(self) -> bool:
        """It has hung up. Known while it is watched."""
        return self._ended

    @property
    def has_spoken(self) -> bool:
        """A command has come, for `begin` to pass on."""
        return bool(self._rest) or not self._inbox.empty()

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


def place_of(said: Any) -> tuple[str, int]:
    """HOST and PORT that a door has named. Raises JoinRefused."""
    try:
        return typed(tuple[str, int], said)  # type: ignore[no-any-return]
    except TypeError:
        raise JoinRefused(f"{_NOT_LAUNCHPAD}: it says {said!r:.60}") from None


def resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a host. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise OSError(0, "no valid host name") from None
    return list(dict.fromkeys(str(place[4][0]) for place in found))


def why_not(error: OSError) -> str:
    """Why nobody could be dialled."""
    return NO_ANSWER if isinstance(error, TimeoutError) else error.strerror or str(error)


def no_address(host: str, error: OSError) -> str:
    """Why `resolve` has found no address."""
    return f"{host} can't be resolved ({error.strerror})"
