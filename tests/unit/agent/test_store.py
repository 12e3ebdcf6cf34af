"""What the agent does about torch's store: the port, and the process that serves it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from launchpad import linux
from launchpad.agent.outbox import Outbox
from launchpad.agent.part import AgentHub
from launchpad.agent.poll import Poll
from launchpad.agent.ranks.forkserver_client import STORE, Forkserver
from launchpad.agent.ranks.store import Store
from launchpad.protocol.commands import Start
from launchpad.protocol.events import RankFailed

ENTRY = {"rank": 4, "environ": {"GROUP_WORLD_SIZE": "2"}}
START = Start(0, "/", {}, {}, {}, [ENTRY], [], "", ["torch"], 1, "serve", -1, False, False, [], False, True)


class Said(Outbox):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def say(self, event: object) -> None:
        self.events.append(event)


class Orders(Forkserver):
    """A forkserver that is ready, and is asked for processes."""

    def __init__(self) -> None:
        self.state = "ready"
        self.orders: list[object] = []

    def order(self, orders: object) -> None:
        self.orders += orders  # type: ignore[arg-type]


def ring(store: Store, rank: socket.socket) -> None:
    linux.by_short_path(store.bell, rank.connect)
    store._on_bell()


def test_a_process_that_comes_too_late_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    store = Store(AgentHub(Poll(), Said(), str(tmp_path)))
    store.forked(12345)
    assert killed == [(12345, signal.SIGKILL)]
    assert store.pid == 0


def test_the_store_is_forked_once_and_its_end_is_the_first_ranks_failure(tmp_path: Path) -> None:
    said, forkserver = Said(), Orders()
    hub = AgentHub(Poll(), said, str(tmp_path))
    store = Store(hub)
    number, _ = store.hold_port(0)
    store.starting(START)
    store.open_bell()
    store.serve_by(forkserver)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as rank:
            ring(store, rank)
            assert rank.recv(1) == b"y"
    (order,) = forkserver.orders
    assert order.number == STORE  # type: ignore[attr-defined]
    assert order.request["serve"][:2] == ["127.0.0.1", number]  # type: ignore[attr-defined]
    assert order.request["serve"][3], "with another node"  # type: ignore[attr-defined]
    with socket.socket() as rank:  # it may wait
        rank.connect(("127.0.0.1", number))
    store.exited()
    (failed,) = said.events
    assert isinstance(failed, RankFailed)
    assert (failed.rank, failed.reason) == (4, "lost torch's store: its process died")
    with socket.socket() as rank:
        assert rank.connect_ex(("127.0.0.1", number)), "refused"
    store.exited()
    assert len(said.events) == 1, "said once"
    store.close_bell()
    assert store._port is not None
    store._port.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_was_the_forkserver_serves_the_store_itself(tmp_path: Path) -> None:
    store = Store(AgentHub(Poll(), Said(), str(tmp_path)))
    number, _ = store.hold_port(0)
    store.starting(START)
    store.open_bell()
    store.leave_to_rank()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as rank:
            ring(store, rank)
            said, (listener,), _, _ = socket.recv_fds(rank, 1, 1)
        with socket.socket(fileno=listener) as listening, socket.socket() as client:
            assert (said, listening.getsockname()[1]) == (b"s", number)
            client.connect(("127.0.0.1", number))
    assert store.pid == 0, "no process of its own"
    store.end()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", number)), "refused"
    with socket.create_server(("127.0.0.1", number)), socket.socket(socket.AF_UNIX) as rank:
        ring(store, rank)
        assert socket.recv_fds(rank, 1, 1)[:2] == (b"n", []), "the program listens there itself"
    store.close_bell()
    assert store._port is not None
    store._port.close()
