"""Where the records of jobs are: a folder for each under the user's state folder, private, the old ones removed.

$XDG_STATE_HOME/launchpad/jobs/ID, by default under ~/.local/state; a link to the job's folder where --log-dir gave it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping

from launchpad.job.state import state_folder

EVENTS = "events.jsonl"
VERDICT = "verdict.json"

# Of jobs that are over so many are kept, and so many bytes of them; a few more, so as not to look at each start.
MOST_JOBS = 50
SLACK = 10
MOST_BYTES = 1 << 30


def jobs_folder(environ: Mapping[str, str]) -> str:
    """Where the records are, or would be."""
    return os.path.join(state_folder(environ), "jobs")


def make_folder(environ: Mapping[str, str], job: str) -> str:
    """A new job's folder. Raises OSError."""
    shelf = jobs_folder(environ)
    os.makedirs(os.path.dirname(shelf), exist_ok=True)
    for path in (shelf, os.path.join(shelf, job)):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if path != shelf:
                raise
    return os.path.join(shelf, job)


def link_folder(environ: Mapping[str, str], job: str, folder: str) -> None:
    """Have a job be found whose folder is elsewhere. Raises OSError."""
    shelf = jobs_folder(environ)
    os.makedirs(shelf, mode=0o700, exist_ok=True)
    os.symlink(folder, os.path.join(shelf, job))


def is_running(folder: str) -> bool:
    """Whether the launchpad of this job lives: it holds a lock on the record."""
    try:
        fd = os.open(os.path.join(folder, EVENTS), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def jobs(environ: Mapping[str, str]) -> list[str]:
    """The ids of the jobs that are on record, the latest first."""
    shelf = jobs_folder(environ)
    found = []
    try:
        for entry in os.scandir(shelf):
            try:
                found.append((os.stat(os.path.join(entry.path, EVENTS)).st_ctime_ns, _born(entry), entry.name))
            except OSError:  # its folder is gone, or it has just been made
                continue
    except OSError:
        return []
    return [name for _, _, name in sorted(found, key=lambda one: one[1], reverse=True)]


def _born(entry: os.DirEntry[str]) -> int:
    """When it was put there: the link's or the folder's own time, which the first file in it set last."""
    folder = os.path.join(entry.path, EVENTS) if not entry.is_symlink() else entry.path
    try:
        with open(os.path.join(entry.path, EVENTS), encoding="utf-8") as file:
            head = file.readline(1 << 16)
        place = head.index('"wall": ') + len('"wall": ')
        return int(float(head[place:].split(",", 1)[0]) * 1e9)
    except (OSError, ValueError):
        return os.lstat(folder).st_mtime_ns


def prune(environ: Mapping[str, str], *, by_size: bool) -> None:
    """Remove the oldest jobs that are over, where there are too many; `by_size`: or where they are too large."""
    shelf = jobs_folder(environ)
    try:
        names = os.listdir(shelf)
    except OSError:
        return
    if len(names) <= MOST_JOBS + SLACK and not by_size:
        return
    kept, room = 0, MOST_BYTES
    for name in sorted(names, key=lambda name: _age(os.path.join(shelf, name)), reverse=True):
        path = os.path.join(shelf, name)
        size = _size(path) if by_size else 0
        if (kept >= MOST_JOBS or size > room) and not is_running(path):
            remove(path)
        else:
            kept, room = kept + 1, room - size


def _age(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def _size(path: str) -> int:
    try:
        if os.path.islink(path):
            return 0
        found = 0
        for entry in os.scandir(path):
            found += (
                _size(entry.path) if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size
            )
    except OSError:
        return 0
    return found


def remove(path: str) -> None:
    """A job's folder with all that is in it; of a link only the link."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for entry in os.scandir(path):
                remove(entry.path)
            os.rmdir(path)
        else:
            os.unlink(path)
    except OSError:
        pass
