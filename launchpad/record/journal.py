"""The journal: a sink that records a job as it happens, so that it can be replayed even if launchpad was killed.

The job's folder holds events.jsonl, with a line per event; samples.jsonl, with what the ranks used now and then; their
output, attempt_N/RANK/{stdout,stderr}.log; what it is run with, job.json; and after a failure verdict.json. The journal
writes in its own thread, and the job never waits for it: output that the disk does not take in time is left out and
marked, and so is the middle of a long stream. If a stream's file can't be written, that stream is given up; if
events.jsonl can't be written, the record ends. Each is reported once.
"""

import fcntl
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad import linux
from launchpad.job.plan import Plan
from launchpad.named import NamedTuple
from launchpad.output.mark import Resumed, SinkMark
from launchpad.output.writer import OpenFiles
from launchpad.protocol.events import STDOUT, LogFailed, Output, RanksSpawned, RankStarted, Restarted, Sampled
from launchpad.record import files, job_store
from launchpad.record.event_lines import line_of

if TYPE_CHECKING:
    from launchpad.diagnosis.history import History
    from launchpad.diagnosis.verdict import Verdict
    from launchpad.record.log_dir import Files

# The most to keep of the beginnings of all streams, and the limits for one stream's share of it. The end of a stream
# gets as much again, in segments, of which the oldest are removed.
HEAD_BYTES = 64 << 20
LARGEST_HEAD = 1 << 20
LEAST_HEAD = 16 << 10
SEGMENTS = 4

# How often the ends of streams are written, in seconds.
FLUSH_SECONDS = 1.0

# If more than this is waiting for the disk, output is left out.
MOST_WAITING = 8 << 20

# For this many pieces of output the order among all ranks is recorded; for later ones only that in their stream.
MOST_PLACES = 50_000

# A job that has written more than this prunes the job store at its end.
LARGE_BYTES = 8 << 20

CLOSE_SECONDS = 3.0

# More of a line that is not complete is not shown again.
LONGEST_LINE = 64 << 10

_NAMES = {STDOUT: "stdout", 2: "stderr"}


class _StreamRecord:
    """One rank's stdout or stderr in this attempt."""

    __slots__ = ("elsewhere", "folder", "left_out", "name", "over", "pending", "size", "waiting")

    def __init__(self, folder: str, name: str, elsewhere: bool) -> None:
        self.folder = folder
        self.name = name
        self.elsewhere = elsewhere  # --log-dir, --tee or --redirects keeps all of it
        self.size = 0  # bytes in its file
        self.over = False  # its beginning is full
        self.pending: list[bytes] = []  # the end, to be written at the next flush
        self.waiting = 0  # bytes pending
        self.left_out = 0


class JournalState(NamedTuple):
    """What the journal needs to go on from a mark."""

    attempt: int
    streams: dict[tuple[int, int], tuple[str, str, bool, int, bool]]  # those of _StreamRecord, without what is pending
    places: int
    joined: set[int]
    folders: dict[int, str]


def unfinished(resumed: Resumed) -> Iterator[Output]:
    """Of each stream that ends amid a line in this record, the beginning of that line."""
    journal: JournalState = resumed.states["journal"]
    for (rank, stream), (folder, name, _, size, over) in journal.streams.items():
        path = f"{folder}/{name}"
        number, end = resumed.states["segments"].get(path, (0, 0)) if over else (0, size)
        path = f"{path}.{number}.log" if number else f"{path}.log"
        line = files.read(resumed.folder, path, max(0, end - LONGEST_LINE), LONGEST_LINE).rpartition(b"\n")[2]
        if line:
            yield Output(0, rank, stream, line)


class _Write(NamedTuple):
    """Bytes for a file. `segment`: they belong to the end of a stream, which is kept in segments."""

    path: str
    data: bytes
    segment: bool = False


class _Remove(NamedTuple):
    """A folder that is not to be kept."""

    path: str
    data: bytes = b""


