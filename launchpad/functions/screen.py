"""The ranks' lines, written to the caller's own sys.stdout and sys.stderr, in the caller's own thread.

They need be no descriptors: in a notebook, under pytest's capture and contextlib.redirect_stdout they are objects.
"""

from __future__ import annotations

import codecs
import queue
import time
from collections.abc import Callable
from typing import Any, TextIO

from launchpad.events import STDERR, STDOUT, ConsoleClosed, Output, Written
from launchpad.job.plan import Plan
from launchpad.report.console import labels
from launchpad.report.lines import Device, Stream

_Pieces = list[tuple[int, bytes]]


class Screen:
    """A sink, on one side; on the other `show`, which writes what it was given until it is closed."""

    def __init__(self, stdout: TextIO, stderr: TextIO, post: Callable[[Any], None]) -> None:
        """`post` takes what the job's loop is to know."""
        self.failure: Exception | None = None  # of a write
        self._files = {STDOUT: stdout, STDERR: stderr}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in self._files}
        self._post = post
        self._queue: queue.SimpleQueue[tuple[_Pieces, Output | None] | None] = queue.SimpleQueue()
        self._devices: dict[int, Device] = {}
        self._streams: dict[tuple[int, int], Stream] = {}

    def open(self, plan: Plan) -> None:
        """These are the ranks."""
        same = self._files[STDOUT] is self._files[STDERR] or all(_is_terminal(file) for file in self._files.values())
        count = len(plan.ranks)
        self._devices[STDOUT] = Device(2 * count if same else count, None)
        self._devices[STDERR] = self._devices[STDOUT] if same else Device(count, None)
        label = labels(plan)
        for place, node in enumerate(plan.nodes):
            for rank in node.ranks:
                prefix = f"{label(place, rank.rank)} "
                for fd in self._files:
                    self._streams[rank.rank, fd] = Stream(fd, prefix.encode(), len(prefix))

    def on(self, event: Any) -> bool:
        """Take what a rank has printed; True where it is still to be written."""
        if type(event) is not Output or (event.rank, event.stream) not in self._streams:
            return False
        stream = self._streams[event.rank, event.stream]
        pieces = self._devices[event.stream].feed(stream, event.data, time.monotonic())
        if pieces:
            self._queue.put((pieces, event))
        return bool(pieces)

    def say(self, text: str) -> None:
        """A note of launchpad's own."""
        for line in text.splitlines():
            note = f"launchpad: {line}".encode(errors="surrogateescape")
            self._queue.put((self._devices[STDERR].note(note, STDERR), None))

    @property
    def deadline(self) -> float | None:
        """When an unfinished line is to be shown."""
        return min((one.deadline for one in self._devices.values() if one.deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Show the unfinished lines whose moment has come."""
        for device in self._devices.values():
            if pieces := device.tick(now):
                self._queue.put((pieces, None))

    def close(self) -> None:
        """Nothing more will come: end the lines that are unfinished, and let `show` return."""
        for fd, device in self._devices.items():
            self._queue.put((device.close([one for one in self._streams.values() if one.fd == fd]), None))
        self._queue.put(None)

    def show(self) -> None:
        """Write what comes until `close`."""
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
