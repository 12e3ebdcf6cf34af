"""What a node listens with for a moment: strangers who say nothing cost it little, and keep nobody out."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launchpad.agent.checkup import network
from launchpad.agent.net import strangers
from launchpad.agent.net.reachability import LISTEN_SECONDS, Reachability
from launchpad.agent.part import AgentHub
from launchpad.agent.poll import Poll
from launchpad.protocol.commands import Listen
from tests.support.command import DEADLINE, wait_until

MANY = strangers.MOST_OF_ADDRESS + 40


@pytest.fixture
def crowd() -> Iterator[Callable[[int], list[socket.socket]]]:
    """Connects many strangers to a port of ours, who say nothing."""
    with contextlib.ExitStack() as stack:
        yield lambda port: [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)) for _ in range(MANY)
        ]


def hung_up(peers: list[socket.socket]) -> int:
    count = 0
    for peer in peers:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            count += not peer.recv(1)
    return count


def test_a_checkup_hears_so_many_strangers_at_a_time(crowd: Callable[[int], list[socket.socket]]) -> None:
    before = threading.active_count()
    secret = os.urandom(16).hex()
    (inlet,) = [one for one in network.EchoServer().listen(secret).inlets if one.address == "127.0.0.1"]
    listening = threading.active_count()
    peers = crowd(inlet.tcp)
    wait_until(lambda: hung_up(peers) >= MANY - strangers.MOST_OF_ADDRESS, "the oldest to be hung up on")
    wait_until(lambda: threading.active_count() - listening <= strangers.MOST_OF_ADDRESS, "their threads to end")
    with socket.create_connection(("127.0.0.1", inlet.tcp), DEADLINE) as peer:
        peer.sendall(secret.encode() + b"r")
        assert peer.recv(100) == secret.encode()
    assert before < listening


def test_an_agent_hears_so_many_strangers_at_a_time(crowd: Callable[[int], list[socket.socket]]) -> None:
    said: list[Any] = []
    poll = Poll()
    hub = AgentHub(poll, SimpleNamespace(say=said.append), "")
    part = Reachability(hub)
    with contextlib.closing(poll):
        part.on(Listen(["127.0.0.1"], "ask", "answer"))
        (port,) = said[0].ports
        peers = crowd(port)

        def turn(done: Callable[[], bool]) -> None:
            end = time.monotonic() + DEADLINE
            while not done():
                assert time.monotonic() < end
                poll.wait(time.monotonic() + 0.1)

        turn(lambda: hung_up(peers) == MANY - strangers.MOST_OF_ADDRESS)
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as peer:
            peer.sendall(b"ask")
            peer.setblocking(False)
            answer: list[bytes] = []

            def answered() -> bool:
                with contextlib.suppress(BlockingIOError):
                    answer.append(peer.recv(100))
                return bool(answer)

            turn(answered)
            assert answer == [b"answer"]
        assert part.deadline is not None
        part.tick(time.monotonic() + strangers.SECONDS)
        wait_until(lambda: hung_up(peers) == MANY, "the others to be hung up on")
        part.tick(time.monotonic() + LISTEN_SECONDS)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), DEADLINE)
        assert part.deadline is None
