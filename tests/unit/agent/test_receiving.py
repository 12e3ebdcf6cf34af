"""Whose threads wait for data, and how often each has been woken: asked about threads of this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from launchpad.agent.host import procfs, receiving
from tests.support.command import wait_until

Receive = Callable[[socket.socket], bytes]


def into(drain: socket.socket) -> bytes:
    buffer = bytearray(100)
    return bytes(buffer[: drain.recv_into(buffer)])


def in_time(drain: socket.socket) -> bytes:
    drain.settimeout(60)
    return drain.recv(100)


def udp_pair() -> tuple[socket.socket, socket.socket]:
    drain, source = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    drain.bind(("127.0.0.1", 0))
    source.connect(drain.getsockname())
    return source, drain


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


KINDS = {
    "recv": (unix_pair, lambda drain: drain.recv(100), 0.0),
    "recv_into": (unix_pair, into, 0.0),
    "recvmsg": (unix_pair, lambda drain: drain.recvmsg(100)[0], 0.0),
    "udp": (udp_pair, lambda drain: drain.recv(100), 0.0),
    "with a time limit": (unix_pair, in_time, 60.0),
}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> int:
    """Our process, without the children that the tests beside this one may have."""
    monkeypatch.setattr(procfs, "children", lambda _: [])
    return os.getpid()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_receives_is_woken_for_each_piece(own: int, kind: str) -> None:
    make, receive, patience = KINDS[kind]
    source, drain = make()

    def take() -> None:
        while receive(drain) != b"end":
            pass

    def mine() -> list[receiving.Wait]:
        return [wait for wait in receiving.waits(own, {}, 0) if wait[0] == thread.native_id]

    thread = threading.Thread(target=take)
    thread.start()
    try:
        wait_until(lambda: bool(mine()), "it to wait")
        before = mine()[0][2]
        assert mine() == [(thread.native_id, drain.fileno(), before, patience)]
        assert thread.native_id not in [wait[0] for wait in receiving.waits(own, {}, thread.native_id or 0)]
        link = os.readlink(f"/proc/self/fd/{drain.fileno()}")
        assert thread.native_id not in [wait[0] for wait in receiving.waits(own, {link: 7}, 0)]
        for sent in range(1, 4):
            source.send(b"more")
            wait_until(lambda: bool(mine()) and mine()[0][2] >= before + sent, "it to be woken")  # noqa: B023
    finally:
        source.send(b"end")
        thread.join()
        source.close()
        drain.close()
