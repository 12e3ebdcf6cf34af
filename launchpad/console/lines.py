"""Merges many streams into whole lines on one device, each with its rank's prefix. Pure: bytes and times in, bytes out.

A line stays together, however its bytes arrive. An unfinished line (a prompt, a progress bar) is shown after a short
pause and is then the open line: its own stream continues it, and any other stream first ends it with a newline.

A carriage return redraws a line. On a terminal only the newest state is drawn. Elsewhere every state is kept, and in a
line that starts with a carriage return (as tqdm's do) the prefix, which would be overwritten, follows each of them.
"""

from __future__ import annotations

import heapq

# An unfinished line is shown when it has been quiet this long. Only on a terminal does somebody wait for a prompt;
# elsewhere a line that is written piece by piece on a busy machine should stay whole.
QUIET_SECONDS_TERMINAL = 0.1
QUIET_SECONDS_PLAIN = 2.0

# Progress bars of several ranks take turns as the open line. Each turn costs a line, so turns are at least this long.
TURN_SECONDS_TERMINAL = 1.0
TURN_SECONDS_PLAIN = 5.0

# The most that all unfinished lines may hold; a line that exceeds its stream's share of it is shown in pieces.
PENDING_BYTES = 32 << 20
LEAST_PENDING_BYTES = 64 << 10

_ERASE = b"\r\x1b[K"


class LineStream:
    """One rank's stdout or stderr."""

    __slots__ = ("due", "fd", "margin", "mark", "number", "pending", "prefix", "rank", "shown_at")

    def __init__(self, fd: int, prefix: bytes, margin: int, rank: int = -1, number: int = 0, mark: bytes = b"") -> None:
        self.fd = fd  # the descriptor that its lines are written to
        self.rank = rank
        self.number = number or fd  # 1 stdout, 2 stderr
        self.prefix = prefix
        self.mark = mark  # what is not shown at the beginning of a line, as the prefix says it
        self.margin = margin  # the width of the prefix, in columns
        self.pending = bytearray()  # the part of the current line that is not shown yet
        self.due: float | None = None  # when to show it unfinished
        self.shown_at = float("-inf")


