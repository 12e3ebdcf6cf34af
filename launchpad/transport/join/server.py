"""A door: listens, lets in nodes that know the secret, and makes a link of each."""

from __future__ import annotations

import errno
import hmac
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from launchpad import linux
from launchpad._version import __version__
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, JobEnded
from launchpad.protocol.events import AgentLeft
from launchpad.protocol.printable import printable
from launchpad.protocol.typed import typed
from launchpad.transport import CLOSE_SECONDS
from launchpad.transport.join.proof import head_context, nonce, proof
from launchpad.transport.join.tls import Reactor, TlsConnection

# How long a new connection has for TLS, the proof and the offer.
GREETING_SECONDS = 10.0

# No more connections than this are accepted that are not let in yet. When there are so many, those that have had this
# long are dropped, the oldest first: a stranger who says nothing must not keep the nodes out, nor a burst of nodes
# each other.
MOST_GREETING = 512
FAIR_SECONDS = 2.0

# No more than this many of them are of one address, so that no address keeps the others out: the oldest is dropped or,
# if it has not had its time yet, the one that has just come, whose launchpad tries again.
MOST_OF_ADDRESS = 128

# Where no descriptor or memory is left for another connection, when to try again; and the errors that say so.
SCARCE_SECONDS = 0.5
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

LONGEST_LINE = 1 << 20  # of a node that knows the secret; TLS connections stop strangers long before

# How many refusals are told at most: they cost a stranger nothing.
MOST_TURNED_AWAY = 100

# What a node hears whose proof is wrong: it was made with another secret, or for another certificate.
_UNPROVEN = (
    "the job's secret differs; pass the same --rdzv-id, or the same --rdzv-secret-file (if it is the same, somebody is "
    "intercepting the connection)"
)

# How long telling the nodes how the job ended may delay us.
TELL_SECONDS = 1.0


class Gate(Protocol):
    """Who may join. All is called in the reactor's thread, and must not block."""

    def state(self) -> dict[str, Any]:
        """The answer to a launcher that knows the secret, and asks whether there is a head."""

    def told(self, place: tuple[str, int], term: int) -> None:
        """Somebody who knows the secret leads this term of the job from there."""

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> dict[str, Any]:
        """Judge a node that knows the secret. Returns the answer, which is "welcome", "wait", "led" or "error".

        Raises KeyError, TypeError or ValueError for an offer that is none.
        """

    def joined(self, link: JoinedLink) -> None:
        """An admitted node knows that it is; its link may be used."""

    def refused(self, address: str, reason: str) -> None:
        """A peer that spoke our protocol was turned away. Called once for each address and reason, and not for ever."""


