"""What this host and the others see of each other: who answers where, how soon, what gets lost, how fast data flows.

Every host listens on all of its addresses. A caller sends the secret of the host that it means: several machines may
have an address like 172.17.0.1, so whatever answers there need not be the right one.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ... import linux
from ...protocol.health import Heard, Inlet, Network, Probed, Probes, Streamed
from ..host.probe import addresses
from ..net.strangers import Strangers

# A lost SYN is sent again after 1 and 3 s.
REACH_SECONDS = 3.3
# Once a host has answered at one address, how long to wait for a better one.
BETTER_SECONDS = 0.2

# All datagrams that a host sends fit into the other's receive buffer, even if that reads none for a while.
MOST_DATAGRAMS = 200
DATAGRAMS = 100  # at most so many to one host
PACE_SECONDS = 0.003
# How long to wait for an answer when no more have come.
QUIET_SECONDS = 0.3
LARGE_TRIES = 4

STREAM_BYTES = 256 << 10
CONNECTION_SECONDS = 5.0

# Where no descriptor is left for another connection, how long to wait for one.
SCARCE_SECONDS = 0.1

_BACKLOG = 1024
_SECRET_BYTES = 32
_REACH, _STREAM = b"r", b"s"
_HEAD = struct.Struct("!BII")  # of a datagram, after the secret: whether it is a large one, the sender, its number
_SMALL, _LARGE = 0, 1
_LARGEST_PACKET = (1 << 16) - 1

_SIOCGIFMTU = 0x8921
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_HEADERS: dict[int, int] = {socket.AF_INET: 20 + 8, socket.AF_INET6: 40 + 8}  # of IP and UDP


class EchoServer:
    """Answers those who call this host."""

    def __init__(self) -> None:
        self._secret = b""
        self._heard: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._strangers: Strangers[socket.socket] = Strangers()

    def listen(self, secret: str) -> Network:
        """Listen from now on."""
        self._secret = secret.encode()
        inlets = []
        for address, interface in addresses():
            tcp, udp = self._bound(address, socket.SOCK_STREAM), self._bound(address, socket.SOCK_DGRAM)
            if tcp:
                tcp.listen(_BACKLOG)
                threading.Thread(target=self._accept, args=[tcp], daemon=True).start()
            if udp:
                threading.Thread(target=self._echo, args=[udp], daemon=True).start()
            inlets.append(Inlet(address, interface, mtu_of(interface), _port(tcp), _port(udp)))
        return Network(inlets, [name for _, name in socket.if_nameindex()])

    def heard(self) -> Heard:
        """How many small datagrams have come from each host."""
        return Heard([[sender, count] for sender, count in sorted(self._heard.items())])

    def _bound(self, address: str, kind: socket.SocketKind) -> socket.socket | None:
        made = socket.socket(linux.address_family(address), kind)
        try:
            made.bind((address, 0))
        except OSError:
            made.close()
            return None
        return made

    def _echo(self, own: socket.socket) -> None:
        """Answer each datagram with its head."""
        size = _SECRET_BYTES + _HEAD.size
        while True:
            try:
                data, caller = own.recvfrom(1 << 16)
                if len(data) < size or data[:_SECRET_BYTES] != self._secret:
                    continue
                kind, sender, _ = _HEAD.unpack_from(data, _SECRET_BYTES)
                if kind == _SMALL:
                    self._heard[sender] += 1
                own.sendto(data[:size], caller)
            except OSError:  # an ICMP error for an earlier answer
                continue

    def _accept(self, own: socket.socket) -> None:
        while True:
            try:
                peer, place = own.accept()
            except OSError as error:  # it has hung up already, or there is no descriptor left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._hang_up_on(self._strangers.oldest)
                    time.sleep(SCARCE_SECONDS)
                continue
            self._hang_up_on(partial(self._strangers.add, peer, place[0], time.monotonic()))
            threading.Thread(target=self._serve, args=[peer], daemon=True).start()

    def _hang_up_on(self, choose: Callable[[], socket.socket | None]) -> None:
        """Its thread ends then."""
        with self._lock:
            if (one := choose()) is not None:
                with contextlib.suppress(OSError):  # it has done so itself
                    one.shutdown(socket.SHUT_RDWR)

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(CONNECTION_SECONDS)
            try:
                hello = self._hello(peer)
                if hello[:-1] != self._secret:
                    return
                if hello[-1:] == _REACH:
                    peer.sendall(self._secret)
                    return
                buffer = bytearray(1 << 20)
                while peer.recv_into(buffer):
                    pass
            except OSError:
                pass

    def _hello(self, peer: socket.socket) -> bytes:
        """What it says first, all at once; it is no stranger then, or about to be hung up on."""
        try:
            return peer.recv(_SECRET_BYTES + 1, socket.MSG_WAITALL)
        finally:
            with self._lock:
                self._strangers.forget(peer)


def _port(bound: socket.socket | None) -> int:
    return int(bound.getsockname()[1]) if bound else -1


def mtu_of(interface: str) -> int:
    """The largest packet that the interface takes; -1 if it is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("16si12x", interface.encode(), 0))
        except OSError:
            return -1
    return int(struct.unpack("16si12x", found)[1])


