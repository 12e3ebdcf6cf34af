"""The job's private folder on a node: the ranks' error files, the function that they call, its results.

Guard and agent hold a lock on a file in it. If both are killed at once the folder stays, and the next guard on this
machine that gets the lock removes it.
"""

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import Any, TypedDict

from ... import linux
from ...protocol.events import (
    Arrivals,
    ArrivalTimes,
    CollectivesEntered,
    EnteredCollective,
    ExceptionRaised,
    MilestoneReached,
    RecordDropped,
)
from ...protocol.typed import typed
from ..host import ports, space

_AtEnd = ExceptionRaised | CollectivesEntered | ArrivalTimes | MilestoneReached | RecordDropped


class _Raised(TypedDict):
    """What a rank records with each exception (rank/exceptions.py)."""

    time: int
    pid: int
    thread: str
    traceback: dict[str, Any]


# What it adds at its end, if it is wanted: the type, and what it is in words.
_ADDED: dict[str, tuple[Any, str]] = {
    "collectives": (list[EnteredCollective], "its last collectives"),
    "entered": (list[Arrivals], "its latest collectives"),
    "milestones": (dict[str, int], "its milestones"),
}

# A rank's exceptions, and its crash report, are read up to this many characters.
_MAX_CHARACTERS = 1 << 20

# Of a line's number: Python refuses to read endless ones.
_MOST_DIGITS = 10

_NAME = r"launchpad-([0-9a-f]{8})-\d+-[0-9a-f]{12}"  # with the start of the boot's ID
_LOCK = "lock"
_UNLOCKED = "unlocked"  # the name of that file where the file system has no locks: nobody removes the folder

# How often another guard may take a new folder for an abandoned one, before its lock is held.
_TRIES = 10


def create() -> str:
    """Create a folder that only this user can enter, in the first parent that allows it.

    Its lock is held until this process and the processes that are forked from it have ended.
    """
    return create_locked()[0]


def create_locked() -> tuple[str, int]:
    """The same; returns also the descriptor that holds the lock in all of them, -1 if there are no locks there."""
    tried = []
    for parent in _parents():
        try:
            for _ in range(_TRIES):
                path = os.path.join(parent, f"launchpad-{_boot()}-{os.getpid()}-{os.urandom(6).hex()}")
                os.mkdir(path, 0o700)
                if (lock := _lock(path)) is not None:
                    return path, lock
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise OSError(f"can't create a temporary folder ({'; '.join(tried)}): set TMPDIR to a writable folder")


def debugger_socket(folder: str, rank: int) -> str:
    """Where the rank's debugger listens."""
    return os.path.join(folder, f"debugger-{rank}")


def _parents() -> Iterator[str]:
    for parent in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):
        if parent and os.path.isabs(parent):
            yield parent


def _boot() -> str:
    try:
        return linux.boot_id()[:8]
    except OSError:
        return "0" * 8


