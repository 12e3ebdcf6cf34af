"""The rendezvous of launchpads started separately on each node (`--nnodes`, `--node-rank`), and news of failures.

Node rank 0 listens on MASTER_ADDR:MASTER_PORT until all nodes have joined, and closes the port before rank 0 needs it.
Each node sends its number of ranks and learns its first rank and the world size. Both sides prove that they know the
job's id (`--rdzv-id`) with an HMAC-SHA256 over the other's nonce. The connections stay open, so that a failure on one
node ends all of them.

On the wire: JSON objects, one per line. Node 0: {"nonce"}; other: {"node", "nodes", "ranks", "nonce", "proof"};
node 0: {"counts", "proof"} or {"error"}; then from either side {"failed", "code"} or {"done"}.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from launchpad.errors import NodeError, UsageError
from launchpad.job.outcome import NODE_LOST
from launchpad.job.plan import RankOffset
from launchpad.job.world import WorldSpec
from launchpad.protocol.events import PeerFailed

# How long a new connection has to introduce itself.
GREETING_SECONDS = 10.0
RETRY_SECONDS = 0.2
LONGEST_LINE = 1 << 16

_NOT_LAUNCHPAD = "something other than launchpad answers there"


class Rendezvous:
    """One node's side of the rendezvous."""

    def __init__(self, world: WorldSpec, secret: str) -> None:
        """Node 0 starts to listen here. Raises UsageError if it can't."""
        self.seconds = world.join_seconds
        self._address = (world.master_addr, world.master_port)
        self._node = world.node_rank
        self._nodes = world.nnodes
        self._secret = secret.encode()
        self._counts: dict[int, int] = {}
        self._peers: dict[int, socket.socket] = {}
        self._over = False
        self._lock = threading.Lock()  # guards _over: each peer has a reader thread
        self._listener = self._listen() if world.node_rank == 0 else None

    def waiting(self) -> str:
        """What this node is waiting for, in words."""
        address, port = self._address
        if self._node != 0:
            return f"waiting for node rank 0 at {address}:{port}"
        missing = [str(node) for node in range(1, self._nodes) if node not in self._counts]
        return f"waiting at {address}:{port} for node rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

    def join(self, ranks: int, post: Callable[[Any], None]) -> None:
        """Find the other nodes, then `post` our RankOffset, or PeerFailed with the reason. Run it in its own thread.

        Later failures on other nodes are posted as PeerFailed.
        """
        try:
            counts = self._accept_all(ranks) if self._node == 0 else self._connect(ranks)
        except (NodeError, OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, (NodeError, OSError)) else _NOT_LAUNCHPAD
            post(PeerFailed(time.monotonic_ns(), f"{self.waiting()}: {reason}", NODE_LOST))
            return
        post(RankOffset(sum(counts[: self._node]), sum(counts[self._node + 1 :])))
        for node, peer in list(self._peers.items()):
            threading.Thread(target=self._watch, args=(node, peer, post), name=f"peer-{node}", daemon=True).start()

    def tell(self, reason: str, code: int) -> None:
        """Tell the other nodes that our part has ended: with code 0, or with a failure, which ends theirs too."""
        with self._lock:
            self._over = True
        message = {"failed": reason, "code": code} if code else {"done": True}
        for peer in self._peers.values():
            _send(peer, message)

    def _listen(self) -> socket.socket:
        address, port = self._address
        try:
            family, kind, protocol, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
            listener.listen(self._nodes)
        except OSError as error:
            raise UsageError(
                f"--master-addr {address} --master-port {port}: {error.strerror}; node rank 0 listens there, so they "
                "must be an address of this machine and a free port"
            ) from None
        return listener

    def _accept_all(self, ranks: int) -> list[int]:
        """Node 0: let the others join. Returns how many ranks each node has."""
        assert self._listener is not None
        self._counts[0] = ranks
        answers: list[tuple[socket.socket, str]] = []
        while len(self._counts) < self._nodes:
            peer, _ = self._listener.accept()
            peer.settimeout(GREETING_SECONDS)
            nonce = os.urandom(16).hex()
            try:
                _send(peer, {"nonce": nonce})
                greeting = _receive(peer.makefile("rb"))
                error = self._check(greeting, nonce)
            except (OSError, ValueError, KeyError, TypeError):  # not a launchpad
                peer.close()
                continue
            if error:
                _send(peer, {"error": error})
                peer.close()
                continue
            self._counts[greeting["node"]] = greeting["ranks"]
            self._peers[greeting["node"]] = peer
            answers.append((peer, greeting["nonce"]))
        self._listener.close()
        counts = [self._counts[node] for node in range(self._nodes)]
        for peer, nonce in answers:
            _send(peer, {"counts": counts, "proof": self._proof("world", nonce)})
        return counts

    def _check(self, greeting: dict[str, Any], nonce: str) -> str:
        """Why this node may not join; "" if it may."""
        if not hmac.compare_digest(greeting["proof"], self._proof("node", nonce)):
            return "the job's id differs: pass the same --rdzv-id on every node"
        if greeting["nodes"] != self._nodes:
            return f"--nnodes differs: {self._nodes} on node rank 0, {greeting['nodes']} here"
        if not 0 < greeting["node"] < self._nodes:
            return f"--node-rank {greeting['node']} is not between 1 and {self._nodes - 1}"
        if greeting["node"] in self._counts:
            return f"--node-rank {greeting['node']} has already joined: give each node its own"
        if not (isinstance(greeting["ranks"], int) and 0 < greeting["ranks"] < 1 << 20):
            return f"{greeting['ranks']!r} is not a valid number of ranks"
        return ""

    def _connect(self, ranks: int) -> list[int]:
        """Other nodes: join node 0. Returns how many ranks each node has."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                peer = socket.create_connection(self._address, timeout=GREETING_SECONDS)
                break
            except socket.gaierror as error:
                raise NodeError(f"--master-addr can't be resolved ({error.strerror})") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NodeError(error.strerror or str(error)) from None
                time.sleep(RETRY_SECONDS)  # node 0 may not have started yet
        file = peer.makefile("rb")
        nonce = os.urandom(16).hex()
        proof = self._proof("node", _receive(file)["nonce"])
        _send(peer, {"node": self._node, "nodes": self._nodes, "ranks": ranks, "nonce": nonce, "proof": proof})
        peer.settimeout(self.seconds)
        answer = _receive(file)
        if "error" in answer:
            raise NodeError(str(answer["error"]))
        if not hmac.compare_digest(answer["proof"], self._proof("world", nonce)):
            raise NodeError("the process listening there doesn't know this job's id (--rdzv-id)")
        self._peers[0] = peer
        return [int(count) for count in answer["counts"]]

    def _proof(self, role: str, nonce: str) -> str:
        return hmac.new(self._secret, f"{role} {nonce}".encode(), hashlib.sha256).hexdigest()

    def _watch(self, node: int, peer: socket.socket, post: Callable[[Any], None]) -> None:
        """Wait for a peer's final message, and pass on a failure."""
        peer.settimeout(None)
        _keep_alive(peer)
        try:
            message = _receive(peer.makefile("rb"))
        except (OSError, ValueError):
            message = {"failed": f"the launchpad of node rank {node} is gone", "code": NODE_LOST}
        with self._lock:
            if "failed" not in message or self._over:
                return
            self._over = True
        for other, connection in self._peers.items():
            if other != node:
                _send(connection, message)
        post(PeerFailed(time.monotonic_ns(), str(message["failed"]), int(message.get("code", NODE_LOST))))


def _keep_alive(peer: socket.socket) -> None:
    """A node that loses power sends no FIN, so the kernel probes after 10 s of silence and gives up 15 s later."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    try:
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # the reader notices too, and reports it
        pass


def _receive(file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(LONGEST_LINE)
    if not line:
        raise ConnectionError("the connection was closed")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
