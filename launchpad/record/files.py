"""Opens the files of a job's record: regular ones inside its folder, whatever the record, or a link there, says."""

from __future__ import annotations

import os
import re
import stat
from typing import BinaryIO

from launchpad.errors import UsageError

# The most that is taken of a file that is read as a whole.
MOST_BYTES = 16 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_TO_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Unreadable(UsageError):
    """What is to be a job's record is none; `why` says so in a few words."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"job {os.path.basename(folder)}: its record is unreadable: {why}")
        self.why = why


def open_file(folder: str, name: str) -> BinaryIO:
    """A file for reading, by its name in the record. Raises Unreadable if it is an odd one, OSError if there is none.

    The folder itself may be a link: with --log-dir, the job store has one to it.
    """
    parts = name.split("/")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # JSON has more than file systems
        raise Unreadable(folder, f"{name[:100]!r} is no file's name") from None
    if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise Unreadable(folder, f"{name[:100]!r} is not in its folder")
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    for depth, part in enumerate(parts, 1):
        expected, flags = (stat.S_IFDIR, _TO_ENTER) if depth < len(parts) else (stat.S_IFREG, _TO_READ)
        outer = place
        try:
            kind = stat.S_IFMT(os.stat(part, dir_fd=outer, follow_symlinks=False).st_mode)
            if kind != expected:
                raise Unreadable(folder, f"{'/'.join(parts[:depth])} is {_KINDS[kind]}")
            place = os.open(part, flags, dir_fd=outer)
        finally:
            os.close(outer)
    return os.fdopen(place, "rb")


def read(folder: str, name: str, offset: int = 0, most: int = MOST_BYTES) -> bytes:
    """Up to `most` of a file's bytes from `offset` on; none if it is gone, or an odd one: a rank may have made it."""
    try:
        with open_file(folder, name) as file:
            file.seek(offset)
            return file.read(most)
    except (OSError, Unreadable):
        return b""


def status(folder: str, name: str) -> os.stat_result | None:
    """What the system knows about a file; None if it is gone, or an odd one."""
    try:
        with open_file(folder, name) as file:
            return os.fstat(file.fileno())
    except (OSError, Unreadable):
        return None


def numbered(folder: str, name: str) -> list[tuple[int, str]]:
    """The numbers and names of the files called `name`, with a number instead of `*`; in the order of the numbers."""
    where, slash, last = name.rpartition("/")
    pattern = re.escape(last).replace(r"\*", r"([0-9]{1,9})")
    try:
        names = os.listdir(os.path.join(folder, where))
    except OSError:
        return []
    return sorted((int(match[1]), where + slash + one) for one in names if (match := re.fullmatch(pattern, one)))
