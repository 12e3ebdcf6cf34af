"""The console of a detached job: what it would show on a terminal, as lines of JSON that `launchpad attach` replays.

They are in console.1.jsonl, console.2.jsonl … in the job's folder; of these, the last SEGMENTS are kept. Output is kept
as the ranks wrote it, with its prefix: folds, colours and redrawn lines depend on the terminal of whoever attaches. A
line that is no JSON is shown as it is: launchpad's own stderr goes there too.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Literal, NamedTuple

from launchpad.console.console import LAST_WORDS_SECONDS
from launchpad.console.message import say_on_stderr
from launchpad.console.prefix import Prefix
from launchpad.output.mark import Resumed, SinkMark
from launchpad.output.writer import Target, Writer
from launchpad.protocol.events import STDERR, STDOUT, LogFailed, Output
from launchpad.record import files, job_store
from launchpad.record.journal import LARGE_BYTES

# All segments together are less than the job store has room for.
SEGMENT_BYTES = 128 << 20
SEGMENTS = 4


class ConsoleEntry(NamedTuple):
    """A piece of the console. Text is UTF-8 with surrogateescape."""

    kind: Literal["output", "say", "print", "flush", "over"]
    at: float = 0.0  # seconds since 1970
    text: str = ""
    rank: int = -1
    stream: int = STDOUT
    label: str = ""  # its prefix
    local_rank: int = -1  # of the rank, with --log-line-prefix-template, like `host`
    host: str = ""
    within: bool = False  # it continues a line
    bad: bool = False
    ranks: list[int] | None = None  # whose lines end here; None: all

    def line(self) -> bytes:
        """As a line of the record: the fields that aren't as above."""
        said = {
            name: value for name, value in self._asdict().items() if value != ConsoleEntry._field_defaults.get(name)
        }
        try:
            return json.dumps(said, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
        except UnicodeEncodeError:  # a lone surrogate, from the JSON of an error file
            return json.dumps(said).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> ConsoleEntry:
        """The entry in a line of the record."""
        text = line.decode(errors="surrogateescape")
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return cls("print", text=text.removesuffix("\n"))


class ConsoleRecord:
    """What the console of a job is shown on instead of a terminal."""

    def __init__(self, post: Callable[[Any], None], resumed: Resumed | None = None) -> None:
        """`post` takes the head's own events. `resumed`: where to go on."""
        self._post = post
        self._resumed = resumed
        self._folder = ""
        self._number = 0
        self._size = 0  # bytes in this segment
        self._within: set[tuple[int, int]] = set()  # streams that have an unfinished line
        self._writer = Writer(post, self._failed)

    def begin(self, folder: str) -> None:
        """Record in this folder from now on, also what is written to our standard output and error. Raises OSError."""
        self._folder = folder
        if self._resumed is not None:
            self._number, self._size, self._within = self._resumed.states["console"]
            self._number -= 1
        size = self._size
        self._next_segment()
        self._size = size

    def mark(self, mark: SinkMark) -> None:
        """Say what is recorded."""
        mark.awaits("console", (self._number, self._size, set(self._within)))
        self._writer.mark(mark)

    def show(self, output: Output, prefix: Prefix) -> bool:
        """Record output of a rank. True: the writer holds its bytes."""
        key = output.rank, output.stream
        text = output.data.decode(errors="surrogateescape")
        within = key in self._within
        entry = ConsoleEntry("output", time.time(), text, *key, prefix.text, prefix.local_rank, prefix.host, within)
        if output.data.endswith(b"\n"):
            self._within.discard(key)
        else:
            self._within.add(key)
        self._put(entry, output)
        return True

    def say(self, line: str, *, bad: bool = False) -> None:
        """Record a line of the launcher's own; before `begin` there is still somebody who reads it."""
        if self._folder:
            self._put(ConsoleEntry("say", time.time(), line, bad=bad))
        else:
            say_on_stderr(line, bad=bad)

    def print(self, text: str) -> None:
        """Record a text that is to be shown as it is."""
        self._put(ConsoleEntry("print", time.time(), text))

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def flush(self, ranks: Collection[int] | None = None) -> None:
        """Record that unfinished lines of these ranks end here; None: of all ranks."""
        self._within = {key for key in self._within if ranks is not None and key[0] not in ranks}
        if self._folder:
            self._put(ConsoleEntry("flush", time.time(), ranks=None if ranks is None else list(ranks)))

    def leave(self, lines: Sequence[str]) -> None:
        """Record these, but don't wait long for a disk that does not answer."""
        for line in lines:
            self.say(line, bad=True)
        self._end(LAST_WORDS_SECONDS)

    def close(self) -> None:
        """Wait until everything is written."""
        self._end(None)
        if self._number > 1 or self._size > LARGE_BYTES:
            job_store.prune(os.environ, by_size=True)

    def _end(self, seconds: float | None) -> None:
        if self._folder:
            self._put(ConsoleEntry("over", time.time()))
        self._writer.close(seconds)

    def _put(self, entry: ConsoleEntry, output: Output | None = None) -> None:
        line = entry.line()
        if self._size and self._size + len(line) > SEGMENT_BYTES:
            self._writer.finish(segment(self._folder, self._number))
            try:
                self._next_segment()
            except OSError as error:
                self._failed(segment(self._folder, self._number), error)
        self._size += len(line)
        self._writer.put([(segment(self._folder, self._number), line)], output)

    def _next_segment(self) -> None:
        self._number += 1
        self._size = 0
        fd = os.open(segment(self._folder, self._number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (STDOUT, STDERR):
            os.dup2(fd, number)
        os.close(fd)
        if self._number > SEGMENTS:
            with suppress(FileNotFoundError):
                os.unlink(segment(self._folder, self._number - SEGMENTS))

    def _failed(self, path: Target, error: OSError) -> None:
        self._post(LogFailed(time.monotonic_ns(), str(path), error.strerror or str(error)))


def segment(folder: str, number: int) -> str:
    """The path of a segment."""
    return os.path.join(folder, f"{job_store.CONSOLE}.{number}.jsonl")


def segments(folder: str) -> list[int]:
    """The numbers of the segments that are there."""
    return [number for number, _ in files.numbered(folder, f"{job_store.CONSOLE}.*.jsonl")]


def _open(folder: str, number: int) -> BinaryIO:
    """A segment for reading. Raises OSError, Unreadable."""
    return files.open_file(folder, os.path.basename(segment(folder, number)))


class _EntryPlace(NamedTuple):
    """An entry, and where it is."""

    entry: ConsoleEntry
    number: int  # of the segment
    start: int
    end: int


class ConsoleReader:
    """Reads the console of a job, from its beginning or from a later point, as it grows."""

    def __init__(self, folder: str) -> None:
        """Raises OSError if there is none."""
        self._folder = folder
        self._skip = 0  # how many lines of the next entry not to show
        self._line = b""
        self._number = min(segments(folder), default=1)
        self._file = _open(folder, self._number)
        # Streams whose current line is known from its beginning; None: all.
        self._met: set[tuple[int, int]] | None = None if self._number == 1 else set()

    def close(self) -> None:
        """Close the record."""
        self._file.close()

    def start_at_last(self, lines: int) -> None:
        """Skip everything but the last so many lines."""
        found = 0
        for place in self._back():
            entry = place.entry
            found += entry.text.count("\n") if entry.kind == "output" else entry.kind in ("say", "print")
            if found >= lines:
                self._start(place.number, place.start)
                self._skip = found - lines
                return

    def start_since(self, when: float) -> None:
        """Skip what was shown before this time, in seconds since 1970."""
        for place in self._back():
            if 0 < place.entry.at < when:
                self._start(place.number, place.end)
                return

    def _start(self, number: int, offset: int) -> None:
        if number != self._number:
            self._file.close()
            self._number = number
            self._file = _open(self._folder, number)
        self._file.seek(offset)
        self._met = set()

    def _back(self) -> Iterator[_EntryPlace]:
        """The entries from the last to the first."""
        for number in reversed(segments(self._folder)):
            for start, end, line in _lines_back(self._folder, number):
                yield _EntryPlace(ConsoleEntry.of(line), number, start, end)

    def more(self) -> Iterator[ConsoleEntry]:
        """What is new since the last call."""
        while True:
            later = [number for number in segments(self._folder) if number > self._number]
            for line in self._file:
                self._line += line
                if not self._line.endswith(b"\n"):  # it is still being written
                    break
                entry, self._line = ConsoleEntry.of(self._line), b""
                if (shown := self._whole(entry)) is not None:
                    yield shown
            if not later:
                return
            try:
                file = _open(self._folder, later[0])
            except FileNotFoundError:  # just removed
                continue
            self._file.close()
            self._file, self._line = file, b""
            if later[0] > self._number + 1:
                yield ConsoleEntry(
                    "say", text="there was more output than is kept, and some of it is missing here", bad=True
                )
                self._met = set()
            self._number = later[0]

    def _whole(self, entry: ConsoleEntry) -> ConsoleEntry | None:
        """The entry without what belongs to a line, or to lines, whose beginning is not shown."""
        if entry.kind == "output" and self._skip:
            *_, text = entry.text.split("\n", self._skip)
            entry = entry._replace(text=text, within=False)
        self._skip = 0
        key = entry.rank, entry.stream
        if entry.kind != "output" or self._met is None or key in self._met:
            return entry
        if entry.within:
            _, newline, text = entry.text.partition("\n")
            if not newline:
                return None
            entry = entry._replace(text=text)
        self._met.add(key)
        return entry


def _lines_back(folder: str, number: int) -> Iterator[tuple[int, int, bytes]]:
    """The whole lines of a segment from the last to the first, each with its offset and that of the next one."""
    with _open(folder, number) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            end = view.rfind(b"\n") + 1
            while end > 0:
                start = view.rfind(b"\n", 0, end - 1) + 1
                yield start, end, view[start:end]
                end = start
