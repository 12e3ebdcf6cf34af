"""The journal: a sink that records a job as it happens, so that it can be told again, also when launchpad was killed.

In the job's folder: events.jsonl, a line for each event; the ranks' output, attempt_N/RANK/{stdout,stderr}.log; after a
failure verdict.json. A thread of its own writes, and the job never waits for it: what a disk does not take in time, and
of each stream what lies between its beginning and its end, is left out and marked.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.events import STDOUT, LogFailed, Output, RanksSpawned, Restarted
from launchpad.job.plan import Plan
from launchpad.report import shelf
from launchpad.report.records import line_of

if TYPE_CHECKING:
    from launchpad.report.files import Files
    from launchpad.report.story import Story
    from launchpad.report.verdict import Verdict

# All streams together have so much room for their beginnings, each at most the latter; its end has as much again, in
# segments of which the oldest are removed.
HEAD_BYTES = 64 << 20
LARGEST_HEAD = 1 << 20
LEAST_HEAD = 16 << 10
SEGMENTS = 4

# What comes behind the beginning is written so often, in seconds.
FLUSH_SECONDS = 1.0

# So much may wait for the disk before output is left out.
MOST_WAITING = 8 << 20

# So many pieces of output are recorded with their order among all ranks'; of later ones only that in their stream is.
MOST_PLACES = 50_000

# A job that has written more makes room for the next.
LARGE_BYTES = 8 << 20

CLOSE_SECONDS = 3.0

_NAMES = {STDOUT: "stdout", 2: "stderr"}


class _Stream:
    """One rank's stdout or stderr in this attempt."""

    __slots__ = ("elsewhere", "folder", "left_out", "name", "over", "pending", "size", "waiting")

    def __init__(self, folder: str, name: str, elsewhere: bool) -> None:
        self.folder = folder
        self.name = name
        self.elsewhere = elsewhere  # the whole of it is kept by --log-dir, --tee, --redirects
        self.size = 0  # bytes in its file
        self.over = False  # its beginning is complete
        self.pending: list[bytes] = []  # of its end, to be written at the next flush
        self.waiting = 0  # bytes of these
        self.left_out = 0


class _Piece(NamedTuple):
    """Bytes for a file; segment: the end of a stream, which is kept in several."""

    path: str
    data: bytes
    segment: bool = False


