"""`--log-dir`, `--tee`, `--redirects`, `--duplicate-stdout-filters`: a sink that writes files in torchrun's layout.

LOG_DIR/RUN_ID_RANDOM/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}; with several nodes, RANK replaces
LOCAL_RANK.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from launchpad.console.prefix import encoded, template_of
from launchpad.errors import UsageError
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.output.mark import Resumed, SinkMark
from launchpad.output.writer import Target, Writer
from launchpad.protocol.events import STDERR, STDOUT, LogFailed, Output, RankRaised, RanksSpawned, Restarted

_NAMES = {STDOUT: "stdout.log", STDERR: "stderr.log"}

# A line that never ends is searched in pieces of this size.
LONGEST_LINE = 1 << 20


class Filter:
    """Picks the lines that contain one of some texts (--duplicate-stdout-filters) from one stream's bytes."""

    def __init__(self, texts: tuple[str, ...], mark: Callable[[int], bytes] = lambda rank: b"[%d] " % rank) -> None:
        """`mark`: what stands before the lines of a rank."""
        self._mark = mark
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self.held: dict[int, bytes] = {}  # by rank: the line that is not complete

    def pick(self, rank: int, data: bytes) -> bytes:
        """The lines completed by `data` that contain one of the texts, each with its rank in front."""
        *whole, self.held[rank] = (self.held.get(rank, b"") + data).split(b"\n")
        if len(self.held[rank]) > LONGEST_LINE:
            whole.append(self.held.pop(rank))
        return self._among(rank, whole)

    def rest(self) -> bytes:
        """Of the lines that are not complete, those that contain one. What comes next begins a line."""
        held, self.held = self.held, {}
        return b"".join(self._among(rank, [line]) for rank, line in held.items())

    def _among(self, rank: int, lines: Sequence[bytes]) -> bytes:
        mark = self._mark(rank)
        return b"".join(mark + line + b"\n" for line in lines if any(text in line for text in self._texts))


