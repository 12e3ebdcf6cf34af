"""Folds equal lines of several ranks into one. Pure: lines and times in, lines out, each with the ranks that wrote it.

A line is held for HOLD_SECONDS, or until all ranks have written it. Held lines form a list. A rank's line joins the
first equal one that stands after what the rank shares with others; what only that rank has written since is moved in
front of it. So the order within each rank is kept, and ranks that differ in a few lines still share the rest.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from launchpad.console.lines import Device, LineStream

# How long a line waits for equal ones of other ranks.
HOLD_SECONDS = 0.05

# Nobody reads what a rank prints faster than this: the rest of the second is not held. 128 bytes count as a line more.
# Of many ranks less is held, as all of them may do so.
MOST_LINES_A_SECOND = 2000
_MOST_OF_ALL = 64_000
_LEAST_LINES_A_SECOND = 200
_BYTES_A_LINE = 128

# Of the held lines that are equal to a new one, so many are considered.
_MOST_LOOKED_AT = 16

# A sign stands at the beginning, or after a blank or an opening: in 3-4 and a-1 it is none. re finds the next match
# quickly if each alternative begins with a character of its own.
_NUMBER = re.compile(rb"(?:\d|-(?<![^\s=(\[{:,]-)\d)\d*(?:\.\d+)?(?:[eE][-+]?\d+)?")

_ORDER = attrgetter("order")
_NOWHERE = float("-inf")


class FoldedLine(NamedTuple):
    """A line, without its newline, and who wrote it."""

    stream: int
    ranks: tuple[int, ...]
    text: bytes


class _HeldLine:
    """A held line, in a list with links in both directions."""

    __slots__ = ("after", "before", "held", "key", "order", "ranks", "texts")

    before: _HeldLine
    after: _HeldLine

    def __init__(self, key: tuple[int, bytes], rank: int, text: bytes) -> None:
        self.key = key  # the stream, and the line or its pattern
        self.ranks = [rank]
        self.texts = [text]  # one for each rank if only the pattern is equal
        self.order = 0.0  # larger than that of the row before
        self.held = True


class _Writing:
    """What is known about a rank."""

    __slots__ = ("anchor", "lines", "own", "second")

    def __init__(self) -> None:
        self.anchor: _HeldLine | None = None  # the last row that it shares with others
        self.own: deque[_HeldLine] = deque()  # the rows after that
        self.second = _NOWHERE  # when the second began in which it wrote so many lines
        self.lines = 0

    def place(self) -> float:
        """The order of the row after which its next one may stand."""
        return self.anchor.order if self.anchor is not None and self.anchor.held else _NOWHERE


class Fold:
    """The lines that are held. Lines of different streams are never folded."""

    def __init__(self, ranks: int, *, numbers: bool = False) -> None:
        """`ranks`: how many write here. `numbers`: also fold lines that differ only in numbers."""
        self._count = ranks
        self._numbers = numbers
        self._most_lines = max(_LEAST_LINES_A_SECOND, min(MOST_LINES_A_SECOND, _MOST_OF_ALL // ranks))
        self._end = _HeldLine((0, b""), -1, b"")  # stands before the first row and after the last
        self._end.before = self._end.after = self._end
        self._same: dict[tuple[int, bytes], list[_HeldLine]] = {}  # the rows by stream and key, in order
        self._ranks: dict[int, _Writing] = {}
        self._due: deque[tuple[float, _HeldLine]] = deque()  # a row, and when it and all before it must be shown

    def takes(self, rank: int, block: bytes, now: float) -> bool:
        """Whether to add these lines: not if the rank writes too much to be read."""
        writing = self._ranks.get(rank) or self._ranks.setdefault(rank, _Writing())
        if now - writing.second >= 1.0:
            writing.second, writing.lines = now, 0
        writing.lines += block.count(b"\n") + len(block) // _BYTES_A_LINE
        return writing.lines <= self._most_lines

    def add(self, rank: int, stream: int, lines: Sequence[bytes], now: float) -> list[FoldedLine]:
        """Add lines of a rank. Returns what need not wait any longer."""
        writing = self._ranks.get(rank) or self._ranks.setdefault(rank, _Writing())
        new: _HeldLine | None = None
        final: _HeldLine | None = None
        for line in lines:
            key = stream, (_NUMBER.sub(b"0", line) if self._numbers else line)
            same = self._same.get(key)
            row = self._equal(same, rank, writing) if same else None
            if row is None:
                new = _HeldLine(key, rank, line)
                new.order = self._end.before.order + 1.0
                self._link(new, self._end)
                if same:
                    same.append(new)
                else:
                    self._same[key] = [new]
                writing.own.append(new)
                continue
            self._join(row, rank, writing)
            if self._numbers:
                row.texts.append(line)
            if len(row.ranks) >= self._count:
                final = row
        if new is not None:
            self._due.append((now + HOLD_SECONDS, new))
        return self._until(final) if final is not None else []

    def until(self, rank: int) -> list[FoldedLine]:
        """Hold nothing of this rank any longer, nor what stands before that."""
        writing = self._ranks.get(rank)
        if writing is None:
            return []
        last = writing.own[-1] if writing.own else writing.anchor
        return self._until(last) if last is not None and last.held else []

    def tick(self, now: float) -> list[FoldedLine]:
        """What has been held long enough."""
        last: _HeldLine | None = None
        while self._due and self._due[0][0] <= now:
            row = self._due.popleft()[1]
            if row.held and (last is None or row.order > last.order):
                last = row
        return self._until(last) if last is not None else []

    def rest(self) -> list[FoldedLine]:
        """Hold nothing any longer."""
        return self._until(self._end.before) if self._end.before is not self._end else []

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to return."""
        while self._due and not self._due[0][1].held:
            self._due.popleft()
        return self._due[0][0] if self._due else None

    def _equal(self, same: list[_HeldLine], rank: int, writing: _Writing) -> _HeldLine | None:
        """The first of these rows that the rank may join."""
        place = writing.place()
        start = 0 if same[0].order > place else bisect_right(same, place, key=_ORDER)
        for row in same[start : start + _MOST_LOOKED_AT]:
            if row.ranks[0] != rank:
                return row
        return None

    def _join(self, row: _HeldLine, rank: int, writing: _Writing) -> None:
        owner = self._ranks[row.ranks[0]]
        if len(row.ranks) == 1 and row.order > owner.place():
            while owner.own.popleft() is not row:
                pass
            owner.anchor = row
        if writing.own and writing.own[-1].order > row.order:
            self._move([own for own in writing.own if own.order > row.order], row)
        writing.own.clear()
        writing.anchor = row
        row.ranks.append(rank)

    def _move(self, rows: list[_HeldLine], target: _HeldLine) -> None:
        """Move these rows in front of another one."""
        for row in rows:
            row.before.after, row.after.before = row.after, row.before
            self._link(row, target)
        before = rows[0].before
        low = before.order if before is not self._end else target.order - 1.0
        step = (target.order - low) / (len(rows) + 1)
        same = [self._same[row.key] for row in rows]
        for row, equal in zip(rows, same, strict=True):
            equal.remove(row)
        for number, row in enumerate(rows, start=1):
            row.order = low + number * step
        if not low < rows[0].order or not rows[-1].order < target.order or step < 1e-6:
            self._renumber()
        for row, equal in zip(rows, same, strict=True):
            insort(equal, row, key=_ORDER)

    def _renumber(self) -> None:
        row, order = self._end.after, 1.0
        while row is not self._end:
            row.order = order
            row, order = row.after, order + 1.0

    def _link(self, row: _HeldLine, target: _HeldLine) -> None:
        row.before, row.after = target.before, target
        row.before.after = target.before = row

    def _until(self, last: _HeldLine) -> list[FoldedLine]:
        """Take the rows from the first to this one out of the list."""
        found = []
        rest = last.after
        row = self._end.after
        while row is not rest:
            row.held = False
            same = self._same[row.key]
            if len(same) == 1:
                del self._same[row.key]
            else:
                del same[0]
            ranks = row.ranks
            if len(ranks) == 1:
                own = self._ranks[ranks[0]].own
                if own and own[0] is row:
                    own.popleft()
                found.append(FoldedLine(row.key[0], (ranks[0],), row.texts[0]))
            else:
                found.append(FoldedLine(row.key[0], tuple(sorted(ranks)), merged(row.texts)))
            after = row.after
            del row.before, row.after  # no cycles
            row = after
        self._end.after, rest.before = rest, self._end
        return found