class JoinServer:
    """Listens for nodes until it is closed."""

    def __init__(self, listener: socket.socket, secret: bytes, gate: Gate) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.secret = secret
        self.gate = gate
        self.context, self.certificate = head_context()
        self.reactor = Reactor(lambda reason: self.turn_away("an unknown address", reason))
        self._greeting: dict[_Greeting, None] = {}  # the oldest first
        self._addresses: Counter[str] = Counter()  # how many of them each address has
        self._turned_away: set[tuple[str, str]] = set()
        self._full = False  # there are so many that we wait for one to go
        self.reactor.call(lambda: self._watch(1))

    def replace(self, gate: Gate) -> None:
        """Have another one judge from now on. Returns once it does."""
        done = threading.Event()

        def begin() -> None:
            self.gate = gate
            done.set()

        self.reactor.call(begin)
        done.wait()

    def tell(self, links: Iterable[JoinedLink], ended: JobEnded) -> None:
        """Tell the nodes how the job ended. Waits until that is on its way, for a moment at most."""
        for link in links:
            link.send(ended)
        sent = threading.Event()
        self.reactor.call(sent.set)
        sent.wait(TELL_SECONDS)

    def stop_listening(self) -> None:
        """Let nobody else in, and free the port."""
        done = threading.Event()

        def stop() -> None:
            if self._listener.fileno() >= 0:
                self._full = False
                self.reactor.forget(self)
                self._watch(0)
                self._listener.close()
            for one in list(self._greeting):
                one.connection.end("")
            done.set()

        self.reactor.call(stop)
        done.wait()

    def close(self) -> None:
        """End the thread. The links must be closed before."""
        self.stop_listening()
        self.reactor.close()

    def _watch(self, events: int) -> None:
        self.reactor.watch(self._listener, self._accept, events, stranger=True)

    def _accept(self, _: int) -> None:
        if not self._has_room():
            return
        try:
            sock, peer = self._listener.accept()
        except OSError as error:
            if error.errno in _SCARCE and not (error.errno == errno.EMFILE and linux.raise_file_limit()):
                self._pause(SCARCE_SECONDS)
            return  # otherwise it has gone already
        address = str(peer[0]).removeprefix("::ffff:")
        if not self._has_room_of(linux.network_of(address)):
            sock.close()
            return
        try:
            one = _Greeting(self, sock, address)
        except OSError:  # it has gone already
            sock.close()
            return
        self._greeting[one] = None
        self._addresses[one.network] += 1

    def _has_room(self) -> bool:
        """Whether another connection may be accepted. If not, we wait until one has gone, or has had long enough."""
        if len(self._greeting) < MOST_GREETING:
            return True
        oldest = next(iter(self._greeting))
        left = oldest.since + FAIR_SECONDS - time.monotonic()
        if left <= 0:
            oldest.connection.end("")
            return True
        self._full = True
        self._pause(left)
        return False

    def _has_room_of(self, network: str) -> bool:
        """Whether another connection of this address may be greeted, perhaps instead of its oldest."""
        if self._addresses[network] < MOST_OF_ADDRESS:
            return True
        oldest = next(one for one in self._greeting if one.network == network)
        if oldest.since + FAIR_SECONDS > time.monotonic():
            return False
        oldest.connection.end("")
        return True

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a while."""
        self._watch(0)
        self.reactor.later(self, seconds, self._resume)

    def _resume(self) -> None:
        self._full = False
        self.reactor.forget(self)
        self._watch(1)

    def gone(self, one: _Greeting) -> None:
        """This connection is no longer in its greeting."""
        if one not in self._greeting:
            return
        del self._greeting[one]
        self._addresses[one.network] -= 1
        if not self._addresses[one.network]:
            del self._addresses[one.network]
        self.reactor.forget(one)
        if self._full:
            self._resume()

    def turn_away(self, address: str, reason: str) -> None:
        """Have the user told that a peer was refused."""
        told = (address, reason)
        if told not in self._turned_away and len(self._turned_away) < MOST_TURNED_AWAY:
            self._turned_away.add(told)
            self.gate.refused(*told)


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket for a JoinServer; port 0 is any free one. Raises OSError if the address is taken or not ours."""
    listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


