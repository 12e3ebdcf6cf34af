"""Whole lines out of many streams that share one device, each under its rank's prefix. Pure: bytes and times in,
bytes out.

A line stays together, however its bytes arrive. An unfinished one (a prompt, a progress bar) is shown after a quiet
moment and then is the open line: its own stream continues it, any other stream first closes it with a newline.

A carriage return redraws a line. On a terminal only the newest state is drawn; elsewhere all of them are kept, and
in a line that begins with one (as tqdm's do) each is followed by the prefix that it would otherwise wipe out.
"""

from __future__ import annotations

import heapq

# A line that rests this long without its end is shown unfinished.
QUIET_SECONDS = 0.1

# Bars of several ranks take turns at the one open line; each turn costs a line, so they come at most this often.
TURN_SECONDS_TERMINAL = 1.0
TURN_SECONDS_PLAIN = 5.0

# Unfinished lines together may hold this much; a line that would exceed its stream's share is shown in pieces.
HELD_BYTES = 32 << 20
LEAST_HELD_BYTES = 64 << 10

_ERASE = b"\r\x1b[K"


class Stream:
    """One rank's stdout or stderr."""

    __slots__ = ("due", "fd", "held", "margin", "prefix", "shown_at")

    def __init__(self, fd: int, prefix: bytes, margin: int) -> None:
        self.fd = fd  # the descriptor that its lines are written to
        self.prefix = prefix
        self.margin = margin  # the columns that the prefix takes
        self.held = bytearray()  # of the line under way, what is not shown yet
        self.due: float | None = None  # when it is to be shown unfinished
        self.shown_at = float("-inf")


class Device:
    """A terminal, file or pipe; where stdout and stderr are the same one, both share its open line."""

    def __init__(self, streams: int, columns: int | None) -> None:
        """`streams` that may write here; `columns` of a terminal, None where lines can't be redrawn."""
        self._open: Stream | None = None
        self._columns = columns
        self._turn = TURN_SECONDS_PLAIN if columns is None else TURN_SECONDS_TERMINAL
        self._most_held = max(LEAST_HELD_BYTES, HELD_BYTES // max(1, streams))
        self._due: list[tuple[float, int, Stream]] = []  # a heap; an entry whose moment is not its stream's is void
        self._expected = 0  # entries so far: what orders those of one moment

    def feed(self, stream: Stream, data: bytes, now: float) -> list[tuple[int, bytes]]:
        """Take what a stream wrote; return what to write, and where."""
        end = data.rfind(b"\n") + 1
        out: list[tuple[int, bytes]] = []
        if end:
            block = bytes(stream.held) + data[:end] if stream.held else data[:end]
            stream.held.clear()
            out = self._lines(stream, block)
        rest = data[end:] if end else data
        stream.held += rest
        continues = self._open is stream and (self._columns is not None or b"\r" not in stream.held)
        if not stream.held:
            self._forget(stream)
        elif continues or len(stream.held) > self._most_held:
            out += self._show(stream, now)
        elif b"\r" not in stream.held:
            self._expect(stream, now + QUIET_SECONDS)
        elif stream.due is None:  # a bar may never rest: its turn comes all the same
            self._expect(stream, max(now + QUIET_SECONDS, stream.shown_at + self._turn))
        return out

    def note(self, text: bytes, fd: int) -> list[tuple[int, bytes]]:
        """A line of the launcher's own."""
        return [*self._close_open(), (fd, text + b"\n")]

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to show."""
        while self._due and self._due[0][0] != self._due[0][2].due:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def tick(self, now: float) -> list[tuple[int, bytes]]:
        """Show the unfinished lines whose moment has come."""
        out: list[tuple[int, bytes]] = []
        while (due := self.deadline) is not None and due <= now:
            out += self._show(self._due[0][2], now)
        return out

    def close(self, streams: list[Stream]) -> list[tuple[int, bytes]]:
        """Show what is held, and end the last line."""
        out: list[tuple[int, bytes]] = []
        for stream in streams:
            if stream.held.strip(b"\r"):
                out += self._show(stream, float("inf"))
        return out + self._close_open()

    def _lines(self, stream: Stream, block: bytes) -> list[tuple[int, bytes]]:
        """Whole lines: `block` ends with a newline."""
        if self._open is stream:
            end = block.find(b"\n") + 1
            first = self._continued(stream, block[: end - 1], is_last=True) + b"\n"
            self._open = None
            return [(stream.fd, first), *(self._lines(stream, block[end:]) if end < len(block) else [])]
        if b"\r" in block:
            block = self._without_redraws(stream, block)
        text = stream.prefix + block[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"
        return [*self._close_open(), (stream.fd, text)]

    def _without_redraws(self, stream: Stream, block: bytes) -> bytes:
        lines = block.split(b"\n")
        return b"\n".join(line if b"\r" not in line[:-1] else self._redrawn(stream, line) for line in lines)

    def _redrawn(self, stream: Stream, line: bytes) -> bytes:
        """A line with carriage returns inside, as it is to stand at the start of a line."""
        if self._columns is not None:
            return self._newest(line)
        if not line.startswith(b"\r"):
            return line
        body = line.lstrip(b"\r")
        kept = body.rstrip(b"\r")
        return kept.replace(b"\r", b"\r" + stream.prefix) + body[len(kept) :]

    def _newest(self, line: bytes) -> bytes:
        return line.rstrip(b"\r").rpartition(b"\r")[2]

    def _continued(self, stream: Stream, text: bytes, *, is_last: bool = False) -> bytes:
        """What follows the open line of the same stream; the last of it stays, so it may wrap."""
        if b"\r" not in text.rstrip(b"\r"):
            return text
        if self._columns is not None:
            newest = self._newest(text)
            return _ERASE + stream.prefix + (newest if is_last else self._clipped(stream, newest))
        return b"\r" + stream.prefix + self._redrawn(stream, text) if text.startswith(b"\r") else text

    def _clipped(self, stream: Stream, text: bytes) -> bytes:
        """A bar that wraps can't be erased: cut it to the terminal's width."""
        assert self._columns is not None
        room = max(8, self._columns - stream.margin - 1)
        if len(text) <= room or b"\x1b" in text:
            return text
        return text.decode(errors="surrogateescape")[:room].encode(errors="surrogateescape")

    def _show(self, stream: Stream, now: float) -> list[tuple[int, bytes]]:
        """Show the line under way, unfinished; it becomes the open line."""
        self._forget(stream)
        held = bytes(stream.held)
        if not held.strip(b"\r"):
            return []
        # A trailing carriage return is kept back: it may be half of a CR LF, or the start of the next redraw.
        back = b"\r" if held.endswith(b"\r") else b""
        stream.held[:] = back
        stream.shown_at = now
        if self._open is stream:
            return [(stream.fd, self._continued(stream, held[: len(held) - len(back)]))]
        text = held.rstrip(b"\r")
        if b"\r" in text:
            text = self._redrawn(stream, text)
            text = text if self._columns is None else self._clipped(stream, text)
        out = [*self._close_open(), (stream.fd, stream.prefix + text)]
        self._open = stream
        return out

    def _close_open(self) -> list[tuple[int, bytes]]:
        if self._open is None:
            return []
        fd, self._open = self._open.fd, None
        return [(fd, b"\n")]

    def _expect(self, stream: Stream, due: float) -> None:
        if stream.due != due:
            stream.due = due
            self._expected += 1
            heapq.heappush(self._due, (due, self._expected, stream))

    def _forget(self, stream: Stream) -> None:
        stream.due = None