class Device:
    """A terminal, file or pipe. If stdout and stderr are the same one, they share its open line."""

    def __init__(self, streams: int, columns: int | None) -> None:
        """`streams`: how many may write here. `columns`: a terminal's width, None if lines can't be redrawn."""
        self._open: LineStream | None = None
        self._columns = columns
        self._turn = TURN_SECONDS_PLAIN if columns is None else TURN_SECONDS_TERMINAL
        self._quiet = QUIET_SECONDS_PLAIN if columns is None else QUIET_SECONDS_TERMINAL
        self._most_pending = max(LEAST_PENDING_BYTES, PENDING_BYTES // max(1, streams))
        self._due: list[tuple[float, int, LineStream]] = []  # a heap; an entry is stale if its time is not stream.due
        self._scheduled = 0  # a counter that orders entries with the same time

    def feed(self, stream: LineStream, data: bytes, now: float) -> list[tuple[int, bytes]]:
        """Add a stream's output; return what to write, and to which descriptor."""
        end = data.rfind(b"\n") + 1
        out: list[tuple[int, bytes]] = []
        if end:
            block = bytes(stream.pending) + data[:end] if stream.pending else data[:end]
            stream.pending.clear()
            out = self._lines(stream, self._unmarked(stream, block))
        rest = data[end:] if end else data
        stream.pending += rest
        continues = self._open is stream and (self._columns is not None or b"\r" not in stream.pending)
        if not stream.pending:
            self._unschedule(stream)
        elif continues or len(stream.pending) > self._most_pending:
            out += self._show(stream, now)
        elif b"\r" not in stream.pending:
            self._schedule(stream, now + self._quiet)
        elif stream.due is None:  # a bar may never be quiet, but it gets its turn
            self._schedule(stream, max(now + self._quiet, stream.shown_at + self._turn))
        return out

    def note(self, text: bytes, fd: int) -> list[tuple[int, bytes]]:
        """Show a line of the launcher's own."""
        return [*self._close_open(), (fd, text + b"\n")]

    @property
    def deadline(self) -> float | None:
        """The next time at which `tick` has something to show."""
        while self._due and self._due[0][0] != self._due[0][2].due:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def tick(self, now: float) -> list[tuple[int, bytes]]:
        """Show the unfinished lines that are due."""
        out: list[tuple[int, bytes]] = []
        while (due := self.deadline) is not None and due <= now:
            out += self._show(self._due[0][2], now)
        return out

    def close(self, streams: list[LineStream]) -> list[tuple[int, bytes]]:
        """These streams end: show what is pending of them, and end their last line."""
        out: list[tuple[int, bytes]] = []
        for stream in streams:
            if stream.pending.strip(b"\r"):
                out += self._show(stream, float("inf"))
        return out + (self._close_open() if self._open in streams else [])

    def _lines(self, stream: LineStream, block: bytes) -> list[tuple[int, bytes]]:
        """Show whole lines: `block` ends with a newline."""
        if self._open is stream:
            end = block.find(b"\n") + 1
            first = self._continued(stream, block[: end - 1], is_last=True) + b"\n"
            self._open = None
            return [(stream.fd, first), *(self._lines(stream, block[end:]) if end < len(block) else [])]
        if b"\r" in block:
            block = self._without_redraws(stream, block)
        text = stream.prefix + block[:-1].replace(b"\n", b"\n" + stream.prefix) + b"\n"
        return [*self._close_open(), (stream.fd, text)]

    def _unmarked(self, stream: LineStream, block: bytes) -> bytes:
        """Lines without their marks, and without the blank that follows one; the first may continue the open line."""
        mark = stream.mark
        if not mark or mark not in block:
            return block
        begun = b"" if self._open is stream else b"\n"
        marked = (begun + block).replace(b"\n" + mark + b" ", b"\n").replace(b"\n" + mark, b"\n")
        return marked[len(begun) :]

    def _without_redraws(self, stream: LineStream, block: bytes) -> bytes:
        lines = block.split(b"\n")
        return b"\n".join(line if b"\r" not in line[:-1] else self._redrawn(stream, line) for line in lines)

    def _redrawn(self, stream: LineStream, line: bytes) -> bytes:
        """A line with carriage returns inside, as written at the start of a line."""
        if self._columns is not None:
            return self._newest(line)
        if not line.startswith(b"\r"):
            return line
        body = line.lstrip(b"\r")
        kept = body.rstrip(b"\r")
        return kept.replace(b"\r", b"\r" + stream.prefix) + body[len(kept) :]

    def _newest(self, line: bytes) -> bytes:
        return line.rstrip(b"\r").rpartition(b"\r")[2]

    def _continued(self, stream: LineStream, text: bytes, *, is_last: bool = False) -> bytes:
        """Text that continues the open line of the same stream. The last state stays, so it may wrap."""
        if b"\r" not in text.rstrip(b"\r"):
            return text
        if self._columns is not None:
            newest = self._newest(text)
            return _ERASE + stream.prefix + (newest if is_last else self._clipped(stream, newest))
        return b"\r" + stream.prefix + self._redrawn(stream, text) if text.startswith(b"\r") else text

    def _clipped(self, stream: LineStream, text: bytes) -> bytes:
        """Cut a bar to the terminal's width: one that wraps could not be erased."""
        assert self._columns is not None
        room = max(8, self._columns - stream.margin - 1)
        if len(text) <= room or b"\x1b" in text:
            return text
        return text.decode(errors="surrogateescape")[:room].encode(errors="surrogateescape")

    def _show(self, stream: LineStream, now: float) -> list[tuple[int, bytes]]:
        """Show the current line unfinished; it becomes the open line."""
        self._unschedule(stream)
        pending = bytes(stream.pending)
        if not pending.strip(b"\r"):
            return []
        # Keep back a trailing carriage return: it may be half of a CR LF, or the start of the next redraw.
        kept = b"\r" if pending.endswith(b"\r") else b""
        stream.pending[:] = kept
        stream.shown_at = now
        if self._open is stream:
            return [(stream.fd, self._continued(stream, pending[: len(pending) - len(kept)]))]
        text = pending.rstrip(b"\r")
        if b"\r" in text:
            text = self._redrawn(stream, text)
            text = text if self._columns is None else self._clipped(stream, text)
        text = self._unmarked(stream, text)
        out = [*self._close_open(), (stream.fd, stream.prefix + text)]
        self._open = stream
        return out

    def _close_open(self) -> list[tuple[int, bytes]]:
        if self._open is None:
            return []
        fd, self._open = self._open.fd, None
        return [(fd, b"\n")]

    def _schedule(self, stream: LineStream, due: float) -> None:
        if stream.due != due:
            stream.due = due
            self._scheduled += 1
            heapq.heappush(self._due, (due, self._scheduled, stream))

    def _unschedule(self, stream: LineStream) -> None:
        stream.due = None
