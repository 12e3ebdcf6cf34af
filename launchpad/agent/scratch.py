"""The job's private folder on a node: the ranks' error files, gone when the job is."""

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
