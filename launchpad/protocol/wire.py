"""Encodes messages as frames, and decodes frames from a Link.

A frame is the length of the rest (4 bytes, big-endian), a type (1 byte, the index in MESSAGES) and a payload: the
message's fields as a JSON list or, for messages that carry raw bytes, a fixed header and the bytes.
"""

import functools
import json
import struct
import typing
from collections.abc import Iterator
from typing import Any, cast

from .commands import COMMANDS, Command
from .events import EVENTS, Event, Output
from .typed import Convert, converter, typed

# What travels. The order is that of the declarations: head and agent are always of the same version.
MESSAGES: tuple[Any, ...] = (*(event for event in EVENTS if event.about), *COMMANDS)
CODES = {message: code for code, message in enumerate(MESSAGES)}

# A plan of 10 000 ranks takes about 6 MB. A longer length means garbage.
LARGEST_FRAME = 64 << 20

_HEAD = struct.Struct("!IB")

_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_ESCAPED = json.JSONEncoder(check_circular=False)

_RAW: dict[type, struct.Struct] = {message: message.raw for message in MESSAGES if message.raw}
_OUTPUT = _RAW[Output]
_OUTPUT_CODE = CODES[Output]


Sent = typing.TypeVar("Sent", bound=Command)


class WireError(Exception):
    """The bytes on the link are not valid frames."""


class _Encoded(bytes):
    """A message that is encoded already."""

    @property
    def data(self) -> memoryview:
        """The raw bytes that it carries."""
        return memoryview(self)[_HEAD.size + _RAW[MESSAGES[self[4]]].size :]


def encoded(command: Sent) -> Sent:
    """The command as it is sent, with `data` alone as a field: a large one for several nodes is encoded once."""
    return cast(Sent, _Encoded(encode(command)))


def encode(message: Event | Command) -> bytes:
    """One message as one frame."""
    if isinstance(message, _Encoded):
        return message
    layout = _RAW.get(type(message))
    if layout is not None:
        fields: list[Any] = list(message)
        data: bytes = fields.pop()
        return _HEAD.pack(1 + layout.size + len(data), CODES[type(message)]) + layout.pack(*fields) + data
    try:
        payload = _JSON.encode(message).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, which a rank's exception may have in its text
        payload = _ESCAPED.encode(message).encode()
    return _HEAD.pack(len(payload) + 1, CODES[type(message)]) + payload


def output_header(time: int, rank: int, stream: int, size: int) -> bytes:
    """The start of an Output frame, to precede `size` bytes of output: this saves copying them into a frame."""
    return _HEAD.pack(size + 1 + _OUTPUT.size, _OUTPUT_CODE) + _OUTPUT.pack(time, rank, stream)


def frames(buffer: bytearray) -> list[tuple[Any, bytes]]:
    """Take the whole frames out of the front of a buffer, each with its message's class. Raises WireError."""
    found, start = [], 0
    while len(buffer) - start >= _HEAD.size:
        size, code = _HEAD.unpack_from(buffer, start)
        if not 0 < size <= LARGEST_FRAME or code >= len(MESSAGES):
            raise WireError(f"not a frame: {bytes(buffer[start : start + 40])!r}")
        end = start + 4 + size
        if len(buffer) < end:
            break
        found.append((MESSAGES[code], bytes(memoryview(buffer)[start:end])))
        start = end
    del buffer[:start]
    return found


def decode(frame: bytes) -> Any:
    """The message of one whole frame. Raises WireError."""
    (message,) = Decoder().feed(frame)
    return message


@functools.cache
def _header(cls: type) -> list[Convert]:
    """What checks the fields before the raw bytes."""
    return [converter(hint) for hint in typing.get_type_hints(cls, include_extras=True).values()][:-1]


class Decoder:
    """Turns a byte stream, cut anywhere, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. Raises WireError if the bytes can't be a frame."""
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
                if end - start < layout.size:  # the bytes after it belong to the next frame
                    raise ValueError("shorter than its header")
                data = bytes(memoryview(self._buffer)[start + layout.size : end])
                header = zip(_header(cls), layout.unpack_from(self._buffer, start), strict=True)
                return cls(*[check(value) for check, value in header], data)
            text = self._buffer[start:end].decode("utf-8", "surrogateescape")
            return typed(cls, json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"malformed {cls.__name__} frame: {error}") from error