def _lock(folder: str) -> int | None:
    """Lock a new folder: what holds the lock, -1 for nothing; None if a guard has just removed it as abandoned."""
    path = os.path.join(folder, _LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileNotFoundError:
        return None
    except OSError:
        os.rmdir(folder)
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(path):
            return fd
    except BlockingIOError:  # it is being removed
        pass
    except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP
        os.rename(path, os.path.join(folder, _UNLOCKED))
        os.close(fd)
        return -1
    os.close(fd)
    return None


def abandoned() -> Iterator[str]:
    """The folders that guards and agents of this user left here when they were killed, each locked while it is given.

    A lock on a network file system need not reach other machines. So a folder of another boot than this one counts
    only if it is on a disk, where it must be from an earlier boot of this machine.
    """
    boot, me = _boot(), os.getuid()
    for parent in {os.path.realpath(parent): parent for parent in _parents()}.values():
        try:
            ours = [name for name in os.listdir(parent) if name.startswith("launchpad-")]
        except OSError:
            continue
        for name in filter(None, [re.fullmatch(_NAME, one) for one in ours]):
            path = os.path.join(parent, name[0])
            try:
                facts = os.lstat(path)
                of_disk = os.major(facts.st_dev) != 0
                if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != me or (name[1] != boot and not of_disk):
                    continue
                fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:  # its guard was killed before it made the file, or has not made it yet
                try:
                    os.rmdir(path)
                except OSError:
                    pass
                continue
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            except OSError:  # its guard or agent lives
                pass
            finally:
                os.close(fd)


def error_file(folder: str, rank: int) -> str:
    """The path where a rank reports its own failure (`TORCHELASTIC_ERROR_FILE`)."""
    return os.path.join(folder, f"{rank}.error.json")


def stop_by_file(folder: str) -> str:
    """The path of the file that says until when the ranks may run (time_limit.py)."""
    return os.path.join(folder, "stop_by")


def take_error_file(folder: str, rank: int, limit: int) -> str:
    """Read up to `limit` characters of the rank's error file, and remove it."""
    return _take(error_file(folder, rank), limit)


def _take(path: str, limit: int) -> str:
    """Read a file that a rank wrote, and remove it; "" if there is none."""
    try:
        # Without O_NONBLOCK, a named pipe in its place would block us.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as file:
            text = file.read(limit) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
        os.unlink(path)
    except OSError:
        return ""
    return text


def has_own_world(folder: str, rank: int) -> bool:
    """Whether the rank has left the mark of an MPI world of its own (rank/own_world.py)."""
    return os.path.exists(os.path.join(folder, f"{rank}.own_world"))


def call_files(folder: str, rank: int) -> dict[str, str]:
    """Where a rank finds the function to call, and where it leaves the outcome (rank/call.py)."""
    return {
        "LAUNCHPAD_CALL": os.path.join(folder, "call"),
        "LAUNCHPAD_RESULT": os.path.join(folder, f"{rank}.result"),
    }


def add_to_call(folder: str, data: bytes) -> None:
    """Append bytes to the pickled call. Raises OSError if there is no room for them."""
    path = call_files(folder, 0)["LAUNCHPAD_CALL"]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        linux.write_all(fd, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def open_result(folder: str, rank: int) -> int:
    """Open and unlink the rank's result; returns its descriptor, -1 if the rank left none."""
    path = call_files(folder, rank)["LAUNCHPAD_RESULT"]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        os.unlink(path)
    except OSError:
        return -1
    return fd


def take_exceptions(folder: str, rank: int, cwd: str) -> list[_AtEnd]:
    """Read and remove what the rank has recorded at its end.

    The uncaught exceptions of its program, its threads and its children; its last collectives, and its milestones.
    `cwd`: its folder.
    """
    found: list[_AtEnd] = []
    dropped: dict[str, str] = {}  # why, by what it is
    for line in _take(os.path.join(folder, f"{rank}.raised"), _MAX_CHARACTERS).splitlines():
        added: dict[str, Any] = {}
        try:
            said = json.loads(line)
            for name in said.keys() & _ADDED.keys():
                kind, what = _ADDED[name]
                try:
                    added[name] = typed(kind, said.pop(name))
                except TypeError as error:
                    dropped[what] = str(error)
            raised: _Raised = typed(_Raised, said)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # truncated, or not written by us
            dropped["an exception that it recorded"] = str(error)
            continue
        found += _at_end(rank, raised, added, cwd)
    now = time.monotonic_ns()
    return [*found, *(RecordDropped(now, rank, what, why) for what, why in dropped.items())]


def _at_end(rank: int, raised: _Raised, added: dict[str, Any], cwd: str) -> Iterator[_AtEnd]:
    at = raised["time"]
    ports.explain(raised["traceback"])
    space.explain(raised["traceback"], cwd)
    yield ExceptionRaised(at, rank, raised["pid"], raised["thread"], raised["traceback"])
    if collectives := added.get("collectives"):
        yield CollectivesEntered(at, rank, collectives)
    if entered := added.get("entered"):
        yield ArrivalTimes(at, rank, entered)
    for what, when in added.get("milestones", {}).items():
        yield MilestoneReached(when, rank, what)


def take_crash(folder: str, rank: int, cwd: str) -> str:
    """Read and remove the rank's faulthandler report, with the source line added to each frame.

    `cwd`: what paths are relative to.
    """
    text = _take(os.path.join(folder, f"{rank}.crash"), _MAX_CHARACTERS)
    if not text:
        return ""
    from ..stacks.signalled import unescaped
    from ..stacks.source_lines import SourceLines

    sources = SourceLines(cwd)
    lines = []
    for line in map(unescaped, text.splitlines()):
        lines.append(line)
        head, _, rest = line.partition('", line ')
        number = rest.split(" ", 1)[0]
        if head.startswith('  File "') and number.isdecimal() and len(number) < _MOST_DIGITS:
            source = sources.line(head[8:], int(number))
            lines += [f"    {source}"] if source else []
    return "\n".join(lines)


def remove(folder: str) -> None:
    """Remove the folder. Agent and guard both do; for the second one it is a no-op."""
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)
    except OSError:
        pass
