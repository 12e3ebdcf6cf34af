"""Writes the ranks' lines to the caller's sys.stdout and sys.stderr, in the thread that has called the ranks.

These may have no descriptors: in a notebook, under pytest's capture, or with contextlib.redirect_stdout.
"""

from __future__ import annotations

import codecs
import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TextIO

from launchpad.console.lines import Device, LineStream
from launchpad.console.message import message_line
from launchpad.console.prefix import encoded, prefixes, template_of, torch_mark
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.protocol.events import STDERR, STDOUT, ConsoleClosed, Fenced, Output, RanksSpawned, Written

_Pieces = list[tuple[int, bytes]]
_Item = tuple[_Pieces, Output | None] | Callable[[], None]
_Items = queue.SimpleQueue[_Item | None]

# A Ctrl-C between the interpreter's last look for signals and the system call that waits is handled when that returns.
_SIGNAL_SECONDS = 0.5


def _next(items: _Items) -> _Item | None:
    """Wait for the next item in the main thread."""
    while True:
        try:
            return items.get(timeout=_SIGNAL_SECONDS)
        except queue.Empty:
            pass


class Screen:
    """A sink for the head's thread; `show` writes what it receives in the caller's thread, until `close`."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self.post: Callable[[Any], None]  # sends an event to the job's loop; set before the loop begins
        self.failure: Exception | None = None  # of the first failed write
        self._files = {STDOUT: stdout, STDERR: stderr}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in self._files}
        self._queue: _Items = queue.SimpleQueue()
        self._devices: dict[int, Device] = {}
        self._streams: dict[tuple[int, int], LineStream] = {}

    def open(self, plan: Plan, spec: JobSpec) -> None:
        """Prepare for the plan's ranks."""
        same = self._files[STDOUT] is self._files[STDERR] or all(_is_terminal(file) for file in self._files.values())
        count = len(plan.ranks)
        self._devices[STDOUT] = Device(2 * count if same else count, None)
        self._devices[STDERR] = self._devices[STDOUT] if same else Device(count, None)
        self._template = template_of(spec.line_prefix, spec.role)
        self._prefix = prefixes(plan.by_node, self._template, roles=plan.roles)
        for place, node in enumerate(plan.nodes):
            for rank in node.ranks:
                self._add(place, rank.rank, rank.local_rank)

    def _add(self, node: int, rank: int, local_rank: int) -> None:
        prefix = self._prefix(node, rank, local_rank).text
        for fd in self._files:
            self._streams[rank, fd] = LineStream(
                fd, encoded(prefix), len(prefix), rank, mark=torch_mark(rank, fd, self._template)
            )

    def on(self, event: Any) -> bool:
        """Queue what a rank has printed. Returns True if it will be written later."""
        if type(event) is RanksSpawned:
            for rank in event.ranks:
                self._add(event.node, rank, rank)
        if type(event) is not Output or (event.rank, event.stream) not in self._streams:
            return False
        stream = self._streams[event.rank, event.stream]
        pieces = self._devices[event.stream].feed(stream, event.data, time.monotonic())
        if pieces:
            self._put((pieces, event))
        return bool(pieces)

    def _put(self, item: _Item | None) -> None:
        self._queue.put(item)

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show a message of launchpad's own."""
        note = "\n".join([message_line(line, colour=False, bad=bad) for line in text.split("\n")]).encode()
        self._put((self._devices[STDERR].note(note, STDERR), None))

    @property
    def deadline(self) -> float | None:
        """When the next unfinished line is due."""
        return min((one.deadline for one in self._devices.values() if one.deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Show the unfinished lines that are due."""
        for device in self._devices.values():
            if pieces := device.tick(now):
                self._put((pieces, None))

    def _end_lines(self) -> None:
        for fd, device in self._devices.items():
            self._put((device.close([one for one in self._streams.values() if one.fd == fd]), None))

    def close(self) -> None:
        """End the unfinished lines, and make `show` return after everything is written."""
        self._end_lines()
        self._put(None)

    def show(self) -> None:
        """Write what is queued until `close`."""
        while (item := _next(self._queue)) is not None:
            self._take(item, self._files)

    def _take(self, item: _Item, files: dict[int, TextIO]) -> None:
        if not isinstance(item, tuple):
            item()
            return
        pieces, output = item
        for fd in dict.fromkeys(fd for fd, _ in pieces):
            self._write(fd, files.get(fd), b"".join(data for where, data in pieces if where == fd))
        if output is not None:
            self.post(Written(output))

    def _write(self, fd: int, file: TextIO | None, data: bytes) -> None:
        text = self._decoders[fd].decode(data)
        if file is None:  # the interpreter was started with this stream closed
            return
        try:
            try:
                file.write(text)
            except UnicodeEncodeError:
                encoding = getattr(file, "encoding", None) or "ascii"
                file.write(text.encode(encoding, "backslashreplace").decode(encoding))
            getattr(file, "flush", lambda: None)()  # print() needs none
        except Exception as error:  # it was closed, or is the caller's own and fails
            if self.failure is None and fd == STDOUT:
                self.failure = error
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        self.post(ConsoleClosed(time.monotonic_ns(), str(error)))


class SessionScreen(Screen):
    """The screen of ranks that stay: what they print while a call runs is written by a thread that waits for it.

    The rest is written by a thread of our own, to what sys.stdout and sys.stderr are then. All take from one queue, one
    at a time, so nothing overtakes what was printed before it.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stderr)
        self._fences = 0
        self._turn = threading.Condition()
        self._items: deque[_Item | None] = deque()
        self._writes: object = None  # who is writing the item that came before the first one here
        self._closed = False
        self._callers: dict[object, threading.Thread] = {}  # those that take what comes
        self._released = False  # one of them never comes back to it
        self.thread = threading.Thread(target=self.show, name="launchpad-screen", daemon=True)
        self.thread.start()

    def _put(self, item: _Item | None) -> None:
        with self._turn:
            self._items.append(item)
            self._closed = self._closed or item is None
            self._turn.notify_all()

    def on(self, event: Any) -> bool:
        """Queue what a rank has printed; at the end of a call, its unfinished lines."""
        if type(event) is Fenced:
            self._fences -= 1
            if not self._fences:  # until then other nodes may have the rest of a line
                self._end_lines()
        return super().on(event)

    def expect(self, fences: int) -> None:
        """A call has ended; so many nodes will say Fenced when its output is here."""
        self._fences = fences

    def after(self, action: Callable[[], None]) -> None:
        """Have a thread that writes do this after all that is queued; do it here if they are about to end."""
        with self._turn:
            closed = self._closed
            if not closed:
                self._put(action)
        if closed:
            action()

    def show(self) -> None:
        """Write what comes while no thread waits for a call, until `close`."""
        while True:
            with self._turn:
                while not self._items or (self._items[0] is not None and self._is_others):
                    self._turn.wait()
                item = self._items[0]
                if item is None:
                    return
                self._begin(item, self)
            self._do(item, _files())

    @property
    def _is_others(self) -> bool:
        """Whether the next item is for another thread than ours."""
        return not self._released and (self._writes is not None or bool(self._callers))

    def show_until(self, call: futures.Future[Any]) -> None:
        """Write what comes until the call has ended, and what has come by then."""
        files, ended, own = _files(), threading.Event(), object()
        call.add_done_callback(lambda _: self._put(ended.set))
        try:
            self._callers[own] = threading.current_thread()
            while (item := self._next_until(ended, call, own)) is not None:
                if isinstance(item, tuple):
                    self._do(item, files)
                    continue
                del self._callers[own]  # others write meanwhile: callbacks of futures may take long, or close the ranks
                self._do(item, files)
                self._callers[own] = threading.current_thread()
        finally:
            self._callers.pop(own, None)
            with self._turn:
                if self._writes is own:  # a signal handler has raised
                    self._writes = None
                self._turn.notify_all()

    def _next_until(self, ended: threading.Event, call: futures.Future[Any], own: object) -> _Item | None:
        with self._turn:
            while not ended.is_set():
                if self._items and self._writes is None:
                    item = self._items[0]
                    if item is not None:
                        self._begin(item, own)
                        return item
                    if call.done():
                        return None
                self._turn.wait(_SIGNAL_SECONDS)
            return None

    def _begin(self, item: _Item, own: object) -> None:
        self._items.popleft()
        self._writes = own if isinstance(item, tuple) else None

    def _do(self, item: _Item, files: dict[int, TextIO]) -> None:
        try:
            self._take(item, files)
        finally:
            with self._turn:
                if isinstance(item, tuple):
                    self._writes = None
                self._turn.notify_all()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """If this thread is amid `show_until`, in a signal handler, others are to go on without it."""
        with self._turn:
            self._released = self._released or threading.current_thread() in self._callers.values()
            self._turn.notify_all()
        held = 0
        with contextlib.suppress(RuntimeError):  # it is not ours, or not any more
            while True:
                self._turn.release()
                held += 1
        try:
            yield
        finally:
            for _ in range(held):
                self._turn.acquire()

    def _lost(self, error: Exception) -> None:
        """Go on without the output: the ranks are still wanted."""


def _files() -> dict[int, TextIO]:
    return {STDOUT: sys.stdout, STDERR: sys.stderr}


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):
        return False
