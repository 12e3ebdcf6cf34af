"""The order in which the agent asks its forkserver for processes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from launchpad.agent.outbox import Outbox
from launchpad.agent.part import AgentHub
from launchpad.agent.parts import Parts
from launchpad.agent.poll import Poll
from launchpad.agent.ranks import rank
from launchpad.agent.ranks.forkserver_client import STORE, ForkOrder, Forkserver, KeptFork
from launchpad.agent.ranks.input import Input
from launchpad.agent.ranks.starter import Starter
from launchpad.agent.ranks.store import Store
from launchpad.image import channel
from launchpad.protocol.commands import Start
from launchpad.protocol.events import ImageUnused, SpareReady


def taken(link: socket.socket) -> tuple[channel.Message, int]:
    """The next request, and how many descriptors came with it."""
    received = channel.receive(link)
    assert received is not None
    request, fds = received
    channel.close(fds)
    return request, len(fds)


class Played:
    """A forkserver that the test plays, and what the agent heard from it."""

    def __init__(self, client: Forkserver, link: socket.socket) -> None:
        self.client = client
        self.forked: list[int] = []
        self.failed: list[int] = []
        self._link = link

    def asked(self) -> list[int]:
        """The numbers of the processes in the next request; none if there is none."""
        try:
            request, _ = taken(self._link)
        except BlockingIOError:
            return []
        return [one["number"] for one in request["processes"]]

    def says(self, *messages: tuple[object, ...]) -> None:
        """Have the agent hear these."""
        for message in messages:
            self._link.send(json.dumps(message).encode())
        assert self.client.hear(
            lambda number, _: self.forked.append(number), lambda number, _: self.failed.append(number)
        )


@pytest.fixture
def played() -> Iterator[Played]:
    """One that has imported all."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(near), closing(far):
        far.setblocking(False)
        server = Played(Forkserver(rank.Rank(-1, 0, None), near, (), {}), far)
        server.says(("ready", ""))
        yield server


def order(*numbers: int) -> list[ForkOrder]:
    """The store gets one descriptor, a rank three."""
    return [ForkOrder(number, {}, (0,) if number == STORE else (0, 1, 2)) for number in numbers]


def test_ranks_are_forked_a_few_at_a_time(played: Played) -> None:
    played.client.order(order(*range(20)))
    found = []
    while numbers := played.asked():
        assert played.asked() == []
        found.append(numbers)
        played.says(*(("forked", number, 1) for number in numbers), ("done", ""))
    assert [*itertools.chain(*found)] == played.forked == list(range(20))
    assert len(found) > 1
    assert not played.client.is_forking


def test_a_request_is_under_way_until_its_end(played: Played) -> None:
    """A rank asks for the store while later ranks wait: the end of the first request is not that of the next one."""
    played.client.order(order(*range(20)))
    first = played.asked()
    played.says(*(("forked", number, 1) for number in first))
    assert played.client.is_forking
    played.client.order(order(STORE))
    assert played.asked() == []
    played.says(("done", ""))
    assert played.asked()[:2] == [STORE, len(first)]
    played.says(("forked", STORE, 2))
    assert played.client.is_forking
    assert not played.failed


def test_what_can_not_be_forked_has_failed(played: Played) -> None:
    played.client.order(order(0, 1, 2))
    assert played.asked() == [0, 1, 2]
    played.says(("forked", 0, 1), ("done", "its process can't be created"))
    assert (played.forked, played.failed) == ([0], [1, 2])


def test_cancelled_ranks_are_not_asked_for(played: Played) -> None:
    played.client.order(order(*range(20)))
    first = played.asked()
    assert sorted(played.client.cancel_orders()) == first
    played.says(*(("forked", number, 1) for number in first), ("done", ""))
    assert played.asked() == []


def test_one_that_becomes_a_rank_is_asked_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, signum: signals.append(signum))
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(near), closing(far):
        client, forked = Forkserver(rank.Rank(-1, 12345, None), near, (), {}), []
        Played(client, far).says(("ready", ""))
        client.become(ForkOrder(0, {"argv": ["python"]}, (0, 1, 2)))
        request, fds = taken(far)
        assert (request, fds) == ({"becomes": {"argv": ["python"]}, "number": 0}, 3)
        assert list(client.cancel_orders()) == [0], "under way"
        far.send(json.dumps(("became", 0)).encode())
        assert not client.hear(lambda *what: forked.append(what), lambda *_: None)
        assert (forked, client.state, signals) == ([(0, 12345)], "spent", []), "its signals are the rank's now"


def test_no_descriptor_is_left_of_a_rank_that_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="unavailable"):
        Forkserver.started(["python"], {}, "/", (64, 64))
    assert sorted(os.listdir("/proc/self/fd")) == before


class Said(Outbox):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def say(self, event: object) -> None:
        self.events.append(event)


class Ending:
    """A starter whose ranks are about to be gone, while torch's store is wanted."""

    def __init__(self, folder: Path, near: socket.socket, far: socket.socket) -> None:
        self.server = Played(Forkserver(rank.Rank(-1, 0, None), near, (), {}), far)
        self.hub = AgentHub(Poll(), Said(), str(folder))
        self.store = Store(self.hub)
        self.starter = Starter(self.hub, Parts(self.hub), self.store, Input(self.hub, None), (64, 64), lambda _: None)
        self.starter._forkserver = self.store._forkserver = self.server.client
        self.store.hold_port(0)
        self.server.says(("ready", ""))

    def close(self) -> None:
        assert self.store._port is not None
        self.store._port.close()
        self.hub.channel.close()


@pytest.mark.parametrize("leave", [False, True])
def test_the_end_of_the_ranks_ends_a_store_in_the_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: bool
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(near), closing(far), closing(Ending(tmp_path, near, far)) as ending:
        ending.server.client.order(ending.store._serve())
        assert ending.server.asked() == [STORE]
        answer = threading.Thread(target=lambda: far.send(b'["forked", -1, 12345]'))
        answer.start()
        assert ending.starter.finish(leave) == {12345}
        answer.join()
        assert killed == [(12345, signal.SIGKILL)]


def test_a_store_that_waits_for_its_fork_is_not_forked_for_ranks_that_are_gone(tmp_path: Path) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(near), closing(far), closing(Ending(tmp_path, near, far)) as ending:
        far.setblocking(False)
        ending.server.client.order(order(0))
        ending.server.client.order(ending.store._serve())
        assert ending.server.asked() == [0]
        ending.starter.finish(leave=False)
        ending.server.says(("forked", 0, 7), ("done", ""))
        assert ending.server.asked() == []


def test_a_kept_fork_that_dies_before_it_is_needed(tmp_path: Path) -> None:
    """The ranks start cold, and why is told."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = KeptFork(12345, near, None, (), (), (b"", b""))  # type: ignore[arg-type]  # its image is not asked
    said = Said()
    hub = AgentHub(Poll(), said, str(tmp_path))
    starter = Starter(hub, Parts(hub), Store(hub), Input(hub, None), (64, 64), lambda _: None, kept)
    starter.exited(12345)
    with closing(far):
        assert far.recv(1) == b""
    start = Start(0, "/", {}, {}, {}, [], [], "", [], 1, "", -1, False, False, [], False, True)
    starter.start(start, lambda: None)
    hub.channel.close()
    why, ready = said.events
    assert isinstance(ready, SpareReady)
    assert isinstance(why, ImageUnused)
    assert why.reason == "the process that was forked from it has died"
    assert starter.own == set()
