"""Where shared libraries look for others, if it is a folder that is elsewhere on a host (RPATH, RUNPATH).

Those of wheels name folders relative to their own ($ORIGIN); one that was built here may name them absolutely.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from launchpad.elf import expanded, read_elf
from launchpad.head.environment_files import is_in


class Linked(NamedTuple):
    """A file that may be a program or a shared library."""

    path: str
    permissions: int

    @property
    def likely(self) -> bool:
        """Whether it is worth a look."""
        return ".so" in os.path.basename(self.path) or self.permissions & 0o111 != 0


def named_folders(path: str) -> list[str]:
    """The folders that this file names absolutely, without those that it names relative to its own, too."""
    elf = read_elf(path)
    if elf is None:
        return []
    listed = elf.runpath or elf.rpath
    relative = {os.path.realpath(one) for one in expanded([one for one in listed if not os.path.isabs(one)], path)}
    return [os.path.normpath(one) for one in listed if os.path.isabs(one) and os.path.realpath(one) not in relative]


def on_hosts(folders: Iterable[str], places: Mapping[str, str]) -> list[str]:
    """Where those folders will be on a host that are below one of `places` (Listing.places) and exist here."""
    found = []
    for folder in dict.fromkeys(folders):
        around = max((place for place in places if is_in(folder, place)), key=len, default="")
        if around and os.path.isdir(folder):
            found.append(places[around] + folder.removeprefix(around))
    return found


def library_folders(files: Iterable[Linked], places: Mapping[str, str]) -> list[str]:
    """Where on a host the libraries are that these files look for."""
    return on_hosts((folder for file in files if file.likely for folder in named_folders(file.path)), places)
