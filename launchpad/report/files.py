"""Per-rank files in torchrun's layout.

LOG_DIR/RUN_ID_RANDOM/attempt_0/LOCAL_RANK/{stdout.log,stderr.log,error.json}
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

from launchpad.errors import UsageError
from launchpad.events import STDERR, STDOUT, LogFailed, Output, RankRaised
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.report.writer import Writer

_NAMES = {STDOUT: "stdout.log", STDERR: "stderr.log"}


class Files:
    """A sink. Making one makes the folders and files, private to the user; UsageError where that can't be."""

    def __init__(self, spec: JobSpec, plan: Plan, log_dir: str, post: Callable[[Any], None]) -> None:
        self.folder = os.path.join(log_dir, f"{plan.run_id}_{os.urandom(4).hex()}")
        self._post = post
        self._paths: dict[int, str] = {}  # by descriptor
        self._files: dict[tuple[int, int], int] = {}
        self._folders: dict[int, str] = {}
        _raise_file_limit()
        try:
            os.makedirs(log_dir, exist_ok=True)
            os.mkdir(self.folder, 0o700)
            for rank in plan.ranks:
                folder = os.path.join(self.folder, "attempt_0", str(rank.local_rank))
                os.makedirs(folder, exist_ok=True)
                self._folders[rank.rank] = folder
                for stream, name in _NAMES.items():
                    if spec.redirects.has(rank.local_rank, stream) or spec.tee.has(rank.local_rank, stream):
                        path = os.path.join(folder, name)
                        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                        self._files[rank.rank, stream] = fd
                        self._paths[fd] = path
        except OSError as error:
            for fd in self._paths:
                os.close(fd)
            raise UsageError(
                f"--log-dir {log_dir}: {error.filename or log_dir}: {error.strerror}; choose a folder that can be "
                "written to"
            ) from None
        self._writer = Writer(post, self._failed)

    def on(self, event: Any) -> bool:
        """Keep an event; True where its bytes were given to the writer."""
        if type(event) is Output:
            fd = self._files.get((event.rank, event.stream))
            if fd is not None:
                self._writer.put([(fd, event.data)], event)
                return True
        elif type(event) is RankRaised:
            path = os.path.join(self._folders[event.rank], "error.json")
            try:
                with open(path, "w", errors="surrogateescape") as file:
                    file.write(event.error)
            except OSError as error:
                self._post(LogFailed(time.monotonic_ns(), path, error.strerror or str(error)))
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
        self._post(LogFailed(time.monotonic_ns(), self._paths[fd], error.strerror or str(error)))


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
