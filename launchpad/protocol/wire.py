"""Encodes messages as frames, and decodes frames from a Link.

A frame is the length of the rest (4 bytes, big-endian), a type (1 byte, the index in MESSAGES) and a payload: the
message's fields as a JSON list or, for messages that carry raw bytes, a fixed header and the bytes.
"""

import functools
import json
import struct
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from . import commands, events

_Check = Callable[[Any], bool]


class MessageType(NamedTuple):
    """What there is to know about a kind of message."""

    kind: Any  # its class
    to: Literal["head", "agent", ""]  # "": it never travels; the head creates and consumes it
    raw: struct.Struct | None = None  # its last field is raw bytes, and this is the layout of the fields before it
    recorded: bool = False  # in events.jsonl


# The order of what travels is the protocol: append only.
TABLE = (
    MessageType(events.Output, "head", raw=struct.Struct("!qIB")),
    MessageType(commands.Hello, "agent"),
    MessageType(events.AgentReady, "head"),
    MessageType(commands.Start, "agent"),
    MessageType(events.RankStarted, "head", recorded=True),
    MessageType(events.StartFailed, "head", recorded=True),
    MessageType(events.RankRaised, "head", recorded=True),
    MessageType(events.RankExited, "head", recorded=True),
    MessageType(commands.Signal, "agent"),
    MessageType(commands.Credit, "agent"),
    MessageType(commands.Finish, "agent"),
    MessageType(events.OrphansKilled, "head", recorded=True),
    MessageType(events.AgentFailed, "head"),
    MessageType(events.Suspended, "head"),
    MessageType(events.Drained, "head"),
    MessageType(events.NotForked, "head", recorded=True),
    MessageType(commands.Probe, "agent"),
    MessageType(events.NodeFacts, "head"),
    MessageType(commands.Listen, "agent"),
    MessageType(events.Listening, "head"),
    MessageType(commands.Reach, "agent"),
    MessageType(events.Reached, "head"),
    MessageType(commands.HoldPort, "agent"),
    MessageType(events.PortHeld, "head"),
    MessageType(commands.Ping, "agent"),
    MessageType(events.Pong, "head"),
    MessageType(commands.Sync, "agent"),
    MessageType(events.Wanted, "head"),
    MessageType(commands.FileChunk, "agent", raw=struct.Struct("!I")),
    MessageType(events.ChunksTaken, "head"),
    MessageType(events.Synced, "head"),
    MessageType(commands.StdinData, "agent", raw=struct.Struct("!")),
    MessageType(events.StdinTaken, "head"),
    MessageType(commands.MpiWorld, "agent"),
    MessageType(events.RankFailed, "head", recorded=True),
    MessageType(events.BarrierIn, "head"),
    MessageType(commands.BarrierOut, "agent"),
    MessageType(events.MpiRequest, "head"),
    MessageType(commands.MpiReply, "agent"),
    MessageType(events.NoMpi, "head", recorded=True),
    MessageType(commands.StartMore, "agent"),
    MessageType(commands.Call, "agent", raw=struct.Struct("!")),
    MessageType(events.ExceptionRaised, "head", recorded=True),
    MessageType(events.Crashed, "head", recorded=True),
    MessageType(commands.DumpStacks, "agent"),
    MessageType(events.StackDump, "head"),
    MessageType(events.StopRequested, "head", recorded=True),
    MessageType(events.AgentLeft, "head"),
    MessageType(commands.JobEnded, "agent"),
    MessageType(events.SpareReady, "head"),
    MessageType(commands.SignalRank, "agent"),
    MessageType(commands.SignalAgent, "agent"),
    MessageType(events.AtPrompt, "head", recorded=True),
    MessageType(commands.Debug, "agent"),
    MessageType(events.DebuggerReady, "head"),
    MessageType(commands.Profile, "agent"),
    MessageType(events.ProfileTaken, "head"),
    MessageType(commands.TunnelOpen, "agent"),
    MessageType(commands.TunnelData, "agent", raw=struct.Struct("!I")),
    MessageType(events.TunnelRead, "head", raw=struct.Struct("!qI")),
    MessageType(events.TunnelWritten, "head"),
    MessageType(commands.TunnelCredit, "agent"),
    MessageType(commands.NextCall, "agent", raw=struct.Struct("!q")),
    MessageType(commands.EndCall, "agent"),
    MessageType(commands.EndSession, "agent"),
    MessageType(commands.Fence, "agent"),
    MessageType(events.Fenced, "head"),
    MessageType(events.ImageUnused, "head", recorded=True),
    MessageType(commands.KeeperRequest, "agent"),
    MessageType(events.KeeperReply, "head"),
    MessageType(events.CollectivesEntered, "head", recorded=True),
    MessageType(commands.Sample, "agent"),
    MessageType(events.Sampled, "head"),
    MessageType(events.ModulesImported, "head", recorded=True),
    MessageType(events.MilestoneReached, "head", recorded=True),
    MessageType(commands.ReadTopology, "agent"),
    MessageType(events.TopologyRead, "head"),
    MessageType(events.ArrivalTimes, "head"),
    MessageType(events.Hindrances, "head"),
    MessageType(events.PmixRequest, "head"),
    MessageType(commands.PmixReply, "agent"),
    MessageType(commands.PmixFetch, "agent"),
    MessageType(events.PmixFetched, "head"),
    MessageType(events.MpiFound, "head"),
    MessageType(commands.Check, "agent"),
    MessageType(events.Checked, "head"),
    MessageType(commands.HoldPorts, "agent"),
    MessageType(events.PortsHeld, "head"),
    # The head's own events that are part of a job's record.
    MessageType(events.NodeLost, "", recorded=True),
    MessageType(events.NodeJoined, "", recorded=True),
    MessageType(events.NodeLeaving, "", recorded=True),
    MessageType(events.NodesAwaited, "", recorded=True),
    MessageType(events.NodeRefused, "", recorded=True),
    MessageType(events.ConsoleClosed, "", recorded=True),
    MessageType(events.LogFailed, "", recorded=True),
    MessageType(events.Restarted, "", recorded=True),
    MessageType(events.NotRestarted, "", recorded=True),
    MessageType(events.RanksSpawned, "", recorded=True),
    MessageType(events.PhaseChanged, "", recorded=True),
    MessageType(events.JobPlanned, "", recorded=True),
    MessageType(events.ClocksSeen, "", recorded=True),
    MessageType(events.RanksHeld, "", recorded=True),
    MessageType(events.ArrivalsCompared, "", recorded=True),
    MessageType(events.JobOver, "", recorded=True),
    MessageType(events.NodesApart, "", recorded=True),
    MessageType(events.Stalled, "", recorded=True),
    MessageType(events.FaultInjected, "", recorded=True),
    MessageType(events.FaultMissed, "", recorded=True),
    MessageType(events.RanksBound, "", recorded=True),
)
MESSAGES = tuple(entry.kind for entry in TABLE if entry.to)
CODES = {message: code for code, message in enumerate(MESSAGES)}

