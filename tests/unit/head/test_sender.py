"""head/sender: pieces to several nodes at once, and no more under way to each than its window."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from launchpad.errors import NodeError
from launchpad.head import sender
from launchpad.head.bringup import BringUp
from launchpad.head.nodes import Nodes
from launchpad.head.sender import Window, send
from launchpad.protocol.commands import Call, Finish
from launchpad.protocol.events import ChunksTaken, Pong, Synced
from launchpad.transport.memory import MemoryLink

DEADLINE = 30.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "WINDOW_BYTES", 4)
    monkeypatch.setattr(sender, "STUCK_SECONDS", DEADLINE)


def calls(*sizes: int) -> Iterator[Call]:
    return (Call(bytes(size)) for size in sizes)


def opened(window: Window) -> list[int]:
    return [len(piece.data) for piece in window.open()]


def test_a_window_is_full_until_something_is_taken() -> None:
    window = Window(calls(3, 3, 3, 1))
    assert opened(window) == [3, 3]
    assert opened(window) == []
    window.taken(2)
    assert opened(window) == []
    window.taken(1)
    assert opened(window) == [3]
    window.taken(6)
    assert opened(window) == [1]
    assert not window.done
    window.taken(1)
    assert window.done


def test_a_window_with_nothing_to_send_is_done() -> None:
    window = Window(calls())
    assert window.done
    assert opened(window) == []


def test_a_piece_that_has_yet_to_come_holds_up_nothing_for_good() -> None:
    window = Window(iter([Call(b"a"), None, None, Call(b"b")]))
    assert [opened(window) for _ in range(3)] == [[1], [], [1]]
    assert not window.done
    window.taken(2)
    assert window.done


def test_no_piece_is_made_before_there_is_room_for_it() -> None:
    made = []

    def pieces() -> Iterator[Call]:
        for number in range(4):
            made.append(number)
            yield Call(bytes(4))

    window = Window(pieces())
    assert opened(window) == [4]
    assert made == [0, 1], "one is held, to know whether it is the last"


class Lab:
    """Nodes a, b … in memory."""

    def __init__(self, names: str) -> None:
        self.links = [MemoryLink(name, remote=True) for name in names]
        self.bringup = BringUp()
        self.bringup.nodes = Nodes(self.links, self.bringup.inbox.put, silence=0.0)
        self.bringup.nodes.read()
        self.most = dict.fromkeys(names, 0)
        self.got = dict.fromkeys(names, 0)

    def take(self, link: MemoryLink, end: Synced | None) -> None:
        """An agent's part: take what is there, all at once."""
        under_way = 0
        while type(asked := link.heard.get(timeout=DEADLINE)) is not Finish:
            under_way += len(asked.data)
            self.most[link.name] = max(self.most[link.name], under_way)
            if link.heard.empty():
                self.got[link.name] += under_way
                link.say(ChunksTaken(0, under_way))
                under_way = 0
        if end is not None:
            link.say(end)


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab("ab")
    yield made
    for link in made.links:
        link.hang_up()


def test_each_node_gets_all_and_never_more_than_its_window_at_once(lab: Lab) -> None:
    agents = [threading.Thread(target=lab.take, args=(link, None)) for link in lab.links]
    for agent in agents:
        agent.start()
    told = [0, 0]

    def taken(node: int, size: int) -> None:
        told[node] += size

    assert send(lab.bringup, {0: calls(*[2] * 50), 1: calls(*[2] * 5)}, "it", taken=taken) == {}
    for link, agent in zip(lab.links, agents, strict=True):
        link.send(Finish(True))
        agent.join(DEADLINE)
    assert lab.got == {"a": 100, "b": 10}
    assert told == [100, 10]
    assert max(lab.most.values()) <= 4


def test_until_a_node_says_so(lab: Lab) -> None:
    """Also where nothing is sent."""
    for link in lab.links:
        link.say(Synced(0, ""))
    assert send(lab.bringup, {0: calls(4), 1: calls()}, "it", until=Synced) == dict.fromkeys((0, 1), Synced(0, ""))


def test_one_that_has_no_room_ends_it_for_all(lab: Lab) -> None:
    lab.links[0].say(ChunksTaken(0, 4))
    lab.links[0].say(Synced(0, "the disk is full"))
    ended = send(lab.bringup, {0: calls(4, 4, 4, 4), 1: calls(4, 4)}, "it", until=Synced)
    assert ended == {0: Synced(0, "the disk is full")}
    assert [link.heard.qsize() for link in lab.links] == [2, 1]


def test_a_node_that_takes_nothing_is_given_up_whatever_it_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "STUCK_SECONDS", 0.3)
    done = threading.Event()

    def chatter() -> None:
        while not done.wait(0.05):
            lab.links[1].say(Pong(0, 0))

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        lab.bringup.inbox.put((0, ChunksTaken(0, 4)))  # has come before anything is sent
        with pytest.raises(NodeError, match=r"^b: accepted nothing of the thing for 0\.3 s$"):
            send(lab.bringup, {0: calls(4), 1: calls(4)}, "the thing")
    finally:
        done.set()
        thread.join(DEADLINE)


def test_no_nodes() -> None:
    assert send(BringUp(), {}, "it") == {}
