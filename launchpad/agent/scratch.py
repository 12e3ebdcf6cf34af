"""The job's private folder on a node: the ranks' error files, what they call and return; gone when the job is."""

from __future__ import annotations

import json
import os
import stat

from ..failures import ExceptionRaised

# The most that is taken of a rank's accounts of its exceptions, and of its crash, in characters.
MOST_KEPT = 1 << 20


def create() -> str:
    """Make a folder that only this user can enter; the first place that takes it is used."""
    tried = []
    for parent in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):
        if not parent or not os.path.isabs(parent):
            continue
        path = os.path.join(parent, f"launchpad-{os.getpid()}-{os.urandom(6).hex()}")
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
        else:
            return path
    raise OSError(f"no folder for temporary files can be made ({'; '.join(tried)}): set TMPDIR to one that can")


def error_file(folder: str, rank: int) -> str:
    """Where a rank's own account of its failure is written (`TORCHELASTIC_ERROR_FILE`)."""
    return os.path.join(folder, f"{rank}.error.json")


def take_error_file(folder: str, rank: int, most: int) -> str:
    """What stands in the rank's error file, `most` characters of it at most; the file is gone then."""
    return _take(error_file(folder, rank), most)


def _take(path: str, most: int) -> str:
    try:
        # Without O_NONBLOCK a named pipe there, a user's prank, would hold us up.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as file:
            text = file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
        os.unlink(path)
    except OSError:
        return ""
    return text


def call_files(folder: str, rank: int) -> dict[str, str]:
    """Where a rank finds what it is to call, and where it is to leave how that ended (nursery/calling.py)."""
    return {
        "LAUNCHPAD_CALL": os.path.join(folder, "call"),
        "LAUNCHPAD_RESULT": os.path.join(folder, f"{rank}.result"),
    }


def add_to_call(folder: str, data: bytes) -> None:
    """The next bytes of what the ranks are to call. Raises OSError where there is no room for them."""
    fd = os.open(call_files(folder, 0)["LAUNCHPAD_CALL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def open_result(folder: str, rank: int) -> int:
    """A descriptor of what the rank has left, which is gone from the folder then; -1 where it has left nothing."""
    path = call_files(folder, rank)["LAUNCHPAD_RESULT"]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        os.unlink(path)
    except OSError:
        return -1
    return fd


def take_exceptions(folder: str, rank: int) -> list[ExceptionRaised]:
    """The exceptions that ended the rank's program, its threads or its children's programs; forgotten then."""
    found = []
    for line in _take(os.path.join(folder, f"{rank}.raised"), MOST_KEPT).splitlines():
        try:
            said = json.loads(line)
            event = ExceptionRaised(said["time"], rank, said["pid"], said["thread"], said["account"])
        except (ValueError, KeyError, TypeError, RecursionError):  # cut, or not written by us
            continue
        if all(map(isinstance, event, (int, int, int, str, dict))):
            found.append(event)
    return found


def take_crash(folder: str, rank: int) -> str:
    """What faulthandler has written for the rank, each place with its line of source; forgotten then."""
    text = _take(os.path.join(folder, f"{rank}.crash"), MOST_KEPT)
    if not text:
        return ""
    import linecache

    lines = []
    for line in text.splitlines():
        lines.append(line)
        head, _, rest = line.partition('", line ')
        number = rest.split(" ", 1)[0]
        if head.startswith('  File "') and number.isdecimal():
            source = linecache.getline(head[8:], int(number)).strip()
            lines += [f"    {source}"] if source else []
    return "\n".join(lines)


def remove(folder: str) -> None:
    """Remove the folder; who is last, agent or guard, finds nothing to do."""
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)
    except OSError:
        pass