# A plan of 10 000 ranks takes about 6 MB. A longer length means garbage.
LARGEST_FRAME = 64 << 20

_HEAD = struct.Struct("!IB")

_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_ESCAPED = json.JSONEncoder(check_circular=False)

_RAW = {entry.kind: entry.raw for entry in TABLE if entry.raw}
_OUTPUT = _RAW[events.Output]


class WireError(Exception):
    """The bytes on the link are not valid frames."""


def encode(message: events.Event | commands.Command) -> bytes:
    """One message as one frame."""
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
    return _HEAD.pack(size + 1 + _OUTPUT.size, 0) + _OUTPUT.pack(time, rank, stream)


@functools.cache
def _checks(cls: type) -> tuple[_Check, ...]:
    """What holds for the values of a message's fields, as they come from JSON."""
    return tuple(map(_check, typing.get_type_hints(cls).values()))


@functools.cache
def _check(hint: Any) -> _Check:
    """Whether a value has this declared type. Made once for each type: a large head asks millions of times."""
    if hint is Any:
        return lambda _: True
    if hint is int:
        return lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63
    if hint is float:
        return lambda value: type(value) in (int, float)
    origin, inner = typing.get_origin(hint), [_check(one) for one in typing.get_args(hint)]
    if origin is list:
        return lambda value: type(value) is list and all(map(inner[0], value))
    if origin is dict:
        return lambda value: type(value) is dict and all(map(inner[1], value.values()))
    if origin is types.UnionType:
        return lambda value: any(one(value) for one in inner)
    return lambda value: type(value) is hint


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
                return cls(*layout.unpack_from(self._buffer, start), data)
            text = self._buffer[start:end].decode("utf-8", "surrogateescape")
            fields = json.loads(text)
            checks = _checks(cls)
            if not (isinstance(fields, list) and len(fields) == len(checks)):
                raise TypeError("wrong number of fields")
            for check, value in zip(checks, fields, strict=True):
                if not check(value):
                    raise TypeError("wrong types of fields")
            return cls(*fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"malformed {cls.__name__} frame: {error}") from error
