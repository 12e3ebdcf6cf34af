"""protocol/wire: every message survives the round trip, however its bytes are cut; invalid frames raise WireError."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launchpad.protocol import wire
from launchpad.protocol.commands import Hello, Signal, Start
from launchpad.protocol.events import Output, RankExited
from launchpad.protocol.wire import Decoder, WireError, encode
from tests.support.declared import declared
from tests.support.unhurried import UNHURRIED
from tests.support.wire import cut

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=11) | st.dictionaries(st.text(max_size=4), inner, max_size=11),
    max_leaves=12,
)


def frame(code: int, payload: bytes) -> bytes:
    return struct.pack("!IB", len(payload) + 1, code) + payload


def decode(pieces: list[bytes]) -> tuple[list[Any], bool]:
    """The messages in these pieces, and whether a WireError ended them. Any other error fails the test."""
    decoder = Decoder()
    found: list[Any] = []
    try:
        for piece in pieces:
            found.extend(decoder.feed(piece))
    except WireError:
        return found, True
    return found, False


PLACES = st.lists(st.integers(0, 1 << 16), max_size=12)


@pytest.mark.parametrize("cls", wire.MESSAGES, ids=lambda cls: cls.__name__)
@settings(UNHURRIED, max_examples=20)  # of each
@given(data=st.data())
def test_every_message_survives_the_round_trip(cls: Any, data: st.DataObject) -> None:
    message = data.draw(declared(cls))
    found, failed = decode(cut(encode(message), data.draw(PLACES)))
    assert not failed
    assert found == [message]
    assert type(found[0]) is cls


@UNHURRIED
@given(messages=st.lists(st.one_of([declared(cls) for cls in wire.MESSAGES]), max_size=6), places=PLACES)
def test_message_order_does_not_depend_on_the_cuts(messages: list[Any], places: list[int]) -> None:
    found, failed = decode(cut(b"".join(encode(message) for message in messages), places))
    assert not failed
    assert [(type(message), message) for message in found] == [(type(message), message) for message in messages]


def test_non_utf_8_arguments_arrive_unchanged() -> None:
    words = [b"caf\xe9", b"\xff\xfe", b"\xed\xa0\x80", "ünï".encode()]
    argv = [word.decode("utf-8", "surrogateescape") for word in words]
    ranks = [{"rank": 0, "argv": argv, "environ": {}}]
    start = Start(0, "/", {}, {}, {}, ranks, argv, "", [], 1, "", -1, False, False, [], False, True)
    (found,), _ = decode([encode(start)])
    assert [word.encode("utf-8", "surrogateescape") for word in found.ranks[0]["argv"]] == words


@UNHURRIED
@given(data=st.binary(max_size=2000))
def test_output_bytes_arrive_unchanged(data: bytes) -> None:
    header = wire.output_header(7, 3, 2, len(data))
    assert header + data == encode(Output(7, 3, 2, data))
    assert decode([header, data]) == ([Output(7, 3, 2, data)], False)


@UNHURRIED
@given(data=st.binary(max_size=200), places=PLACES)
def test_rejection_of_garbage_does_not_depend_on_the_cuts(data: bytes, places: list[int]) -> None:
    assert decode(cut(data, places)) == decode([data])


@UNHURRIED
@given(
    code=st.integers(0, 255),
    payload=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
    places=PLACES,
)
def test_garbage_payload_raises_only_wire_error(code: int, payload: bytes, places: list[int]) -> None:
    decode(cut(frame(code, payload) + encode(Signal(2)), places))


@pytest.mark.parametrize("size", [0, wire.LARGEST_FRAME + 1, 2**32 - 1])
def test_invalid_length_is_rejected_before_the_payload_arrives(size: int) -> None:
    assert decode([struct.pack("!IB", size, 0)]) == ([], True)


@pytest.mark.parametrize("payload", [b"", b"[", b"\xff", b"5", b"null", b"[]", b"[1, 2]", b'{"signum": 15, "x": 1}'])
def test_payload_that_does_not_match_the_message_is_rejected(payload: bytes) -> None:
    assert decode([frame(wire.CODES[Signal], payload)]) == ([], True)


@pytest.mark.parametrize("payload", [b'"abcde"', b'{"a": 0, "b": 0, "c": 0, "d": 0, "e": 0}'])
def test_payload_of_the_right_length_that_is_not_a_list_is_rejected(payload: bytes) -> None:
    assert decode([frame(wire.CODES[RankExited], payload)]) == ([], True)


def test_too_deeply_nested_payload_is_rejected() -> None:
    assert decode([frame(wire.CODES[Signal], b"[" * 200_000)]) == ([], True)


def test_output_shorter_than_its_header_does_not_consume_the_next_frame() -> None:
    assert decode([frame(wire.CODES[Output], b"\0\0\0") + encode(Hello("1", False, 0, 0.0))]) == ([], True)


def test_messages_before_garbage_are_delivered() -> None:
    assert decode([encode(Signal(2)) + b"SSH-2.0-OpenSSH"]) == ([Signal(2)], True)


def test_a_message_for_several_nodes_is_encoded_once() -> None:
    once = wire.encoded(Signal(2))
    assert encode(once) is encode(once)
    assert decode([encode(once), encode(once)]) == ([Signal(2)] * 2, False)
