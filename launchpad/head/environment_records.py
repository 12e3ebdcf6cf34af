"""What the wheels of an environment say of themselves: for which platforms they are, and the hashes of their files."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterator, Sequence

from launchpad.head.environment_files import EnvironmentFile
from launchpad.job.wheels import Wheel


def digests(files: Sequence[EnvironmentFile], installed: Sequence[str]) -> list[str]:
    """The SHA-256 of each file, "" for links. `installed`: the folders with the packages.

    Most are taken from the RECORD of a wheel, unless the file has changed since; the other files are read.
    """
    known = {path: one for folder in installed for path, one in _recorded(folder)}
    found = []
    for file in files:
        digest, size, written = known.get(file.source, ("", -1, 0))
        if file.link or file.size == 0:
            found.append("")
        elif digest and size == file.size and file.modified <= written:
            found.append(digest)
        else:
            with open(file.source, "rb") as opened:
                found.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return found


def installed_wheels(folders: Sequence[str]) -> list[Wheel]:
    """The wheels in these folders, with their tags."""
    found = []
    for folder in folders:
        for name in os.listdir(folder):
            if name.endswith(".dist-info"):
                try:
                    with open(os.path.join(folder, name, "WHEEL"), encoding="utf-8", errors="replace") as file:
                        tags = tuple(line[4:].strip() for line in file if line.startswith("Tag:"))
                except OSError:  # it was not installed from one
                    continue
                found.append(Wheel(name.partition("-")[0], tags))
    return sorted(found)


def _recorded(folder: str) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """The paths that the wheels' RECORDs in a folder name; of each the hash, the size, and when that was written."""
    for name in os.listdir(folder):
        record = os.path.join(folder, name, "RECORD")
        if not name.endswith(".dist-info") or not os.path.exists(record):
            continue
        written = os.stat(record).st_mtime_ns
        with open(record, newline="", encoding="utf-8", errors="surrogateescape") as file:
            for path, digest, size, *_ in (row for row in csv.reader(file) if len(row) >= 3):
                if digest.startswith("sha256=") and size.isdecimal():
                    raw = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
                    yield os.path.normpath(os.path.join(folder, path)), (raw.hex(), int(size), written)
