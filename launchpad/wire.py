"""Frames: how events and commands travel over a Link.

A frame is a length (4 bytes, big-endian, of what follows), a type (1 byte: the index in MESSAGES) and a payload:
JSON of the message's fields, except for those that carry raw bytes: a fixed header and the bytes.
"""

from __future__ import annotations

import functools
import json
import struct
import types
import typing
from collections.abc import Iterator
from typing import Any

from . import commands, events, failures, stacks

# The order is the protocol: append only.
MESSAGES: tuple[Any, ...] = (
    events.Output,
    commands.Hello,
    events.AgentReady,
    commands.Start,
    events.RankStarted,
    events.StartFailed,
    events.RankRaised,
    events.RankExited,
    commands.Signal,
    commands.Credit,
    commands.Finish,
    events.StraysEnded,
    events.AgentFailed,
    events.Suspended,
    events.Drained,
    events.NotForked,
    commands.Survey,
    events.Surveyed,
    commands.Listen,
    events.Listening,
    commands.Reach,
    events.Reached,
    commands.Hold,
    events.Held,
    commands.Ping,
    events.Pong,
    commands.Sync,
    events.Wanted,
    commands.Piece,
    events.Taken,
    events.Synced,
    commands.Input,
    events.InputTaken,
    commands.World,
    events.RankFailed,
    events.BarrierIn,
    commands.BarrierOut,
    events.MpiRequest,
    commands.MpiReply,
    events.NoMpi,
    commands.StartMore,
    commands.Call,
    failures.ExceptionRaised,
    failures.Crashed,
    commands.Examine,
    stacks.Examined,
)
CODES = {message: code for code, message in enumerate(MESSAGES)}

# A plan of 10 000 ranks is about 6 MB; what claims to be more is not a frame.
LARGEST_FRAME = 64 << 20

_HEAD = struct.Struct("!IB")
_OUTPUT = struct.Struct("!qIB")

# Messages whose last field is raw bytes: the layout of the fields before it.
_RAW = {
    events.Output: _OUTPUT,
    commands.Piece: struct.Struct("!I"),
    commands.Input: struct.Struct("!"),
    commands.Call: struct.Struct("!"),
}


class WireError(Exception):
    """The bytes on the link are not frames of ours."""


def encode(message: events.Event | failures.Failure | commands.Command | stacks.Examined) -> bytes:
    """One message as one frame."""
    layout = _RAW.get(type(message))
    if layout is not None:
        fields: list[Any] = list(message)
        data: bytes = fields.pop()
        return _HEAD.pack(1 + layout.size + len(data), CODES[type(message)]) + layout.pack(*fields) + data
    payload = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return _HEAD.pack(len(payload) + 1, CODES[type(message)]) + payload


def output_header(time: int, rank: int, stream: int, size: int) -> bytes:
    """What stands before `size` bytes of raw output, so that they need not be copied to be framed."""
    return _HEAD.pack(size + 1 + _OUTPUT.size, 0) + _OUTPUT.pack(time, rank, stream)


@functools.cache
def _hints(cls: type) -> list[Any]:
    return list(typing.get_type_hints(cls).values())


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that JSON gave is of the type that a message's field is declared with."""
    if hint is Any:
        return True
    if hint is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if hint is float:
        return type(value) in (int, float)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return type(value) is list and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(_fits(item, inner[1]) for item in value.values())
    if origin is types.UnionType:
        return any(_fits(value, one) for one in inner)
    return type(value) is hint


class Decoder:
    """Turns bytes that are cut anywhere into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. Raises WireError for what can't be a frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                size, code = _HEAD.unpack_from(self._buffer, start)
                if not 0 < size <= LARGEST_FRAME or code >= len(MESSAGES):
                    shown = bytes(self._buffer[start : start + 40])
                    raise WireError(f"not a frame: {shown!r}")
                end = start + 4 + size
                if len(self._buffer) < end:
                    break
                yield self._message(code, start + _HEAD.size, end)
                start = end
        finally:
            del self._buffer[:start]

    def _message(self, code: int, start: int, end: int) -> Any:
        cls = MESSAGES[code]
        try:
            layout = _RAW.get(cls)
            if layout is not None:
                if end - start < layout.size:  # what follows is the next frame's
                    raise ValueError("shorter than its header")
                data = bytes(memoryview(self._buffer)[start + layout.size : end])
                return cls(*layout.unpack_from(self._buffer, start), data)
            text = self._buffer[start:end].decode("utf-8", "surrogateescape")
            fields = json.loads(text)
            hints = _hints(cls)
            if not (isinstance(fields, list) and len(fields) == len(hints) and all(map(_fits, fields, hints))):
                raise TypeError("its fields are not of the right number and types")
            return cls(*fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"a broken {cls.__name__} frame: {error}") from error
