"""Checkpoints of a job that can go on without launchpad (--keep-running): where `launchpad resume` takes it up.

Only the user can read them: they hold the job's secret, and the ranks' environment. They are written by rename, so that
there is always a whole one, and are for this very version of launchpad.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from typing import Any

from launchpad._version import __version__
from launchpad.errors import UsageError
from launchpad.named import NamedTuple
from launchpad.record import files, job_store

CHECKPOINT = "checkpoint"


class Checkpoint(NamedTuple):
    """Everything of the job as it was at a moment."""

    head: Any  # the head's own state
    settings: Any  # of whoever runs the job
    states: Mapping[str, Any]  # of those who write files
    sizes: Mapping[str, int]  # of these files, in bytes
    inodes: Mapping[str, tuple[int, int]] = {}  # of those that are outside the record: device, number


def write(folder: str, checkpoint: Checkpoint) -> None:
    """Replace the last one. Raises OSError."""
    path = os.path.join(folder, CHECKPOINT)
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(f"{__version__}\n".encode())
        pickle.dump(tuple(checkpoint), file, pickle.HIGHEST_PROTOCOL)
    os.rename(f"{path}.new", path)


def remove(folder: str) -> None:
    """The job can't be resumed any more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, CHECKPOINT))


def last(folder: str) -> float | None:
    """When the last one was written, in seconds since 1970; None if there is none."""
    found = files.status(folder, CHECKPOINT)
    return found.st_mtime if found else None


def read(folder: str) -> Checkpoint:
    """The last one. Raises UsageError if it is another launchpad's, or not ours."""
    name = os.path.basename(folder)
    path = os.path.join(folder, CHECKPOINT)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UsageError(
                    f"job {name}: {path} is another user's, or others can read it; only its owner resumes it"
                )
            version = file.readline(100).decode(errors="replace").strip()
            if version != __version__:
                raise UsageError(
                    f"job {name} was started by launchpad {version}, and this is {__version__}; resume it with that one"
                )
            return Checkpoint(*pickle.load(file))
    except OSError as error:
        raise UsageError(f"job {name}: {path}: {error.strerror}") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
        raise UsageError(f"job {name}: {path} can't be read: {error}") from None


def inode(path: str) -> tuple[int, int] | None:
    """Which file this is: device and number; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def cut(folder: str, checkpoint: Checkpoint) -> None:
    """Cut the job's files to what they were at the checkpoint. Raises UsageError if something is missing.

    A file outside the record (--events) that is another one by now, or that somebody has cut, stays as it is.
    """
    folder = os.path.realpath(folder)
    attempt = checkpoint.states["journal"].attempt
    sizes = {os.path.join(folder, name): 0 for name in _growing(folder, attempt)}
    sizes.update((_with_real_folder(path), size) for path, size in checkpoint.sizes.items())
    for path, size in sizes.items():
        is_inside = path.startswith(f"{folder}/")
        if not is_inside and (inode(path) or ()) != checkpoint.inodes.get(path):
            continue
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        except FileNotFoundError:  # an old part of a long stream
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; the job can't be resumed without it") from None
        try:
            has = os.fstat(fd).st_size
            if has < size and is_inside:
                raise UsageError(f"{path} is shorter than launchpad has left it; the job can't be resumed")
            os.ftruncate(fd, min(has, size))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; the job can't be resumed without it") from None
        finally:
            os.close(fd)


def _with_real_folder(path: str) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _growing(folder: str, attempt: int) -> list[str]:
    """The files that may be newer than the checkpoint: the output of this attempt and later ones, and the console."""
    found = [job_store.SAMPLES, *(name for _, name in files.numbered(folder, f"{job_store.CONSOLE}.*.jsonl"))]
    for number, place in files.numbered(folder, "attempt_*"):
        for top, _, names in os.walk(os.path.join(folder, place)) if number >= attempt else ():
            found += [os.path.join(top, name) for name in names if name.endswith(".log")]
    return found
