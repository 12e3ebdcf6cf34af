"""The files of an environment here. Each is looked at every time, and an environment may have tens of thousands."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

# Files are left out by their names in these folders, and in no others.
_SIFTED = ("", "bin/")


class EnvironmentFile(NamedTuple):
    """A file or link to send; the fields but the last are as in commands.Sync."""

    path: str  # relative to the environment's folder
    permissions: int
    size: int
    modified: int
    link: str
    source: str  # where it is here


Entry = tuple[str, int, int, int, str]  # a file's name, and then what an EnvironmentFile has after its path


class EnvironmentFolder(NamedTuple):
    """A folder of an environment."""

    path: str  # relative to the environment's folder; "" for that
    source: str  # where it is here
    entries: list[Entry]  # without the folders in it; sorted

    def files(self) -> Iterator[EnvironmentFile]:
        """What is in it."""
        for name, permissions, size, modified, link in self.entries:
            path = f"{self.path}/{name}" if self.path else name
            yield EnvironmentFile(path, permissions, size, modified, link, f"{self.source}/{name}")


class Listing(NamedTuple):
    """The files of an environment, but for the compiled ones, which come and go as modules are imported."""

    folders: list[EnvironmentFolder]  # sorted
    compiled: list[tuple[str, str]]  # the folders of those: where they are here, and their paths in the environment
    places: dict[str, str]  # where folders here will be on a host, with the marks of commands.MakeEnvironment

    def all(self) -> list[EnvironmentFile]:
        """The compiled files, too; sorted."""
        compiled = [folder for top, to in self.compiled for folder in walk(top, to, None, [])]
        return sorted(file for folder in (*self.folders, *compiled) for file in folder.files())


def walk(
    top: str, to: str, but: re.Pattern[str] | None, compiled: list[tuple[str, str]]
) -> Iterator[EnvironmentFolder]:
    """The folders below one whose path in the environment is `to`. What `but` matches, from there, is left out.

    Folders of compiled files are only noted in `compiled`.
    """
    left = [(top, "", to)]
    seen: set[tuple[int, int]] = set()
    while left:
        source, relative, path = left.pop()
        sifted = but if relative in _SIFTED else None
        found: list[Entry] = []
        with os.scandir(source) as entries:
            for entry in entries:
                name = entry.name
                if sifted is not None and sifted.fullmatch(relative + name):
                    continue
                if entry.is_file(follow_symlinks=False):
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # it has just been removed
                        continue
                    found.append((name, facts.st_mode & 0o777, facts.st_size, facts.st_mtime_ns, ""))
                elif entry.is_symlink() and (one := _linked(entry, top)):
                    found.append(one)
                elif _leads_on(entry, seen):
                    inside = f"{path}/{name}" if path else name
                    if name == "__pycache__":
                        compiled.append((entry.path, inside))
                    else:
                        left.append((entry.path, f"{relative}{name}/", inside))
        found.sort()
        yield EnvironmentFolder(path, source, found)


def _linked(entry: os.DirEntry[str], top: str) -> Entry | None:
    """What is sent for a link: a link, if it stays below `top`, or the file that it leads to. None for a folder."""
    if link := link_within(entry.path, top):
        return entry.name, 0o777, 0, 0, link
    try:
        facts = entry.stat()
    except OSError:  # it leads nowhere
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    return entry.name, facts.st_mode & 0o777, facts.st_size, facts.st_mtime_ns, ""


def _leads_on(entry: os.DirEntry[str], seen: set[tuple[int, int]]) -> bool:
    """Whether it is a folder to look into. A link may lead to one that we are in."""
    try:
        if not entry.is_dir():
            return False
        if entry.is_symlink():
            facts = entry.stat()
            if (facts.st_dev, facts.st_ino) in seen:
                return False
            seen.add((facts.st_dev, facts.st_ino))
    except OSError:
        return False
    return True


def link_within(path: str, top: str) -> str:
    """A link's target, relative to its folder, if it stays below `top`; else ""."""
    folder = os.path.dirname(path)
    target = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return os.path.relpath(target, folder) if is_in(target, top) else ""


def is_in(path: str, folder: str) -> bool:
    """Whether it is the folder, or below it."""
    return path == folder or path.startswith(os.path.join(folder, ""))