class _Marked(NamedTuple):
    """Everything before it has to be on its way to the disk."""

    mark: SinkMark
    path: str = ""
    data: bytes = b""


_Piece = _Write | _Remove | _Marked


class Journal:
    """The sink. `folder` is "" if no record can be kept; that is reported once, and the job runs on."""

    def __init__(
        self,
        job: str,
        plan: Plan,
        files: "Files | None",
        say: Callable[[str], None],
        post: Callable[[Any], None],
        environ: Mapping[str, str],
        resumed: Resumed | None = None,
    ) -> None:
        """`files`: the sink that keeps whole streams; its folder is then the job's.

        `resumed`: where to go on.
        """
        self.folder = ""
        self._job = job
        self._files = files
        self._post = post
        self._environ = environ
        self._attempt = 0
        self._streams: dict[tuple[int, int], _StreamRecord] = {}
        self._head_bytes = max(LEAST_HEAD, min(LARGEST_HEAD, HEAD_BYTES // (2 * len(plan.ranks))))
        self._places = 0
        self._flush_at: float | None = None
        self._put_bytes = self._done_bytes = 0  # each is written by one thread only
        self._broken = False
        self._lock = -1
        self._joined = {rank.rank for node in plan.nodes if node.shown_there for rank in node.ranks}
        self._folders = job_store.rank_folders(plan)
        try:
            if resumed is not None:
                folder = resumed.folder
            else:
                folder = files.folder if files else job_store.make_folder(environ, job)
            self._lock = os.open(os.path.join(folder, job_store.EVENTS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            where = error.filename or job_store.jobs_folder(environ)
            say(f"no record of this job is kept: {where}: {error.strerror}; set XDG_STATE_HOME to a writable folder")
            self._broken = True
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if files and resumed is None:
                job_store.link_folder(environ, job, folder)
        except OSError:  # a file system without locks, or a read-only state folder
            pass
        self.folder = folder
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._plan = plan
        self._told = resumed is not None  # what the job is run with has been written
        segments: dict[str, list[int]] = {}  # by stream: number of the current segment, bytes in it
        if resumed is not None:
            self._restore(resumed.states["journal"])
            segments = resumed.states["segments"]
        writer = _JournalWriter(self._queue, os.dup(self._lock), folder, self, segments)
        self._thread = threading.Thread(target=writer.run, daemon=True)
        self._thread.start()

    def on(self, event: Any) -> bool:
        """Record an event."""
        if self._broken:
            return False
        if type(event) is Output:
            self._output(event)
            return False
        if type(event) is SinkMark:
            self._mark(event)
            return False
        line = line_of(event)
        if line is not None:
            self._put(_Write("", line.encode() + b"\n"))
        if type(event) is RankStarted and not self._told:  # launchpad has nothing else to do now
            self._put(_Write(job_store.CIRCUMSTANCES, b""))
            self._told = True
        if type(event) is Restarted:
            self._flush()
            self._attempt = event.attempt
            self._streams.clear()
            past = event.attempt - job_store.LAST_ATTEMPTS
            if past > 0 and self._files is None:
                self._put(_Remove(f"attempt_{past}"))
            if event.nodes:
                self._joined = {rank for node in event.shown_there for rank in event.nodes[node][1]}
        elif type(event) is Sampled:
            said = {"time": event.time, "ranks": event.ranks, "gpus": event.gpus}
            self._put(_Write(job_store.SAMPLES, json.dumps(said, separators=(",", ":")).encode() + b"\n"))
        elif type(event) is RanksSpawned:
            self._folders.update((rank, str(rank)) for rank in event.ranks)
        return False

    def _output(self, event: Output) -> None:
        if event.stream not in _NAMES:  # a result
            return
        key = (event.rank, event.stream)
        files = None if event.rank in self._joined else self._files
        if files is not None and not files.keeps(*key):
            return  # the user has chosen what to keep
        stream = self._streams.get(key)
        if stream is None:
            folder = os.path.join(f"attempt_{self._attempt}", self._folders.get(event.rank, str(event.rank)))
            stream = self._streams[key] = _StreamRecord(folder, _NAMES[event.stream], files is not None)
        size = len(event.data)
        if not stream.elsewhere:
            full = self._put_bytes - self._done_bytes > MOST_WAITING
            if stream.over or stream.size + size > self._head_bytes or full:
                self._keep_end(stream, event.data)
                return
        if not stream.elsewhere:  # first, so that a reader who finds the line finds the bytes
            self._put(_Write(f"{stream.folder}/{stream.name}.log", event.data))
        if self._places < MOST_PLACES:
            self._places += 1
            self._put(
                _Write(
                    "",
                    b'{"event": "Output", "time": %d, "rank": %d, "stream": %d, "file": "%s/%s.log", "offset": %d, '
                    b'"length": %d}\n'
                    % (event.time, *key, stream.folder.encode(), stream.name.encode(), stream.size, size),
                )
            )
        stream.size += size

    def _mark(self, mark: SinkMark) -> None:
        self._flush(though_full=True)
        streams = {key: (one.folder, one.name, one.elsewhere, one.size, one.over) for key, one in self._streams.items()}
        state = JournalState(self._attempt, streams, self._places, set(self._joined), dict(self._folders))
        mark.awaits("journal", state)
        self._put(_Marked(mark))

    def _restore(self, state: JournalState) -> None:
        self._attempt, self._places = state.attempt, state.places
        self._joined, self._folders = state.joined, state.folders
        for key, (folder, name, elsewhere, size, over) in state.streams.items():
            stream = self._streams[key] = _StreamRecord(folder, name, elsewhere)
            stream.size, stream.over = size, over

    def _keep_end(self, stream: _StreamRecord, data: bytes) -> None:
        most = self._head_bytes // SEGMENTS
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

    def _flush(self, *, though_full: bool = False) -> None:
        self._flush_at = None
        for stream in self._streams.values():
            full = self._put_bytes - self._done_bytes > MOST_WAITING and not though_full
            if not stream.pending or full:
                continue
            mark = b"\n\xe2\x80\xa6 %d bytes left out here \xe2\x80\xa6\n" % stream.left_out if stream.left_out else b""
            self._put(_Write(f"{stream.folder}/{stream.name}", mark + b"".join(stream.pending), segment=True))
            stream.pending, stream.waiting, stream.left_out = [], 0, 0

    def _put(self, piece: _Piece) -> None:
        self._put_bytes += len(piece.data)
        self._queue.put(piece)

    @property
    def deadline(self) -> float | None:
        """When to write the ends of streams."""
        return self._flush_at

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Write the ends of streams."""
        self._flush()

    def conclude(self, history: "History", verdict: "Verdict", lines: list[str], earlier: Sequence[str]) -> None:
        """Record the verdict on a failed job."""
        from launchpad.diagnosis.verdict_json import as_json

        if not self._broken:
            text = json.dumps(as_json(history, verdict, lines, earlier), indent=1)
            self._put(_Write(job_store.VERDICT, text.encode(errors="backslashreplace") + b"\n"))

    def finish(self) -> None:
        """Write what is left, but don't wait long for a disk that does not answer. The job still counts as running."""
        if self._broken:
            return
        self._flush()
        self._broken = True
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def close(self) -> None:
        """Finish the record, and release its lock: the job is over."""
        self.finish()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Called by the writer thread.

    def done(self, size: int) -> None:
        """`size` bytes have been written or dropped."""
        self._done_bytes += size

    def failed(self, path: str, error: OSError) -> None:
        """Report that this file can't be written and is incomplete from now on."""
        self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))

    def make_room(self, written: int) -> None:
        """Remove old jobs."""
        job_store.prune(self._environ, by_size=written > LARGE_BYTES)

    def circumstances(self) -> bytes:
        """What the job is run with, for its report."""
        from launchpad.record.circumstances import circumstances

        return json.dumps(circumstances(self._plan, self._environ), indent=1).encode() + b"\n"

    @property
    def segment_bytes(self) -> int:
        """The largest size of a segment."""
        return self._head_bytes // SEGMENTS


_BESIDES = {job_store.CIRCUMSTANCES, job_store.SAMPLES}


class _JournalWriter:
    """The writer thread: opens, writes and removes files."""

    def __init__(
        self,
        pieces: queue.SimpleQueue[_Piece | None],
        events: int,
        folder: str,
        journal: Journal,
        segments: dict[str, list[int]],
    ) -> None:
        """`segments`: by stream: number of the current segment, bytes in it."""
        self._pieces = pieces
        self._folder = folder
        self._journal = journal
        self._events = events
        self._streams = OpenFiles()
        self._segments = segments
        self._changed: set[str] = set()  # files, since the last mark
        self._written = 0
        self._failed: set[str] = set()  # paths that can't be written

    def run(self) -> None:
        """Write until None arrives."""
        try:
            self._run()
        finally:
            self._streams.close_all()
            os.close(self._events)

    def _run(self) -> None:
        self._journal.make_room(0)
        while (piece := self._pieces.get()) is not None:
            if not self._failed & {"", piece.path}:
                try:
                    self._write(piece)
                except OSError as error:
                    # One report for all streams; a disk that is full for these is so for events.jsonl, too.
                    if not piece.path or (piece.path not in _BESIDES and not self._failed - _BESIDES):
                        self._journal.failed(os.path.join(self._folder, piece.path or job_store.EVENTS), error)
                    self._failed.add(piece.path)
            elif isinstance(piece, _Marked):
                piece.mark.fail()
            self._journal.done(len(piece.data))
        if self._written > LARGE_BYTES:
            self._journal.make_room(self._written)

    def _write(self, piece: _Piece) -> None:
        if isinstance(piece, _Remove):
            self._remove(piece.path)
            return
        if isinstance(piece, _Marked):
            self._mark(piece.mark)
            return
        fd = self._segment(piece) if piece.segment else self._open(piece.path)
        data = piece.data if piece.path != job_store.CIRCUMSTANCES else self._journal.circumstances()
        linux.write_all(fd, data)
        self._written += len(data)
        self._changed.add(f"{piece.path}.{self._segments[piece.path][0]}.log" if piece.segment else piece.path)

    def _mark(self, mark: SinkMark) -> None:
        """Say what the record has. It needs to survive this process, not this machine's power."""
        mark.states["segments"] = {path: list(state) for path, state in self._segments.items()}
        paths = [os.path.join(self._folder, path or job_store.EVENTS) for path in self._changed]
        self._changed.clear()
        mark.written({path: os.stat(path).st_size for path in paths if os.path.exists(path)})

    def _remove(self, folder: str) -> None:
        """Remove the output of an attempt long past; files that are open would still take room."""
        self._streams.close_all()
        self._segments = {path: state for path, state in self._segments.items() if not path.startswith(f"{folder}/")}
        job_store.remove(os.path.join(self._folder, folder))

    def _open(self, path: str) -> int:
        if not path:
            return self._events
        whole = os.path.join(self._folder, path)
        try:
            return self._streams.descriptor(whole)
        except FileNotFoundError:  # the first file in its folder
            os.makedirs(os.path.dirname(whole), mode=0o700, exist_ok=True)
            return self._streams.descriptor(whole)

    def _segment(self, piece: _Write) -> int:
        state = self._segments.setdefault(piece.path, [1, 0])
        if state[1] and state[1] + len(piece.data) > self._journal.segment_bytes:
            self._streams.close(os.path.join(self._folder, f"{piece.path}.{state[0]}.log"))
            state[:] = [state[0] + 1, 0]
            try:
                os.unlink(os.path.join(self._folder, f"{piece.path}.{state[0] - SEGMENTS}.log"))
            except FileNotFoundError:
                pass
        state[1] += len(piece.data)
        return self._open(f"{piece.path}.{state[0]}.log")