class _Greeting:
    """A connection until it is let in."""

    def __init__(self, server: JoinServer, sock: socket.socket, peer: str) -> None:
        """Raises OSError if it has gone already."""
        self._server = server
        self._peer = peer
        self.network = linux.network_of(peer)
        self.since = time.monotonic()
        self._own = str(sock.getsockname()[0]).removeprefix("::ffff:")
        self._buffer = bytearray()
        self._nonces = ("", "")
        self._proven = False
        self._refused = False
        self._link: JoinedLink | None = None
        self.connection = TlsConnection(
            server.reactor,
            sock,
            server.context,
            server=True,
            opened=lambda: None,
            received=self._received,
            ended=self._ended,
        )
        # For all of it, also for reading why it is refused.
        server.reactor.later(self, GREETING_SECONDS, lambda: self.connection.end("its greeting took too long"))

    def _ended(self, reason: str) -> None:
        if self._link is not None:
            self._link.ended(reason)
            return
        self._server.gone(self)
        if self.connection.broken:
            self._server.turn_away(self._peer, self.connection.broken)

    def _received(self, data: bytes) -> None:
        if self._link is not None:
            self._link.received(data)
            return
        if self._refused:
            return
        searched = len(self._buffer)
        self._buffer += data
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            searched = 0
            if not self._take(line):
                return
        if len(self._buffer) > LONGEST_LINE:
            self.connection.end("its greeting is too long")

    def _take(self, line: bytes) -> bool:
        """Answer a line. Returns whether others may follow."""
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise TypeError("not an object")
            answer = self._answer(message)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if not self._proven:
                self.connection.end("it doesn't speak launchpad's protocol")
                return False
            answer = {"error": printable(f"its offer is not valid: {type(error).__name__}: {error}"[:300])}
        self.connection.send(json.dumps(answer).encode() + b"\n")
        if "error" in answer:
            self._refused = True
            self.connection.finish()
            self._server.turn_away(self._peer, answer["error"])
            return False
        if self._link is None:
            return True
        self._link.ready = True
        self._server.gate.joined(self._link)
        self._link.received(bytes(self._buffer))
        self._buffer.clear()
        return False

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        server = self._server
        if not self._nonces[0]:
            self._nonces = (str(message["nonce"]), nonce())
            if message["launchpad"] != __version__:
                version = printable(str(message["launchpad"])[:40])  # of a peer that has proven nothing yet
                error = f"it runs launchpad {version}, and the head {__version__}"
                return {"error": f"{error}; install the same version on every node", "launchpad": __version__}
            return {"launchpad": __version__, "nonce": self._nonces[1]}
        if not self._proven:
            wanted = proof(server.secret, "node", self._nonces, server.certificate)
            if not hmac.compare_digest(str(message["proof"]).encode("utf-8", "replace"), wanted.encode()):
                return {"error": _UNPROVEN}
            self._proven = True
            self.connection.trust()
            return {"proof": proof(server.secret, "head", self._nonces, server.certificate)}
        if "led" in message:
            server.gate.told(typed(tuple[str, int], message["led"]), typed(int, message["term"]))
            return server.gate.state()
        if "ask" in message:
            return server.gate.state()
        link = JoinedLink(str(message["offer"]["name"]), self._own, self._peer, self.connection)
        answer = server.gate.admit(link, message["offer"])
        if not answer.keys().isdisjoint(("welcome", "wait")):
            server.gone(self)
            self._link = link
        return answer


class JoinedLink:
    """A Link to a node that has joined."""

    remote = True

    def __init__(self, name: str, own_address: str, address: str, connection: TlsConnection) -> None:
        self.name = name
        self.own_address = own_address  # this machine's, which the node reached
        self.address = address  # from which it has come
        self._connection = connection
        self._decoder = wire.Decoder()
        self._take: Callable[[Any], None] | None = None
        self._early: list[Any] = []
        self._agent_left = False
        self._told = False  # it knows how the job ended
        self.ready = False  # the node knows that it has joined, so frames may follow
        self.gone = threading.Event()  # the connection has ended

    def send(self, command: Command) -> None:
        """Queue a command for the node."""
        self._told = self._told or type(command) is JobEnded
        self._connection.send(wire.encode(command))

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Pass each event to `take`, in the reactor's thread; None at the end of the agent or the connection."""
        early, self._early = self._early, []
        for event in early:
            take(event)
        self._take = take

    def messages(self) -> Iterator[Any]:
        """Unused: `deliver` is what links like this one have instead."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        """Bytes from the node."""
        try:
            for event in self._decoder.feed(data):
                if type(event) is AgentLeft:
                    self._end(None)
                elif not self._agent_left:
                    self._give(event)
        except wire.WireError as error:
            self._end(error)
            self._connection.end("")

    def ended(self, reason: str) -> None:
        """The connection has ended."""
        self._end(OSError(reason) if reason else None)
        self.gone.set()

    def _end(self, error: Exception | None) -> None:
        if not self._agent_left:
            self._agent_left = True
            if error is not None:
                self._give(error)
            self._give(None)

    def _give(self, event: Any) -> None:
        if self._take is None:
            self._early.append(event)
        else:
            self._take(event)

    def close(self) -> None:
        """Wait until the node, which knows how the job ended, has hung up."""
        if not self._told:
            self.send(JobEnded(1, ["the head of the job ended without saying why"]))
        if not self.gone.wait(CLOSE_SECONDS):
            self.abandon()

    def abandon(self) -> None:
        """Hang up now."""
        self._connection.abort()
