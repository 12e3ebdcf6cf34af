"""Packs the recorded output of a job's ranks for the page: whole lines, each with its rank, stream, attempt and time.

A chunk is compressed text: a line of JSON with its runs, [lines, attempt, rank, stream, milliseconds or -1] each, and
then the lines.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from launchpad.diagnosis import escapes
from launchpad.protocol.events import JobPlanned, Output, Restarted
from launchpad.record import replay
from launchpad.record.attempts import NONE, Passed
from launchpad.report.timeline import JOB, Curve

# A chunk's size before compression: what the browser reads at a time.
CHUNK_BYTES = 1 << 20

# A line that never ends is cut into pieces of this size.
LONGEST_LINE = 1 << 20

# How much of each rank's last output is shown without scripts.
TAIL_BYTES = 6000

# How finely lines are counted, in ns.
TICK_NS = 50_000_000


@dataclass
class PackedOutput:
    """The output of all ranks."""

    chunks: list[str] = field(default_factory=list)
    lines: int = 0
    tails: dict[int, bytes] = field(default_factory=dict)  # by rank: its last lines
    ticks: Counter[int] = field(default_factory=Counter)  # lines, by time in ticks


def pack(folder: str, passed: Passed = NONE) -> PackedOutput:
    """Pack what is recorded in this folder, but for the attempts that are passed over."""
    packer = _Packer()
    for event in passed.events:
        if isinstance(event, JobPlanned | Restarted):
            packer.on(event)
    reader = replay.OutputReader(folder, None, passed=passed)
    try:
        for events in (reader.more(), reader.rest()):
            for event in events:
                packer.on(event)
    finally:
        reader.close()
    packer.end_attempt()
    packer.end_chunk()
    return packer.packed


class _Packer:
    def __init__(self) -> None:
        self.packed = PackedOutput()
        self._start = 0
        self._attempt = 0
        self._held: dict[tuple[int, int], bytes] = {}
        self._runs: list[list[int]] = []
        self._blocks: list[bytes] = []
        self._size = 0

    def on(self, event: Any) -> None:
        if isinstance(event, JobPlanned):
            self._start = event.time
        elif isinstance(event, Restarted):
            self.end_attempt()
            self._attempt = event.attempt
            self.packed.tails.clear()
        elif isinstance(event, Output):
            key = (event.rank, event.stream)
            whole, newline, rest = (self._held.pop(key, b"") + event.data).rpartition(b"\n")
            if len(rest) > LONGEST_LINE:
                whole, newline, rest = whole + newline + rest, b"\n", b""
            if rest:
                self._held[key] = rest
            if newline:
                self._add(whole + newline, *key, event.time)

    def _add(self, block: bytes, rank: int, stream: int, time: int) -> None:
        block = cleaned(block)
        count = block.count(b"\n")
        since = max(0, time - self._start) if time else -1
        packed = self.packed
        packed.lines += count
        packed.tails[rank] = (packed.tails.get(rank, b"") + block[-TAIL_BYTES:])[-TAIL_BYTES:]
        if since >= 0:
            packed.ticks[since // TICK_NS] += count
        run = [count, self._attempt, rank, stream, since // 1_000_000 if since >= 0 else -1]
        if self._runs and self._runs[-1][1:] == run[1:]:
            self._runs[-1][0] += count
        else:
            self._runs.append(run)
        self._blocks.append(block)
        self._size += len(block)
        if self._size >= CHUNK_BYTES:
            self.end_chunk()

    def end_attempt(self) -> None:
        """End the lines that have no newline."""
        for key, rest in self._held.items():
            self._add(rest + b"\n", *key, 0)
        self._held.clear()

    def end_chunk(self) -> None:
        """Compress what has come together."""
        if self._runs:
            text = json.dumps(self._runs, separators=(",", ":")).encode() + b"\n" + b"".join(self._blocks)
            self.packed.chunks.append(base64.b64encode(zlib.compress(text)).decode())
        self._runs, self._blocks, self._size = [], [], 0


def cleaned(block: bytes) -> bytes:
    """Lines as a terminal would leave them: without escape sequences, of a redrawn line the last state."""
    block = escapes.removed(block)
    if b"\r" in block:
        block = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in block.split(b"\n"))
    return block


def lines_per_second(packed: PackedOutput) -> list[Curve]:
    """How much was printed, as far as it is known when; in at most 300 steps."""
    if not packed.ticks:
        return []
    first, last = min(packed.ticks), max(packed.ticks)
    step = max(1, -(-(last - first + 1) // 300))
    counts: Counter[int] = Counter()
    for tick, count in packed.ticks.items():
        counts[(tick - first) // step] += count
    steps = (last - first) // step + 1
    points = [((first + n * step) * TICK_NS, counts[n] * 1e9 / (step * TICK_NS)) for n in range(steps)]
    points.append(((first + steps * step) * TICK_NS, 0.0))
    return [Curve("lines", "lines/s", {JOB: tuple(points)})]
