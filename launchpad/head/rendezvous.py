"""Launchpads that were started once on each node (`--nnodes`, `--node-rank`) meet, and hear of each other's failures.

Node rank 0 listens on MASTER_ADDR:MASTER_PORT until all have come, and closes it before rank 0 needs it. Each tells how
many ranks it has, and learns its first rank and the size of the world. Both sides prove that they know the job's
id (`--rdzv-id`): HMAC-SHA256 over the other's nonce. The connections stay, so that a failure on one node ends all.

On the wire: JSON objects, one in a line. Node 0: {"nonce"}; other: {"node", "nodes", "ranks", "nonce", "proof"};
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
from launchpad.events import PeerFailed
from launchpad.job.outcome import NODE_LOST
from launchpad.job.plan import Elsewhere
from launchpad.job.world import World

# Who has connected has so long to say who it is.
GREETING_SECONDS = 10.0
RETRY_SECONDS = 0.2
LONGEST_LINE = 1 << 16


class Rendezvous:
    """One node's side of it."""

    def __init__(self, world: World, secret: str) -> None:
        """Node 0 listens from here on; UsageError where it can't."""
        self.seconds = world.join_seconds
        self._where = (world.master_addr, world.master_port)
        self._node = world.node_rank
        self._nodes = world.nnodes
        self._secret = secret.encode()
        self._counts: dict[int, int] = {}
        self._peers: dict[int, socket.socket] = {}
        self._over = False
        self._lock = threading.Lock()  # over _peers and _over: each peer has a thread that reads
        self._listener = self._listen() if world.node_rank == 0 else None

    def waiting(self) -> str:
        """What is waited for, in words."""
        address, port = self._where
        if self._node != 0:
            return f"waiting for node rank 0 at {address}:{port}"
        missing = [str(node) for node in range(1, self._nodes) if node not in self._counts]
        return f"waiting at {address}:{port} for node rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

    def join(self, ranks: int, post: Callable[[Any], None]) -> None:
        """Meet the others, then `post` where our ranks stand: Elsewhere, or PeerFailed with the reason.

        Later failures on other nodes are posted as PeerFailed. For a thread of its own.
        """
        try:
            counts = self._gather(ranks) if self._node == 0 else self._attend(ranks)
        except (NodeError, OSError, ValueError, KeyError, TypeError) as error:
            post(PeerFailed(time.monotonic_ns(), f"{self.waiting()}: {error}", NODE_LOST))
            return
        post(Elsewhere(sum(counts[: self._node]), sum(counts[self._node + 1 :])))
        for node, peer in list(self._peers.items()):
            threading.Thread(target=self._hear, args=(node, peer, post), name=f"peer-{node}", daemon=True).start()

    def tell(self, reason: str, code: int) -> None:
        """Tell the others that our part has ended: with 0, or with a failure that ends theirs too."""
        with self._lock:
            self._over = True
        message = {"failed": reason, "code": code} if code else {"done": True}
        for peer in self._peers.values():
            _say(peer, message)

    def _listen(self) -> socket.socket:
        address, port = self._where
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(self._nodes)
        except OSError as error:
            raise UsageError(
                f"--master-addr {address} --master-port {port}: {error.strerror}; node rank 0 listens there, so it "
                "must be an address of this machine and a free port"
            ) from None
        return listener

    def _gather(self, ranks: int) -> list[int]:
        assert self._listener is not None
        self._counts[0] = ranks
        answers: list[tuple[socket.socket, str]] = []
        while len(self._counts) < self._nodes:
            peer, _ = self._listener.accept()
            peer.settimeout(GREETING_SECONDS)
            nonce = os.urandom(16).hex()
            try:
                _say(peer, {"nonce": nonce})
                told = _read(peer.makefile("rb"))
                error = self._check(told, nonce)
            except (OSError, ValueError, KeyError, TypeError):  # somebody else's connection
                peer.close()
                continue
            if error:
                _say(peer, {"error": error})
                peer.close()
                continue
            self._counts[told["node"]] = told["ranks"]
            self._peers[told["node"]] = peer
            answers.append((peer, told["nonce"]))
        self._listener.close()
        counts = [self._counts[node] for node in range(self._nodes)]
        for peer, nonce in answers:
            _say(peer, {"counts": counts, "proof": self._proof("world", nonce)})
        return counts

    def _check(self, told: dict[str, Any], nonce: str) -> str:
        """Why this one is not let in; "" where it is."""
        if not hmac.compare_digest(told["proof"], self._proof("node", nonce)):
            return "the job's id differs: give the same --rdzv-id on every node"
        if told["nodes"] != self._nodes:
            return f"--nnodes differs: {self._nodes} on node rank 0, {told['nodes']} here"
        if not 0 < told["node"] < self._nodes:
            return f"--node-rank {told['node']} is not between 1 and {self._nodes - 1}"
        if told["node"] in self._counts:
            return f"--node-rank {told['node']} has already come: give every node its own"
        if not (isinstance(told["ranks"], int) and 0 < told["ranks"] < 1 << 20):
            return "the number of ranks makes no sense"
        return ""

    def _attend(self, ranks: int) -> list[int]:
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                peer = socket.create_connection(self._where, timeout=GREETING_SECONDS)
                break
            except socket.gaierror as error:
                raise NodeError(f"--master-addr can't be resolved ({error.strerror})") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NodeError(error.strerror or str(error)) from None
                time.sleep(RETRY_SECONDS)  # node 0 may not have been started yet
        file = peer.makefile("rb")
        nonce = os.urandom(16).hex()
        proof = self._proof("node", _read(file)["nonce"])
        _say(peer, {"node": self._node, "nodes": self._nodes, "ranks": ranks, "nonce": nonce, "proof": proof})
        peer.settimeout(self.seconds)
        answer = _read(file)
        if "error" in answer:
            raise NodeError(str(answer["error"]))
        if not hmac.compare_digest(answer["proof"], self._proof("world", nonce)):
            raise NodeError("what answers there does not know this job's id (--rdzv-id)")
        self._peers[0] = peer
        return [int(count) for count in answer["counts"]]

    def _proof(self, role: str, nonce: str) -> str:
        return hmac.new(self._secret, f"{role} {nonce}".encode(), hashlib.sha256).hexdigest()

    def _hear(self, node: int, peer: socket.socket, post: Callable[[Any], None]) -> None:
        """Wait for a peer's last word, and pass a failure on."""
        peer.settimeout(None)
        _keep_alive(peer)
        try:
            told = _read(peer.makefile("rb"))
        except (OSError, ValueError):
            told = {"failed": f"the launchpad of node rank {node} is gone", "code": NODE_LOST}
        with self._lock:
            if "failed" not in told or self._over:
                return
            self._over = True
        for other, one in self._peers.items():
            if other != node:
                _say(one, told)
        post(PeerFailed(time.monotonic_ns(), str(told["failed"]), int(told.get("code", NODE_LOST))))


def _keep_alive(peer: socket.socket) -> None:
    """A node whose power is cut says nothing: the kernel asks after 10 s of silence, and gives up 15 s later."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _say(peer: socket.socket, message: dict[str, Any]) -> None:
    try:
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # the reading side finds out too, and tells
        pass


def _read(file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(LONGEST_LINE)
    message = json.loads(line)  # ValueError also for an empty line: the other side has hung up
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
