"""The job store: a private folder for each job's record in the user's state folder. Old records are removed.

$XDG_STATE_HOME/launchpad/jobs/ID, by default under ~/.local/state. With --log-dir, ID is a link to the folder there.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from operator import itemgetter

from launchpad.job.plan import Plan
from launchpad.job.state import state_folder
from launchpad.record import files, liveness
from launchpad.record.liveness import State

EVENTS = "events.jsonl"
VERDICT = "verdict.json"
CIRCUMSTANCES = "job.json"  # what it was run with
SAMPLES = "samples.jsonl"
HELD = "held.json"  # where its ranks would go on without launchpad; there until it is over
CONSOLE = "console"  # the files of a detached job's console begin with this

# So many of the last attempts of a long record are judged, and their output is kept besides that of the first one. The
# verdict lists five before the current one.
LAST_ATTEMPTS = 8

# How many finished jobs are kept, and how many bytes of them; the slack avoids pruning at every start.
MOST_JOBS = 50
SLACK = 10
MOST_BYTES = 1 << 30

# A job whose ranks may go on without launchpad counts as one that runs for so long after it was last known to.
HEADLESS_SECONDS = 30 * 86400.0


def jobs_folder(environ: Mapping[str, str]) -> str:
    """The folder of the records; it may not exist yet."""
    return os.path.join(state_folder(environ), "jobs")


def make_folder(environ: Mapping[str, str], job: str) -> str:
    """Make a new job's folder. Raises OSError."""
    store = jobs_folder(environ)
    os.makedirs(os.path.dirname(store), exist_ok=True)
    for path in (store, os.path.join(store, job)):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if path != store:
                raise
    return os.path.join(store, job)


def link_folder(environ: Mapping[str, str], job: str, folder: str) -> None:
    """Link to the folder of a job that is recorded elsewhere. Raises OSError."""
    store = jobs_folder(environ)
    os.makedirs(store, mode=0o700, exist_ok=True)
    os.symlink(folder, os.path.join(store, job))


def rank_folders(plan: Plan) -> dict[int, str]:
    """The name of each rank's folder in attempt_N: its local rank, or its rank if there are several nodes.

    Spawned ranks, which no plan has, get folders named by their ranks.
    """
    several = len(plan.nodes) > 1
    return {rank.rank: str(rank.rank if several else rank.local_rank) for rank in plan.ranks}


def state_of(folder: str) -> State:
    """Whether the job in this folder is still running."""
    return liveness.state_of(folder, EVENTS)


def jobs(environ: Mapping[str, str]) -> list[str]:
    """The ids of the recorded jobs, latest first."""
    store = jobs_folder(environ)
    found = []
    try:
        for entry in os.scandir(store):
            try:
                os.stat(os.path.join(entry.path, EVENTS), follow_symlinks=False)
                found.append((_born(entry), entry.name))
            except OSError:  # the folder is gone, or has only just been made
                continue
    except OSError:
        return []
    return [name for _, name in sorted(found, key=itemgetter(0), reverse=True)]


def _born(entry: os.DirEntry[str]) -> int:
    """When the job started, from its first event; otherwise, the time of its link or its events file."""
    folder = os.path.join(entry.path, EVENTS) if not entry.is_symlink() else entry.path
    try:
        _, _, said = files.read(entry.path, EVENTS, most=1 << 16).partition(b'"wall": ')
        return int(float(said.partition(b",")[0]) * 1e9)
    except (ValueError, OverflowError):
        return os.lstat(folder).st_mtime_ns


def prune(environ: Mapping[str, str], *, by_size: bool) -> None:
    """Remove the oldest jobs that are certainly over, if there are too many or, with `by_size`, too many bytes."""
    store = jobs_folder(environ)
    try:
        names = os.listdir(store)
    except OSError:
        return
    if len(names) <= MOST_JOBS + SLACK and not by_size:
        return
    kept, room = 0, MOST_BYTES
    for name in sorted(names, key=lambda name: _age(os.path.join(store, name)), reverse=True):
        path = os.path.join(store, name)
        size = _size(path) if by_size else 0
        if size > room and _is_over(path):
            _remove_console(path)
            size = _size(path)
        if (kept >= MOST_JOBS or size > room) and _is_over(path):
            remove(path)
        else:
            kept, room = kept + 1, room - size


def _is_over(path: str) -> bool:
    """Whether nothing of the job in this folder can be left anywhere."""
    held = os.path.join(path, HELD)
    return state_of(path) == "over" and _age(held) / 1e9 < time.time() - HEADLESS_SECONDS


def _remove_console(folder: str) -> None:
    """Remove the largest part of a detached job's record, which only `launchpad attach` reads."""
    try:
        found = [entry.path for entry in os.scandir(folder) if entry.name.startswith(f"{CONSOLE}.")]
    except OSError:
        return
    for path in found:
        remove(path)


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
    """Remove a job's folder and everything in it; if it is a link, only the link."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for entry in os.scandir(path):
                remove(entry.path)
            os.rmdir(path)
        else:
            os.unlink(path)
    except OSError:
        pass
