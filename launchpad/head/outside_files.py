"""Folders elsewhere that an environment imports from, because of an editable install or PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launchpad.head.environment_files import is_in, link_within
from launchpad.head.folder_listing import SyncedFile, list_files
from launchpad.head.run_paths import Linked, named_folders, on_hosts


class Outside(NamedTuple):
    """One of them; hosts get a copy."""

    folder: str
    files: list[SyncedFile]
    libraries: list[str]  # where on a host the libraries are that the shared libraries among them look for


def topmost(paths: Sequence[str]) -> list[str]:
    """The folders of these, or of these files, that are not inside another one."""
    folders = sorted({os.path.dirname(path) if path.endswith(".py") else path for path in paths})
    return [one for one in folders if not any(one != other and is_in(one, other) for other in folders)]


def look_outside(folder: str, places: Mapping[str, str]) -> Outside:
    """What is sent of a folder: as with --sync, and the shared libraries that were built in it, which git ignores.

    `places`: as in Listing. Raises UsageError if that is too much.
    """
    instead = "install what is in it without --editable, or take it off PYTHONPATH"
    files = [_followed(folder, file) for file in list_files(folder, option="--sync-env", instead=instead)]
    found = {file.path: file for file in files}
    beside = {os.path.dirname(path) for path in found if path.endswith(".py")}
    found |= {file.path: file for sub in beside for file in _libraries(folder, sub)}
    linked = [Linked(os.path.join(folder, file.path), file.permissions) for file in found.values() if not file.link]
    named = [one for file in linked if file.likely for one in named_folders(file.path)]
    for one in named:
        if is_in(one, folder):
            found |= {file.path: file for file in _libraries(folder, os.path.relpath(one, folder))}
    return Outside(folder, sorted(found.values()), on_hosts(named, places))


def _followed(folder: str, file: SyncedFile) -> SyncedFile:
    """For a link that leads out of the folder to a file, the file: a strict editable install consists of such."""
    path = os.path.join(folder, file.path)
    if not file.link or link_within(path, folder) or not os.path.isfile(path):
        return file
    return _facts(path, file.path)


def _libraries(folder: str, sub: str) -> Iterator[SyncedFile]:
    """The shared libraries in a folder below this one."""
    try:
        names = os.listdir(os.path.join(folder, sub))
    except OSError:  # it was removed, but is still in git's index
        return
    for name in names:
        path = os.path.join(folder, sub, name)
        if ".so" in name and os.path.isfile(path):
            yield _facts(path, os.path.normpath(os.path.join(sub, name)))


def _facts(path: str, relative: str) -> SyncedFile:
    facts = os.stat(path)
    return SyncedFile(relative, facts.st_mode & 0o777, facts.st_size, facts.st_mtime_ns, "")
