"""Events as JSON lines, {"event": "RankExited", "time": …, "rank": …}: to text and back, and the sink of `--events`."""

import codecs
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from launchpad.errors import UsageError
from launchpad.named import NamedTuple
from launchpad.output.mark import Resumed, SinkMark
from launchpad.output.writer import Target, Writer
from launchpad.protocol.events import EVENTS, STDOUT, ConsoleClosed, LogFailed, Output, Restarted, WorldRestarted
from launchpad.protocol.typed import Convert, converter

if TYPE_CHECKING:
    from launchpad.diagnosis.history import History
    from launchpad.diagnosis.verdict import Verdict

_decoder = codecs.getincrementaldecoder("utf-8")

RECORDED: dict[str, Any] = {event.__name__: event for event in EVENTS if event.recorded}


def line_of(event: Any) -> str | None:
    """The event as a line without its newline; None for Output, and for events that are not recorded."""
    name = type(event).__name__
    if name not in RECORDED:
        return None
    return json.dumps({"event": name, **event._asdict()})


def text_line(output: Output, text: str) -> str:
    """Output as text instead of its bytes."""
    said = {"event": "Output", "time": output.time, "rank": output.rank, "stream": output.stream, "text": text}
    return json.dumps(said)


class OutputPlace(NamedTuple):
    """Where some Output is in the record."""

    time: int
    rank: int
    stream: int
    file: str
    offset: int  # in bytes, as the length
    length: int


def event_of(line: str | bytes) -> Any:
    """The event in a line, or an OutputPlace; None for a line that was cut off, isn't ours, or holds what it can't."""
    try:
        said = json.loads(line)
        name = said.pop("event")
        kind = OutputPlace if name == "Output" else RECORDED[name]
        return kind(**{field: convert(said[field]) for field, convert in _fields(kind) if field in said})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@functools.cache
def _fields(kind: type) -> list[tuple[str, Convert]]:
    return [(field, converter(hint)) for field, hint in get_type_hints(kind, include_extras=True).items()]


class EventLines:
    """The sink: all events, including the ranks' output, go to a file or to stdout.

    A slow reader slows the job down, as at the console. Raises UsageError if the file can't be written.
    """

    def __init__(
        self, path: str, post: Callable[[Any], None], *, adds: bool = False, resumed: Resumed | None = None
    ) -> None:
        """`path`: "-" or a file, which is truncated unless it `adds`. `resumed`: where to go on."""
        self._path = path
        self._post = post
        self._fd = STDOUT
        if path != "-":
            try:
                how = os.O_APPEND if adds or resumed else os.O_TRUNC
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600)
            except OSError as error:
                raise UsageError(f"--events {path}: {error.strerror}; choose a writable file, or -") from None
        self._writer = Writer(post, self._failed)
        # By rank and stream: a piece may end amid a character. U+FFFD replaces what is not UTF-8.
        self._decoders = defaultdict[tuple[int, int], Any](lambda: _decoder(errors="replace"))
        if resumed is not None:
            for key, state in resumed.states.get("events", {}).items():
                self._decoders[key].setstate(state)

    def on(self, event: Any) -> bool:
        """Write an event; True if the writer now holds an Output's bytes."""
        if type(event) is Output:
            text = self._decoders[event.rank, event.stream].decode(event.data)
            self._writer.put([(self._fd, text_line(event, text).encode() + b"\n")], event)
            return True
        if type(event) is SinkMark:
            self._mark(event)
        if type(event) is Restarted:
            self._write_rest()
        if type(event) is WorldRestarted:
            self._write_rest(event.ranks)
        line = line_of(event)
        if line is not None:
            self._writer.put([(self._fd, line.encode() + b"\n")])
        return False

    def _mark(self, mark: SinkMark) -> None:
        mark.awaits("events", {key: decoder.getstate() for key, decoder in self._decoders.items()})
        self._writer.mark(mark)

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Wait until everything is written."""
        self._write_rest()
        self._writer.close()
        if self._fd != STDOUT:
            os.close(self._fd)

    def _write_rest(self, ranks: Collection[int] | None = None) -> None:
        """These ranks' streams end, or all: U+FFFD for characters of which only a part has come."""
        for (rank, stream), decoder in self._decoders.items():
            if (ranks is None or rank in ranks) and (text := decoder.decode(b"", final=True)):
                last = Output(time.monotonic_ns(), rank, stream, b"")
                self._writer.put([(self._fd, text_line(last, text).encode() + b"\n")])

    def verdict(self, history: "History", verdict: "Verdict", lines: list[str], earlier: Sequence[str]) -> None:
        """Write the verdict on a failed job: the content of verdict.json, as an event."""
        from launchpad.diagnosis.verdict_json import as_json

        said = {"event": "Verdict", **as_json(history, verdict, lines, earlier)}
        self._writer.put([(self._fd, json.dumps(said).encode() + b"\n")])

    def _failed(self, _: Target, error: OSError) -> None:
        reason = error.strerror or str(error)
        now = time.monotonic_ns()
        self._post(ConsoleClosed(now, reason) if self._path == "-" else LogFailed(now, self._path, reason))
