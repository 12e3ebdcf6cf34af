"""The job's private folder on a node: the ranks' error files, what they call and return; gone when the job is."""

from __future__ import annotations

import os
import stat


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
    path = error_file(folder, rank)
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