# To other hosts.


def probe(request: dict[str, Any]) -> Probes:
    """Call all the others at once: {"number": ours, "peers": [[number, secret, fields of each Inlet], …]}."""
    calls = [_PeerCall(*peer) for peer in request["peers"]]
    _reach(calls)
    reached = [call for call in calls if call.chosen]
    share = min(DATAGRAMS, MOST_DATAGRAMS // max(1, len(reached)))
    exchanges = [_Exchange(call, request["number"]) for call in reached]
    _send_datagrams(exchanges, share)
    by_call = {id(one.call): one for one in exchanges}
    return Probes([_found(call, by_call.get(id(call))) for call in calls])


class _PeerCall:
    """The attempts to reach one other host."""

    def __init__(self, peer: int, secret: str, inlets: list[list[Any]]) -> None:
        self.peer = peer
        self.secret = secret.encode()
        self.inlets = [inlet for inlet in (Inlet(*fields) for fields in inlets) if inlet.tcp > 0]
        self.state: dict[str, str] = {}  # by address: why it does not answer; "" if it does
        self.seconds: dict[str, float] = {}  # the time that a connection took
        self.sources: dict[str, str] = {}

    @property
    def chosen(self) -> Inlet | None:
        """The best address that answers."""
        return next((inlet for inlet in self.inlets if self.state.get(inlet.address) == ""), None)


class _Attempt:
    """One connection to one address."""

    def __init__(self, call: _PeerCall, inlet: Inlet) -> None:
        self.call = call
        self.address = inlet.address
        self.began = time.monotonic()
        self.connected = False
        self.socket = socket.socket(linux.address_family(inlet.address), socket.SOCK_STREAM)
        self.socket.setblocking(False)
        code = self.socket.connect_ex((inlet.address, inlet.tcp))
        if code not in (0, 115):  # EINPROGRESS
            self.end(os.strerror(code).lower())

    def go_on(self) -> None:
        """It can be written to, or read."""
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.end(os.strerror(code).lower())
                return
            self.connected = True
            self.call.seconds[self.address] = time.monotonic() - self.began
            self.call.sources[self.address] = self.socket.getsockname()[0]
            self._try(lambda: self.socket.send(self.call.secret + _REACH))
        else:
            self._try(lambda: self.end("" if self._answer() else "another machine has this address, too"))

    def _answer(self) -> bool:
        return self.socket.recv(_SECRET_BYTES) == self.call.secret

    def _try(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            self.end((error.strerror or str(error)).lower())

    def end(self, why: str) -> None:
        """It has come to this result."""
        self.call.state[self.address] = why
        self.socket.close()


def _reach(calls: list[_PeerCall]) -> None:
    attempts = [_Attempt(call, inlet) for call in calls for inlet in call.inlets]
    deadline = time.monotonic() + REACH_SECONDS
    while pending := [one for one in attempts if one.address not in one.call.state]:
        if all(call.chosen for call in calls):  # what is pending may be better, but need not come
            deadline = min(deadline, time.monotonic() + BETTER_SECONDS)
        ready = select.poll()
        by_fd = {one.socket.fileno(): one for one in pending}
        for fd, one in by_fd.items():
            ready.register(fd, select.POLLIN if one.connected else select.POLLOUT)
        events = ready.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for fd, _ in events:
            by_fd[fd].go_on()
        if not events and time.monotonic() >= deadline:
            break
    for one in pending:
        one.end("no answer")


class _Exchange:
    """Datagrams to one host, and its answers."""

    def __init__(self, call: _PeerCall, number: int) -> None:
        self.call = call
        inlet = call.chosen
        assert inlet is not None
        self.inlet = inlet
        self._number = number
        family = linux.address_family(inlet.address)
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        option = (socket.IPPROTO_IP, _IP_MTU_DISCOVER)
        if family == socket.AF_INET6:
            option = (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER)
        self.socket.setsockopt(*option, _PMTUDISC_PROBE)  # never cut up, whatever was learnt about the path before
        self.socket.setblocking(False)
        self.socket.connect((inlet.address, max(inlet.udp, 1)))
        self.interface = _interface_of(self.socket.getsockname()[0])
        mtus = [mtu for mtu in (inlet.mtu, mtu_of(self.interface)) if mtu > 0]
        self.packet = min([*mtus, _LARGEST_PACKET]) if mtus else -1
        self._filled = self.packet - _HEADERS[family] - _HEAD.size - _SECRET_BYTES
        self.sent = 0
        self.answered: set[int] = set()
        self.passes = -1
        self._told = False  # whether a router has said that the path takes less, as it then says to TCP, which heeds it
        self.latency = -1.0
        self._at: dict[int, float] = {}

    def send(self) -> None:
        """Send a small datagram."""
        self._at[self.sent] = time.monotonic()
        if self._put(_SMALL, self.sent, 0):
            self.sent += 1

    def send_large(self) -> None:
        """Send as large a packet as the interfaces take."""
        if self.packet > 0 and self.passes != 1 and not self._told:
            self.passes = 0 if self._put(_LARGE, 0, self._filled) else -1

    def _put(self, kind: int, number: int, more: int) -> bool:
        try:
            self.socket.send(self.call.secret + _HEAD.pack(kind, self._number, number) + bytes(max(0, more)))
        except OSError as error:
            self._heed(error)
            return False
        return True

    def receive(self) -> bool:
        """Take an answer. Returns whether it was one."""
        try:
            data = self.socket.recv(1 << 12)
        except OSError as error:
            self._heed(error)
            return False
        if len(data) != _SECRET_BYTES + _HEAD.size or data[:_SECRET_BYTES] != self.call.secret:
            return False
        kind, _, number = _HEAD.unpack_from(data, _SECRET_BYTES)
        if kind == _LARGE:
            self.passes = 1
        elif number in self._at and number not in self.answered:
            self.answered.add(number)
            seconds = time.monotonic() - self._at[number]
            self.latency = seconds if self.latency < 0 else min(self.latency, seconds)
        return True

    def _heed(self, error: OSError) -> None:
        if error.errno == errno.EMSGSIZE:  # reported once, then the kernel lets large packets go again
            self._told, self.passes = True, -1


def _interface_of(own: str) -> str:
    return next((name for address, name in addresses() if address == own), "lo" if own.startswith("127.") else "")


def _send_datagrams(exchanges: list[_Exchange], count: int) -> None:
    """Send `count` small ones to each, and a few large ones; wait for the answers."""
    waiting = select.poll()
    by_fd = {one.socket.fileno(): one for one in exchanges}
    for fd in by_fd:
        waiting.register(fd, select.POLLIN)

    def receive(seconds: float) -> bool:
        ready = waiting.poll(seconds * 1000)
        return sum(by_fd[fd].receive() for fd, _ in ready) > 0

    def wait_until(done: Any) -> None:
        quiet = time.monotonic() + QUIET_SECONDS
        while not done() and time.monotonic() < quiet:
            if receive(QUIET_SECONDS):
                quiet = time.monotonic() + QUIET_SECONDS

    for _ in range(count):
        for one in exchanges:
            one.send()
        due = time.monotonic() + PACE_SECONDS
        while (left := due - time.monotonic()) > 0:
            receive(left)
    wait_until(lambda: all(len(one.answered) >= one.sent for one in exchanges))
    for _ in range(LARGE_TRIES):
        for one in exchanges:
            if one.answered:
                one.send_large()
        wait_until(lambda: all(one.passes for one in exchanges))
        if all(one.passes for one in exchanges):
            break


def _found(call: _PeerCall, exchange: _Exchange | None) -> Probed:
    failed = [[address, why] for address, why in call.state.items() if why]
    if exchange is None:
        return Probed(call.peer, "", "", "", failed, -1.0, 0, 0, -1, -1)
    exchange.socket.close()
    address = exchange.inlet.address
    latency = exchange.latency if exchange.answered else call.seconds[address]
    return Probed(
        *(call.peer, address, call.sources[address], exchange.interface, failed, latency),
        *(exchange.sent, len(exchange.answered), exchange.packet, exchange.passes),
    )


def stream(request: dict[str, Any]) -> Streamed:
    """Send as much as possible for a moment: {"address", "port", "secret", "lasts"}."""
    with socket.socket(linux.address_family(request["address"]), socket.SOCK_STREAM) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
        peer.settimeout(CONNECTION_SECONDS)
        peer.connect((request["address"], request["port"]))
        peer.sendall(request["secret"].encode() + _STREAM)
        data, sent = bytes(STREAM_BYTES), 0
        began = now = time.monotonic()
        end = began + request["lasts"]
        while now < end:
            peer.settimeout(end - now)
            try:
                sent += peer.send(data)
            except TimeoutError:
                pass
            now = time.monotonic()
        return Streamed(max(0, sent - _not_acknowledged(peer)) / (now - began))


def _not_acknowledged(peer: socket.socket) -> int:
    left = array.array("i", [0])
    fcntl.ioctl(peer, termios.TIOCOUTQ, left)  # SIOCOUTQ
    return left[0]
