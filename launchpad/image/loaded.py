"""What an interpreter has loaded, file by file, and whether a cold start would still load the same."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .. import linux

# Device, inode, size, time of the last change of the content (ns); empty: there was no such file. Not the time of the
# last change of attributes: another link to the file changes that, as uv makes for each new environment.
Mark = list[int]

# Words that may be the names of variables, in code that runs while the interpreter starts.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{2,}")

_CODE = (".py", ".pyc", ".so")


def files() -> dict[str, Mark]:
    """Every file that this interpreter has loaded: modules, libraries, what its start read, folders of its path."""
    paths = {sys.executable, *_configuration()}
    for module in list(sys.modules.values()):
        paths |= {path for path in _paths_of(module) if os.path.isabs(path)}
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/") and words[4] != "0":
                paths.add(words[5])
    return {path: mark(path) for path in sorted(paths)}


def _paths_of(module: object) -> Iterator[str]:
    spec = getattr(module, "__spec__", None)
    for path in (getattr(module, "__file__", None), getattr(spec, "origin", None)):
        if isinstance(path, str):
            yield path


def _configuration() -> Iterator[str]:
    """What `site` reads: pyvenv.cfg, and the .pth files in the folders of sys.path."""
    for base in {os.path.dirname(sys.executable), sys.prefix}:
        yield os.path.join(base, "pyvenv.cfg")
    for folder in sys.path:
        if isinstance(folder, str) and os.path.isabs(folder):
            yield folder
            yield from _pth_files(folder)


def _pth_files(folder: str) -> Iterator[str]:
    try:
        yield from (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
    except OSError:
        pass


def mark(path: str) -> Mark:
    """What changes when the file does."""
    try:
        facts = os.stat(path)
    except OSError:
        return []
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns]


def changed(marks: Mapping[str, Mark]) -> str:
    """The first of these files that has changed, "" if none has."""
    return next((path for path, before in marks.items() if mark(path) != before), "")


def read_at_start(paths: Collection[str]) -> set[str]:
    """Words that may name variables in the code that .pth files, sitecustomize and usercustomize have run.

    It ran before anybody could watch what it reads. `paths`: the modules' files that were loaded by then.
    """
    library = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
    packages = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
    texts = [linux.text_of(path) for folder in sys.path for path in _pth_files(folder)]
    for path in paths:
        if path.endswith(".py") and (path.startswith(packages) or not path.startswith(library)):
            texts.append(linux.text_of(path))
    return {word for text in texts for word in _VARIABLE.findall(text)}


def shadow(folder: str, asked: Collection[str], found: Collection[str]) -> str:
    """The first entry of a folder in front of sys.path that these imports would have met; "" for none.

    `asked`: top-level names that were asked for or loaded; `found`: those of them that are regular modules.
    """
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return folder if os.path.isfile(folder) else ""  # an archive
    for entry in entries:
        name = entry.partition(".")[0]
        if name not in asked:
            continue
        path = os.path.join(folder, entry)
        if entry != name:
            if entry.endswith(_CODE):
                return path
        elif os.path.isdir(path) and (name not in found or _is_package(path)):
            return path
    return ""


def _is_package(folder: str) -> bool:
    try:
        return any(entry.partition(".")[0] == "__init__" for entry in os.listdir(folder))
    except OSError:
        return True


def regular(modules: Mapping[str, Any]) -> list[str]:
    """The top-level modules among these that are no namespace packages."""
    return sorted(
        name
        for name, module in modules.items()
        if "." not in name and (getattr(module, "__file__", None) or not hasattr(module, "__path__"))
    )