class Files:
    """The sink. Its constructor makes the folders and files, private to the user, or raises UsageError."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        log_dir: str,
        post: Callable[[Any], None],
        job: str,
        attempt: int = 0,
        keep_alive: Callable[[], None] | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """`job`: launchpad's own random id of the job. `keep_alive` is called often while many files are made.

        `resumed`: where to go on.
        """
        self.folder = resumed.folder if resumed else os.path.join(log_dir, f"{plan.run_id}_{job}")
        self._spec = spec
        self._keep_alive = keep_alive
        self._template = template_of(spec.line_prefix, spec.role)
        self._marks: dict[int, bytes] = {}  # by rank, with a template
        self._begin(plan.by_node, [node.index for node in plan.nodes if node.shown_there])
        self._post = post
        self._files: dict[tuple[int, int], str] = {}  # paths, by rank and stream
        self._folders: dict[int, str] = {}
        self._filters = {stream: Filter(texts, self._mark) for stream, texts in spec.filters.items() if texts}
        self._filtered: dict[int, str] = {}  # paths, by stream
        try:
            if resumed is None:
                os.makedirs(log_dir, exist_ok=True)
                os.mkdir(self.folder, 0o700)
            self._make(attempt)
        except OSError as error:
            raise UsageError(
                f"--log-dir {log_dir}: {error.filename or log_dir}: {error.strerror}; choose a writable folder"
            ) from None
        if resumed is not None:
            for stream, held in resumed.states["files"].items():
                self._filters[stream].held = held
        self._writer = Writer(post, self._failed)

    @property
    def has_streams(self) -> bool:
        """Whether it files whole streams of ranks, not only the lines that a filter picks."""
        return bool(self._spec.redirects or self._spec.tee)

    def keeps(self, rank: int, stream: int) -> bool:
        """Whether this stream of the rank is written to a file."""
        return (rank, stream) in self._files

    def _begin(self, nodes: Sequence[Sequence[Any]], shown_there: Collection[int]) -> None:
        """File the ranks of these nodes, each [name, [rank, …]], except those whose own launchpad does."""
        self._ranks = [ranks for node, (_, ranks) in enumerate(nodes) if node not in shown_there]
        self._names = [name for name, _ in nodes]
        self._marks.clear()
        for node, (_, ranks) in enumerate(nodes if self._template else ()):
            for local_rank, rank in enumerate(ranks):
                self._add_mark(node, rank, local_rank)

    def _add_mark(self, node: int, rank: int, local_rank: int) -> None:
        if self._template:
            self._marks[rank] = encoded(self._template.of(rank, local_rank, self._names[node]).text)

    def _mark(self, rank: int) -> bytes:
        return self._marks.get(rank) or b"[%d] " % rank

    def _make(self, attempt: int) -> None:
        for stream in self._filters:
            self._filtered[stream] = self._make_file(f"attempt_{attempt}", f"filtered_{_NAMES[stream]}")
        self._attempt = attempt
        for ranks in self._ranks:
            for local_rank, rank in enumerate(ranks):
                self._make_rank(rank, local_rank, rank if len(self._ranks) > 1 else local_rank)
                if self._keep_alive:
                    self._keep_alive()

    def _make_rank(self, rank: int, local_rank: int, number: int) -> None:
        folder = os.path.join(f"attempt_{self._attempt}", str(number))
        self._folders[rank] = os.path.join(self.folder, folder)
        os.makedirs(self._folders[rank], exist_ok=True)
        for stream, name in _NAMES.items():
            if any(streams.has(local_rank, stream) for streams in (self._spec.redirects, self._spec.tee)):
                self._files[rank, stream] = self._make_file(folder, name)

    def _make_file(self, folder: str, name: str) -> str:
        """Make an empty file, so that it exists even if nothing is written. Returns its path."""
        os.makedirs(os.path.join(self.folder, folder), exist_ok=True)
        path = os.path.join(self.folder, folder, name)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        return path

    def _restart(self, event: Restarted) -> None:
        self._write_rest()
        self._files.clear()
        self._filtered.clear()
        self._folders.clear()
        if event.nodes:
            self._begin(event.nodes, event.shown_there)
        self._try_to(partial(self._make, event.attempt))

    def _try_to(self, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            path = os.path.join(self.folder, f"attempt_{self._attempt}")
            self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))

    def on(self, event: Any) -> bool:
        """Write what belongs in the files; True if the writer now holds the event's bytes."""
        if type(event) is Output:
            if event.stream in self._filtered:
                picked = self._filters[event.stream].pick(event.rank, event.data)
                self._writer.put([(self._filtered[event.stream], picked)])
            path = self._files.get((event.rank, event.stream))
            if path is not None:
                self._writer.put([(path, event.data)], event)
                return True
        elif type(event) is SinkMark:
            event.awaits("files", {stream: dict(one.held) for stream, one in self._filters.items()})
            self._writer.mark(event)
        elif type(event) is RankRaised and event.rank in self._folders:
            path = os.path.join(self._folders[event.rank], "error.json")
            try:
                with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(event.error)
            except OSError as error:
                self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))
        elif type(event) is RanksSpawned:
            for rank in event.ranks:
                self._add_mark(event.node, rank, rank)
                self._try_to(partial(self._make_rank, rank, rank, rank))
        elif type(event) is Restarted:
            self._restart(event)
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Wait until everything is written."""
        self._write_rest()
        self._writer.close()

    def _write_rest(self) -> None:
        for stream, path in self._filtered.items():
            self._writer.put([(path, self._filters[stream].rest())])

    def _failed(self, target: Target, error: OSError) -> None:
        self._post(LogFailed(time.monotonic_ns(), str(target), error.strerror or str(error)))


def temporary_folder() -> str:
    """A folder for the files of --redirects or --tee without --log-dir."""
    import tempfile

    return tempfile.mkdtemp(prefix="launchpad-logs-")
