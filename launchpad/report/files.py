"""Per-rank files in torchrun's layout.

LOG_DIR/RUN_ID_RANDOM/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}; where several nodes' files come together
here, RANK stands in LOCAL_RANK's place.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from launchpad.errors import UsageError
from launchpad.events import STDERR, STDOUT, LogFailed, Output, RankRaised, RanksSpawned, Restarted
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.report.filtered import Filter
from launchpad.report.writer import Writer

_NAMES = {STDOUT: "stdout.log", STDERR: "stderr.log"}


class Files:
    """A sink. Making one makes the folders and files, private to the user; UsageError where that can't be."""

    def __init__(self, spec: JobSpec, plan: Plan, log_dir: str, post: Callable[[Any], None], job: str) -> None:
        """`job` is launchpad's own id of it, a random one."""
        self.folder = os.path.join(log_dir, f"{plan.run_id}_{job}")
        self._spec = spec
        self._plan = plan
        self._post = post
        self._paths: dict[int, str] = {}  # by descriptor
        self._files: dict[tuple[int, int], int] = {}
        self._folders: dict[int, str] = {}
        self._filters = {stream: Filter(texts) for stream, texts in spec.filters.items() if texts}
        self._filtered: dict[int, int] = {}  # descriptors, by stream
        _raise_file_limit()
        try:
            os.makedirs(log_dir, exist_ok=True)
            os.mkdir(self.folder, 0o700)
            self._open(attempt=0)
        except OSError as error:
            for fd in self._paths:
                os.close(fd)
            raise UsageError(
                f"--log-dir {log_dir}: {error.filename or log_dir}: {error.strerror}; choose a folder that can be "
                "written to"
            ) from None
        self._writer = Writer(post, self._failed)

    def keeps(self, rank: int, stream: int) -> bool:
        """Whether that stream of the rank is written here."""
        return (rank, stream) in self._files

    def _open(self, attempt: int) -> None:
        for stream in self._filters:
            self._filtered[stream] = self._open_file(f"attempt_{attempt}", f"filtered_{_NAMES[stream]}")
        self._attempt = attempt
        for rank in self._plan.ranks:
            self._open_rank(rank.rank, rank.local_rank, rank.rank if len(self._plan.nodes) > 1 else rank.local_rank)

    def _open_rank(self, rank: int, local_rank: int, number: int) -> None:
        folder = os.path.join(f"attempt_{self._attempt}", str(number))
        self._folders[rank] = os.path.join(self.folder, folder)
        os.makedirs(self._folders[rank], exist_ok=True)
        for stream, name in _NAMES.items():
            if any(streams.has(local_rank, stream) for streams in (self._spec.redirects, self._spec.tee)):
                self._files[rank, stream] = self._open_file(folder, name)

    def _open_file(self, folder: str, name: str) -> int:
        os.makedirs(os.path.join(self.folder, folder), exist_ok=True)
        path = os.path.join(self.folder, folder, name)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._paths[fd] = path
        return fd

    def _reopen(self, attempt: int) -> None:
        for fd in (*self._files.values(), *self._filtered.values()):
            self._writer.close_later(fd)
            del self._paths[fd]
        self._files.clear()
        self._filtered.clear()
        self._try_to_open(partial(self._open, attempt))

    def _try_to_open(self, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            path = os.path.join(self.folder, f"attempt_{self._attempt}")
            self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))

    def on(self, event: Any) -> bool:
        """Keep an event; True where its bytes were given to the writer."""
        if type(event) is Output:
            if event.stream in self._filtered:
                picked = self._filters[event.stream].pick(event.rank, event.data)
                self._writer.put([(self._filtered[event.stream], picked)])
            fd = self._files.get((event.rank, event.stream))
            if fd is not None:
                self._writer.put([(fd, event.data)], event)
                return True
        elif type(event) is RankRaised:
            path = os.path.join(self._folders[event.rank], "error.json")
            try:
                with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(event.error)
            except OSError as error:
                self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))
        elif type(event) is RanksSpawned:
            for rank in event.ranks:
                self._try_to_open(partial(self._open_rank, rank, rank, rank))
        elif type(event) is Restarted:
            self._reopen(event.attempt)
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing here waits for time."""

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.close()
        for fd in self._paths:
            os.close(fd)

    def _failed(self, fd: int, error: OSError) -> None:
        self._post(
            LogFailed(
                time.monotonic_ns(), self._paths.get(fd, "a log of an earlier attempt"), error.strerror or str(error)
            )
        )


def temporary_folder() -> str:
    """Where the files go when --redirects or --tee asks for them and --log-dir names no place."""
    import tempfile

    return tempfile.mkdtemp(prefix="launchpad-logs-")


def _raise_file_limit() -> None:
    """Two files for each rank may be more than the soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass
