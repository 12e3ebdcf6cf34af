"""Who doesn't know the job's secret neither ends nor delays it, whatever it sends; nor does a head without it."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from launchpad import linux
from launchpad._version import __version__
from launchpad.runner.joining import Joining
from launchpad.runner.own_door import HeadPlace, OwnDoor
from launchpad.transport.join import proof, server, tls
from launchpad.transport.join.client import HeadConnection, JoinRefused, LedElsewhere
from tests.support.command import DEADLINE, wait_until
from tests.support.joined import OFFER, Door


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """It has patience, so that whoever is dropped is not dropped for being slow."""
    monkeypatch.setattr(server, "GREETING_SECONDS", 10 * DEADLINE)
    door = Door()
    yield door
    for link, _ in door.joining._nodes:
        link.abandon()
    door.joining.leave()


def is_dropped(peer: socket.socket) -> bool:
    peer.settimeout(DEADLINE)
    try:
        while peer.recv(1 << 16):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("size", [1 << 14, 1], ids=["large records", "records of a byte"])
def test_a_stranger_that_says_too_much_is_dropped(door: Door, size: int) -> None:
    with proof.node_context().wrap_socket(socket.create_connection(door.address)) as peer:
        with contextlib.suppress(OSError):
            for _ in range(2 * tls.STRANGER_BYTES // size if size > 1 else 2000):
                peer.sendall(b"x" * size)
        assert is_dropped(peer)
    door.join().close()


def test_a_stranger_that_was_refused_is_heard_no_more(door: Door) -> None:
    with proof.node_context().wrap_socket(socket.create_connection(door.address)) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(b'{"launchpad": "0.0.1", "nonce": "a"}\n' * 50)
        assert is_dropped(peer)
    wait_until(lambda: len(door.said) == 1, "the refusal to be told")
    wait_until(lambda: not door.joining._server._greeting, "it to be gone")


def test_one_address_does_not_keep_the_others_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has so many connections, of which the oldest goes; 127.0.0.2 is another machine here."""
    monkeypatch.setattr(server, "MOST_OF_ADDRESS", 3)
    monkeypatch.setattr(server, "FAIR_SECONDS", DEADLINE)
    strangers = [socket.create_connection(door.address, source_address=("127.0.0.2", 0)) for _ in range(6)]
    assert all(is_dropped(stranger) for stranger in strangers[3:])
    door.join().close()
    monkeypatch.setattr(server, "FAIR_SECONDS", 0.0)
    with socket.create_connection(door.address, source_address=("127.0.0.2", 0)):
        assert is_dropped(strangers[0])
    for stranger in strangers:
        stranger.close()


def test_an_exception_ends_one_connection_and_is_told(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Joining.admit

    def fails(*_: object) -> None:
        monkeypatch.setattr(Joining, "admit", admit)
        raise AttributeError("what nobody has expected")

    monkeypatch.setattr(Joining, "admit", fails)
    with pytest.raises(OSError):
        door.join()
    wait_until(lambda: door.said, "it to be told")
    assert door.said == ["a node at 127.0.0.1 can't join: a bug in launchpad: AttributeError: what nobody has expected"]
    door.join().close()


def test_an_exception_that_is_no_connections_own_ends_nothing(door: Door) -> None:
    door.joining._server.reactor.call(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    wait_until(lambda: door.said, "it to be told")
    assert "a bug in launchpad: ZeroDivisionError" in door.said[0]
    door.join().close()


def test_an_offer_of_the_wrong_type_is_refused_and_told(door: Door) -> None:
    offer = OFFER.as_json()
    offer["spec"]["environ"] = []
    with pytest.raises(JoinRefused, match="its offer is not valid: TypeError: environ: "):
        HeadConnection(door.address, b"s", offer)
    wait_until(lambda: door.said, "it to be told")
    door.join().close()


def heads(answer: Callable[[ssl.SSLSocket], None]) -> tuple[str, int]:
    """Something that listens where the head should, and answers one node."""
    context, _ = proof.head_context()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(DEADLINE)

    def serve() -> None:
        with listener, contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], True) as peer:
            answer(peer)

    threading.Thread(target=serve, daemon=True).start()
    host, port = listener.getsockname()
    return host, port


def test_a_head_that_says_too_much_before_its_proof_is_left() -> None:
    def answer(peer: ssl.SSLSocket) -> None:
        for _ in range(1 << 10):
            peer.sendall(b"x" * (1 << 16))

    with pytest.raises(JoinRefused, match="it says too much before it has proven that it knows the secret"):
        HeadConnection(heads(answer), b"s", OFFER.as_json())


@pytest.mark.parametrize("proven", ["\u00e9", "\ud800", [], None], ids=ascii)
def test_a_head_with_an_odd_proof_is_not_believed(proven: object) -> None:
    def answer(peer: ssl.SSLSocket) -> None:
        for said in ({"launchpad": __version__, "nonce": "a"}, {"proof": proven}):
            peer.recv(1 << 16)
            peer.sendall(json.dumps(said).encode() + b"\n")
        peer.recv(1 << 16)

    with pytest.raises(JoinRefused, match="what listens there doesn't know the job's secret"):
        HeadConnection(heads(answer), b"s", OFFER.as_json())


def test_what_one_machine_has() -> None:
    assert linux.network_of("10.0.0.1") == "10.0.0.1"
    assert linux.network_of("fe80::1%eth0") == linux.network_of("fe80::2") != linux.network_of("fe80:0:0:1::1")


def test_the_doors_of_those_that_have_joined_ask_for_the_secret_too() -> None:
    came: list[object] = []
    door = OwnDoor(b"s", "b")
    door.changed = came.append
    door.open("127.0.0.1")
    door.begin()
    address = (door.peer.host, door.peer.port)
    try:
        with pytest.raises(OSError, match="doesn't know yet who leads"):
            HeadConnection(address, b"s", OFFER.as_json())
        door.led_from(HeadPlace("10.0.0.1", 29400, 3))
        with pytest.raises(JoinRefused, match="the job's secret differs"):
            HeadConnection(address, b"another", None)
        asking = HeadConnection(address, b"s", None)
        asking.close()
        assert asking.answer == {"led": ["10.0.0.1", 29400], "term": 3}
        with pytest.raises(LedElsewhere):
            HeadConnection(address, b"s", OFFER.as_json())
        assert door.waiting() == {}
        door.seek((3, 5, "a"))
        waits = HeadConnection(address, b"s", OFFER._replace(key="c").as_json())
        assert waits.waits
        assert door.waiting() == {"c": ()}
        waits.close()
        wait_until(lambda: not door.waiting(), "it to have gone")
        assert came == [None]
    finally:
        door.close()
