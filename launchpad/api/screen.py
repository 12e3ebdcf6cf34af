"""Writes the ranks' lines to the caller's sys.stdout and sys.stderr, in the caller's thread.

These may have no descriptors: in a notebook, under pytest's capture, or with contextlib.redirect_stdout.
"""

from __future__ import annotations

import codecs
import queue
import time
from collections.abc import Callable
from typing import Any, TextIO

from launchpad.console.console import labels
from launchpad.console.lines import Device, LineStream
from launchpad.job.plan import Plan
from launchpad.protocol.events import STDERR, STDOUT, ConsoleClosed, Output, RanksSpawned, Written

_Pieces = list[tuple[int, bytes]]


class Screen:
    """A sink for the head's thread; `show` writes what it receives in the caller's thread, until `close`."""

    def __init__(self, stdout: TextIO, stderr: TextIO, post: Callable[[Any], None]) -> None:
        """`post` sends an event to the job's loop."""
        self.failure: Exception | None = None  # of the first failed write
        self._files = {STDOUT: stdout, STDERR: stderr}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in self._files}
        self._post = post
        self._queue: queue.SimpleQueue[tuple[_Pieces, Output | None] | None] = queue.SimpleQueue()
        self._devices: dict[int, Device] = {}
        self._streams: dict[tuple[int, int], LineStream] = {}

    def open(self, plan: Plan) -> None:
        """Prepare for the plan's ranks."""
        same = self._files[STDOUT] is self._files[STDERR] or all(_is_terminal(file) for file in self._files.values())
        count = len(plan.ranks)
        self._devices[STDOUT] = Device(2 * count if same else count, None)
        self._devices[STDERR] = self._devices[STDOUT] if same else Device(count, None)
        self._label = labels([node.name for node in plan.nodes], plan.world_size)
        for place, node in enumerate(plan.nodes):
            for rank in node.ranks:
                self._add(rank.rank, place)

    def _add(self, rank: int, node: int) -> None:
        prefix = f"{self._label(node, rank)} "
        for fd in self._files:
            self._streams[rank, fd] = LineStream(fd, prefix.encode(), len(prefix))

    def on(self, event: Any) -> bool:
        """Queue what a rank has printed. Returns True if it will be written later."""
        if type(event) is RanksSpawned:
            for rank in event.ranks:
                self._add(rank, event.node)
        if type(event) is not Output or (event.rank, event.stream) not in self._streams:
            return False
        stream = self._streams[event.rank, event.stream]
        pieces = self._devices[event.stream].feed(stream, event.data, time.monotonic())
        if pieces:
            self._queue.put((pieces, event))
        return bool(pieces)

    def say(self, text: str) -> None:
        """Show a message of launchpad's own."""
        for line in text.splitlines():
            note = f"launchpad: {line}".encode(errors="surrogateescape")
            self._queue.put((self._devices[STDERR].note(note, STDERR), None))

    @property
    def deadline(self) -> float | None:
        """When the next unfinished line is due."""
        return min((one.deadline for one in self._devices.values() if one.deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Show the unfinished lines that are due."""
        for device in self._devices.values():
            if pieces := device.tick(now):
                self._queue.put((pieces, None))

    def close(self) -> None:
        """End the unfinished lines, and make `show` return after everything is written."""
        for fd, device in self._devices.items():
            self._queue.put((device.close([one for one in self._streams.values() if one.fd == fd]), None))
        self._queue.put(None)

    def show(self) -> None:
        """Write what is queued until `close`."""
        while (item := self._queue.get()) is not None:
            pieces, output = item
            for fd in dict.fromkeys(fd for fd, _ in pieces):
                self._write(fd, b"".join(data for where, data in pieces if where == fd))
            if output is not None:
                self._post(Written(output))

    def _write(self, fd: int, data: bytes) -> None:
        text = self._decoders[fd].decode(data)
        file = self._files[fd]
        try:
            try:
                file.write(text)
            except UnicodeEncodeError:
                encoding = getattr(file, "encoding", None) or "ascii"
                file.write(text.encode(encoding, "backslashreplace").decode(encoding))
            file.flush()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            if self.failure is None and fd == STDOUT:
                self.failure = error
                self._post(ConsoleClosed(time.monotonic_ns(), str(error)))


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):
        return False
