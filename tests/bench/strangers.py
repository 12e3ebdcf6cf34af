"""How much strangers delay the members of a job: python tests/bench/strangers.py [--seconds 120]

A head and 8 nodes that have joined, which answer its heartbeats (--heartbeat-timeout 2: one in 0.5 s). Beside them, 500
strangers who say nothing, 100 who drip a byte in 0.2 s, and 50 who send as much as they can, as often as they can. It
prints the worst round trip of a heartbeat without and with them, and exits with 1 if a member was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from launchpad.protocol.commands import Ping
from launchpad.protocol.events import Pong
from launchpad.transport.join.proof import node_context
from tests.support.joined import OFFER, Door

MEMBERS, IDLE, DRIPPING, FLOODING = 8, 500, 100, 50
BEAT = 0.5  # seconds
GREETING = b'{"launchpad": "x", "nonce": "y"'


class Member:
    """A node as its head sees it."""

    def __init__(self, door: Door) -> None:
        self.node = door.join(OFFER._replace(nnodes=str(MEMBERS + 1)))
        self.node.begin(lambda ping: ping and self.node.send(Pong(time.monotonic_ns(), ping.time)))
        self.worst = 0.0
        self.gone = False
        self.heard = time.monotonic()

    def on(self, event: object) -> None:
        """Take what the node says."""
        if isinstance(event, Pong):
            self.heard = time.monotonic()
            self.worst = max(self.worst, (time.monotonic_ns() - event.ping) / 1e9)
        else:
            self.gone = True


def measure(door: Door, members: list[Member], seconds: float, silence: float) -> tuple[float, int]:
    """The worst round trip, and how many members were lost."""
    for member in members:
        member.worst, member.heard = 0.0, time.monotonic()
    until = time.monotonic() + seconds
    lost: set[Member] = set()
    while time.monotonic() < until:
        for link, _ in door.joining._nodes:
            link.send(Ping(time.monotonic_ns()))
        time.sleep(BEAT)
        lost |= {member for member in members if member.gone or time.monotonic() - member.heard > silence}
    time.sleep(BEAT)
    return max(member.worst for member in members), len(lost)


def quiet(port: int) -> None:
    """Connect, say nothing or drip, and connect again when hung up on."""
    selector = selectors.DefaultSelector()
    idle = drip = 0
    while True:
        while idle + drip < IDLE + DRIPPING:
            try:
                peer = socket.create_connection(("127.0.0.1", port), 5)
            except OSError:
                break
            dripping = drip < DRIPPING
            idle, drip = idle + (not dripping), drip + dripping
            peer.setblocking(False)
            selector.register(peer, selectors.EVENT_READ, dripping)
        time.sleep(0.2)
        for key in list(selector.get_map().values()):
            try:
                gone = key.data and not key.fileobj.send(b"\x16")  # type: ignore[union-attr]
            except OSError:
                gone = True
            if not gone and not key.data:
                with contextlib.suppress(BlockingIOError):
                    try:
                        gone = not key.fileobj.recv(1)  # type: ignore[union-attr]
                    except ConnectionError:
                        gone = True
            if gone:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                idle, drip = idle - (not key.data), drip - key.data


def flood(port: int) -> None:
    """Over and over: TLS, 900 KB without a newline, records of a byte."""
    context = node_context()
    while True:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(socket.create_connection(("127.0.0.1", port), 5)) as peer,
        ):
            peer.sendall(GREETING)
            for _ in range(1000):
                peer.sendall(b"x")
            peer.sendall(b"x" * 900_000)


def strangers(port: int) -> None:
    """All of them, in a process of their own."""
    for _ in range(FLOODING):
        threading.Thread(target=flood, args=[port], daemon=True).start()
    quiet(port)


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long with strangers; 120")
    parser.add_argument("--silence", type=float, default=2.0, help="after how many seconds a member is lost; 2")
    parser.add_argument("--strangers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096) if most > 0 else 4096, most))
    if given.strangers:
        strangers(given.strangers)
    door = Door(MEMBERS + 1)
    members = []
    for _ in range(MEMBERS):
        members.append(Member(door))
        door.joining._nodes[-1][0].deliver(members[-1].on)
    alone, _ = measure(door, members, min(10.0, given.seconds), given.silence)
    others = subprocess.Popen([sys.executable, __file__, "--strangers", str(door.port)])
    try:
        beside, lost = measure(door, members, given.seconds, given.silence)
    finally:
        others.kill()
        others.wait()
    print(f"worst round trip of a heartbeat: alone {1000 * alone:.1f} ms, with strangers {1000 * beside:.1f} ms")
    print(f"members lost: {lost} of {MEMBERS}", flush=True)
    os._exit(int(lost > 0))


if __name__ == "__main__":
    main()