class Journal:
    """A sink. `folder` is "" where no record can be kept, which is said once and ends nothing."""

    def __init__(
        self,
        job: str,
        plan: Plan,
        files: Files | None,
        say: Callable[[str], None],
        post: Callable[[Any], None],
        environ: Mapping[str, str],
    ) -> None:
        """`files`: the sink that keeps whole streams, in a folder that is the job's then."""
        self.folder = ""
        self._job = job
        self._plan = plan
        self._files = files
        self._post = post
        self._environ = environ
        self._attempt = 0
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._head = max(LEAST_HEAD, min(LARGEST_HEAD, HEAD_BYTES // (2 * len(plan.ranks))))
        self._places = 0
        self._flush_at: float | None = None
        self._put_bytes = self._done_bytes = 0  # each counted by one thread only
        self._broken = False
        several = len(plan.nodes) > 1
        self._numbers = {rank.rank: rank.rank if several else rank.local_rank for rank in plan.ranks}
        try:
            folder = files.folder if files else shelf.make_folder(environ, job)
            self._lock = os.open(os.path.join(folder, shelf.EVENTS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            where = error.filename or shelf.jobs_folder(environ)
            say(
                f"no record of this job is kept: {where}: {error.strerror}; set XDG_STATE_HOME to a folder that can "
                "be written to"
            )
            self._broken = True
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if files:
                shelf.link_folder(environ, job, folder)
        except OSError:  # a file system without locks; a state folder that can't be written to
            pass
        self.folder = folder
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_Scribe(self._queue, self._lock, folder, self).run, daemon=True)
        self._thread.start()

    def on(self, event: Any) -> bool:
        """Record an event."""
        if self._broken:
            return False
        if type(event) is Output:
            self._output(event)
            return False
        line = line_of(event)
        if line is not None:
            self._put(_Piece("", line.encode() + b"\n"))
        if type(event) is Restarted:
            self._flush()
            self._attempt = event.attempt
            self._streams.clear()
        elif type(event) is RanksSpawned:
            self._numbers.update((rank, rank) for rank in event.ranks)
        return False

    def _output(self, event: Output) -> None:
        if event.stream not in _NAMES:  # a result
            return
        key = (event.rank, event.stream)
        if self._files is not None and not self._files.keeps(*key):
            return  # the user has chosen what is kept
        stream = self._streams.get(key)
        if stream is None:
            folder = os.path.join(f"attempt_{self._attempt}", str(self._numbers.get(event.rank, event.rank)))
            stream = self._streams[key] = _Stream(folder, _NAMES[event.stream], elsewhere=self._files is not None)
        size = len(event.data)
        if not stream.elsewhere:
            full = self._put_bytes - self._done_bytes > MOST_WAITING
            if stream.over or stream.size + size > self._head or full:
                self._keep_end(stream, event.data)
                return
        if self._places < MOST_PLACES:
            self._places += 1
            self._put(
                _Piece(
                    "",
                    b'{"event": "Output", "time": %d, "rank": %d, "stream": %d, "file": "%s/%s.log", "offset": %d, '
                    b'"length": %d}\n'
                    % (event.time, *key, stream.folder.encode(), stream.name.encode(), stream.size, size),
                )
            )
        if not stream.elsewhere:
            self._put(_Piece(f"{stream.folder}/{stream.name}.log", event.data))
        stream.size += size

    def _keep_end(self, stream: _Stream, data: bytes) -> None:
        most = self._head // SEGMENTS
        stream.over = True
        if len(data) > most:
            stream.left_out += len(data) - most
            data = data[-most:]
        stream.pending.append(data)
        stream.waiting += len(data)
        while stream.waiting > most:
            first = stream.pending.pop(0)
            stream.waiting -= len(first)
            stream.left_out += len(first)
        if self._flush_at is None:
            self._flush_at = time.monotonic() + FLUSH_SECONDS

    def _flush(self) -> None:
        self._flush_at = None
        for stream in self._streams.values():
            if not stream.pending or self._put_bytes - self._done_bytes > MOST_WAITING:
                continue
            mark = (
                b"\n\xe2\x80\xa6 %d bytes are left out here \xe2\x80\xa6\n" % stream.left_out
                if stream.left_out
                else b""
            )
            self._put(_Piece(f"{stream.folder}/{stream.name}", mark + b"".join(stream.pending), segment=True))
            stream.pending, stream.waiting, stream.left_out = [], 0, 0

    def _put(self, piece: _Piece) -> None:
        self._put_bytes += len(piece.data)
        self._queue.put(piece)

    @property
    def deadline(self) -> float | None:
        """When the ends of streams are to be written."""
        return self._flush_at

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Write them."""
        self._flush()

    def conclude(self, story: Story, verdict: Verdict, lines: list[str], history: Sequence[str]) -> None:
        """Keep the verdict on a job that failed."""
        from launchpad.report.conclusion import as_json

        if not self._broken:
            text = json.dumps(as_json(story, verdict, lines, history), indent=1)
            self._put(_Piece(shelf.VERDICT, text.encode(errors="backslashreplace") + b"\n"))

    def close(self) -> None:
        """Write all that is left, unless that takes long: nobody is to wait for a disk that does not answer."""
        if self._broken:
            return
        self._flush()
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    # Called by the thread that writes.

    def done(self, size: int) -> None:
        """So many bytes are dealt with."""
        self._done_bytes += size

    def failed(self, path: str, error: OSError) -> None:
        """The record ends here."""
        self._broken = True
        self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))

    def make_room(self, written: int) -> None:
        """Remove old jobs."""
        shelf.prune(self._environ, by_size=written > LARGE_BYTES)

    @property
    def segment_bytes(self) -> int:
        """How large a segment of a stream's end may be."""
        return self._head // SEGMENTS


class _Scribe:
    """The thread's own part: it opens, writes and removes files."""

    def __init__(self, pieces: queue.SimpleQueue[_Piece | None], events: int, folder: str, journal: Journal) -> None:
        self._pieces = pieces
        self._folder = folder
        self._journal = journal
        self._fds: dict[str, int] = {"": events}
        self._segments: dict[str, list[int]] = {}  # by stream: the number of its segment, bytes in that
        self._written = 0

    def run(self) -> None:
        """Write what comes until None does, or until it can't be written."""
        try:
            self._run()
        finally:
            while self._fds:  # the lock with them: who asks sees that the job is over
                os.close(self._fds.popitem()[1])

    def _run(self) -> None:
        self._journal.make_room(0)
        while (piece := self._pieces.get()) is not None:
            try:
                self._write(piece)
            except OSError as error:
                self._journal.failed(os.path.join(self._folder, piece.path or shelf.EVENTS), error)
                return
            self._journal.done(len(piece.data))
        if self._written > LARGE_BYTES:
            self._journal.make_room(self._written)

    def _write(self, piece: _Piece) -> None:
        fd = self._segment(piece) if piece.segment else self._open(piece.path)
        view = memoryview(piece.data)
        while view:
            view = view[os.write(fd, view) :]
        self._written += len(piece.data)

    def _open(self, path: str) -> int:
        fd = self._fds.get(path)
        if fd is None:
            whole = os.path.join(self._folder, path)
            os.makedirs(os.path.dirname(whole), mode=0o700, exist_ok=True)
            fd = self._fds[path] = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return fd

    def _segment(self, piece: _Piece) -> int:
        state = self._segments.setdefault(piece.path, [1, 0])
        if state[1] and state[1] + len(piece.data) > self._journal.segment_bytes:
            os.close(self._fds.pop(f"{piece.path}.{state[0]}.log"))
            state[:] = [state[0] + 1, 0]
            try:
                os.unlink(os.path.join(self._folder, f"{piece.path}.{state[0] - SEGMENTS}.log"))
            except FileNotFoundError:
                pass
        state[1] += len(piece.data)
        return self._open(f"{piece.path}.{state[0]}.log")