def merged(texts: Sequence[bytes]) -> bytes:
    """One line for several that differ only in numbers: the smallest and the largest stand for all."""
    if len(texts) == 1 or len(set(texts)) == 1:
        return texts[0]
    between = _NUMBER.split(texts[0])
    columns = zip(*map(_NUMBER.findall, texts), strict=True)
    return b"".join(itertools.chain.from_iterable(zip(between, map(_span, columns), strict=False))) + between[-1]


def _span(numbers: Sequence[bytes]) -> bytes:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if low == high else low + "…".encode() + high


class FoldingDevice(Device):
    """A device on which equal lines of several ranks are one. Bars and unfinished lines are shown as ever."""

    def __init__(
        self,
        streams: int,
        columns: int | None,
        fold: Fold,
        prefix: Callable[[tuple[int, ...], int], tuple[bytes, int]],
    ) -> None:
        """`prefix` makes one for several ranks and a descriptor, and says how wide it is."""
        super().__init__(streams, columns)
        self._fold = fold
        self._prefix = prefix
        self._now = 0.0
        self._kept: deque[tuple[float, Any]] = deque()
        self._streams: dict[tuple[int, int], LineStream] = {}  # by rank and number

    def feed(self, stream: LineStream, data: bytes, now: float) -> list[tuple[int, bytes]]:
        """Add a stream's output; return what to write, and to which descriptor."""
        self._now = now
        return super().feed(stream, data, now)

    def note(self, text: bytes, fd: int) -> list[tuple[int, bytes]]:
        """Show a line of the launcher's own, after all that is held."""
        return self._folded(self._fold.rest()) + super().note(text, fd)

    @property
    def deadline(self) -> float | None:
        """The next time at which `tick` has something to show."""
        times = [time for time in (self._fold.deadline, super().deadline) if time is not None]
        return min(times, default=None)

    def keep(self, output: Any) -> None:
        """Keep what was fed last until it is shown."""
        self._kept.append((self._now, output))

    def done(self) -> list[Any]:
        """Of what was kept, what has been shown since the last call."""
        deadline = self._fold.deadline  # of a line that was written HOLD_SECONDS earlier: what came before is shown
        found = []
        while self._kept and (deadline is None or self._kept[0][0] + HOLD_SECONDS < deadline):
            found.append(self._kept.popleft()[1])
        return found

    def tick(self, now: float) -> list[tuple[int, bytes]]:
        """Show the lines that are due."""
        return self._folded(self._fold.tick(now)) + super().tick(now)

    def close(self, streams: list[LineStream]) -> list[tuple[int, bytes]]:
        """Show what is held, and end these streams."""
        return self._folded(self._fold.rest()) + super().close(streams)

    def _lines(self, stream: LineStream, block: bytes) -> list[tuple[int, bytes]]:
        if self._open is stream:  # it begins with the end of the open line
            return super()._lines(stream, block)
        if b"\r" in block or not self._fold.takes(stream.rank, block, self._now):
            return self._folded(self._fold.until(stream.rank)) + super()._lines(stream, block)
        self._streams[stream.rank, stream.number] = stream
        return self._folded(self._fold.add(stream.rank, stream.number, block[:-1].split(b"\n"), self._now))

    def _show(self, stream: LineStream, now: float) -> list[tuple[int, bytes]]:
        """Show an unfinished line, after all that is held: somebody may have to answer it."""
        return self._folded(self._fold.rest()) + super()._show(stream, now)

    def _folded(self, lines: list[FoldedLine]) -> list[tuple[int, bytes]]:
        out: list[tuple[int, bytes]] = []
        for (number, ranks), group in itertools.groupby(lines, key=lambda line: line[:2]):
            block = b"".join([line.text + b"\n" for line in group])
            out += super()._lines(self._stream(number, ranks), block)
        return out

    def _stream(self, number: int, ranks: tuple[int, ...]) -> LineStream:
        first = self._streams[ranks[0], number]
        if len(ranks) == 1:
            return first
        return LineStream(first.fd, *self._prefix(ranks, first.fd))
