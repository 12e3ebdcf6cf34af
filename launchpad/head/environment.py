"""`--sync-env`: what the environment of the ranks' interpreter consists of on this machine.

That is what the interpreter imports besides its standard library: the packages of its prefix (a venv, or a conda
prefix, which also holds the interpreter itself), those of the system if it sees them, and folders elsewhere that an
editable install or PYTHONPATH leads to.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.errors import UsageError
from launchpad.head.sync import SyncedFile, list_files, name_of_copy
from launchpad.job.wheels import Wheel
from launchpad.protocol.commands import CACHE, HERE

# An interpreter may have to be loaded over a network.
_PROBE_SECONDS = 60.0

# Says as JSON what Interpreter has, in its order.
_PROBE = r"""
import json, os, sys, sysconfig
build = sysconfig.get_config_vars()
standalone = build.get("PYTHON_BUILD_STANDALONE") or "--prefix=/install" in str(build.get("CONFIG_ARGS"))
finders = [module for name, module in list(sys.modules.items()) if name.startswith("__editable__")]
packages = []
for finder in finders:
    packages += getattr(finder, "MAPPING", {}).values()
    packages += [path for several in getattr(finder, "NAMESPACES", {}).values() for path in several]
library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
import _imp
print(json.dumps([
    sys.prefix,
    sys.base_prefix,
    "%d.%d" % sys.version_info[:2],
    _imp.extension_suffixes()[0],
    bool(standalone) or os.path.isdir(os.path.join(sys.base_prefix, "conda-meta")),
    [os.path.abspath(path) for path in sys.path if path and path not in library],
    packages,
    sysconfig.get_path("purelib"),
    sorted(library),
]))
"""

# What the agent makes anew in a venv.
_OWN = re.compile(r"bin/(python[0-9.]*|[Aa]ctivate.*)|pyvenv\.cfg")

# Of a conda prefix that is itself conda's: the packages that it keeps, and its other prefixes.
_NOT_IMPORTED = re.compile("pkgs|envs|conda-meta")

# The names of folders whose packages have been installed, and don't change.
_INSTALLED = ("site-packages", "dist-packages")

# Adds the folders that are not the venv's own.
_PATHS_FILE = "_launchpad.pth"

# A larger script in bin/ is a program.
_SCRIPT_BYTES = 1 << 20


class Interpreter(NamedTuple):
    """What the ranks' interpreter says of itself."""

    prefix: str
    base_prefix: str  # the same, unless it is a venv's
    version: str  # like "3.11"
    abi: str  # how names of its extension modules end, like ".cpython-311-x86_64-linux-gnu.so"
    relocatable: bool  # whether it also works from another folder
    folders: list[str]  # its sys.path, without the standard library
    editable: list[str]  # packages elsewhere that the finder of an editable install leads to
    packages: str  # its own site-packages
    library: list[str]  # the standard library

    @property
    def own(self) -> bool:
        """Whether its packages are sent as its own: those of a system's Python are sent from where they are."""
        return self.prefix != self.base_prefix or self.relocatable


class EnvironmentFile(NamedTuple):
    """A file or link to send; the fields but the last are as in commands.Sync."""

    path: str  # relative to the environment's folder
    permissions: int
    size: int
    modified: int
    link: str
    source: str  # where it is here


class Environment(NamedTuple):
    """An environment that hosts can be given; its files are listed apart."""

    name: str  # of its folder there; it is another one if anything in it is different
    prefix: str  # here
    version: str  # of its Python, like "3.11"
    abi: str
    python: str  # the interpreter that comes with it, relative to its folder; "" if a host has to have one
    venv: bool  # whether it is to be a venv there, of that interpreter
    texts: list[list[Any]]  # as in commands.MakeEnvironment
    outside: list[str]  # folders elsewhere that it imports from; hosts get copies of them
    installed: list[str]  # the folders here that have the packages


class Listing(NamedTuple):
    """The files of an environment, sorted, but for the compiled ones, which come and go as modules are imported."""

    files: list[EnvironmentFile]
    compiled: list[tuple[str, str]]  # the folders of those: where they are here, and their paths in the environment

    def all(self) -> list[EnvironmentFile]:
        """The compiled files, too."""
        return sorted([*self.files, *(file for top, to in self.compiled for file in _walk(top, to, None, []))])


def ask_interpreter(python: str, cwd: str, environ: Mapping[str, str]) -> Interpreter:
    """Have the interpreter say where it imports from. Raises UsageError if it can't."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            cwd=cwd,
            env=environ,
            check=False,
        )
        return Interpreter(*json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError):
        raise UsageError(f"--sync-env: {python} doesn't say what it imports; does it start?") from None


def describe(interpreter: Interpreter) -> tuple[Environment, Listing]:
    """What the interpreter's environment consists of. Raises OSError for a folder that can't be read."""
    prefix, base, version = interpreter.prefix, interpreter.base_prefix, interpreter.version
    is_venv = prefix != base
    files: list[EnvironmentFile] = []
    compiled: list[tuple[str, str]] = []
    if is_venv:
        files += _walk(prefix, "", _OWN, compiled)
        if interpreter.relocatable:
            files += _walk(base, "python", _NOT_IMPORTED, compiled)
    elif interpreter.relocatable:
        files += _walk(prefix, "", _NOT_IMPORTED, compiled)
    system, others = _elsewhere(interpreter)
    outside = _topmost([*others, *interpreter.editable])
    for number, folder in enumerate(system):
        files += _walk(folder, f"lib/site-{number}", None, compiled)
    packages = f"lib/python{version}/site-packages"
    if interpreter.own:
        packages = os.path.relpath(interpreter.packages, prefix)
    texts, kept = _texts(files, interpreter, packages, outside)
    lines = [_in_copy(folder, outside) for folder in others]
    lines += [f"import site; site.addsitedir('{HERE}/lib/site-{number}')" for number in range(len(system))]
    texts.append([f"{packages}/{_PATHS_FILE}", 0o644, "".join(f"{line}\n" for line in lines)])
    kept.sort()
    name = os.path.basename(prefix.rstrip("/")) or "root"
    python = f"{'python/' if is_venv else ''}bin/python{version}" if interpreter.relocatable else ""
    environment = Environment(
        name=f"env-{name}-{_digest(interpreter, kept, texts)}",
        prefix=prefix,
        version=version,
        abi=interpreter.abi,
        python=python,
        venv=is_venv or not interpreter.relocatable,
        texts=texts,
        outside=outside,
        installed=_installed(interpreter, system),
    )
    return environment, Listing(kept, compiled)


def files_outside(folder: str) -> list[SyncedFile]:
    """The files of a folder elsewhere. Links to files outside it are followed: strict editable installs have such.

    Raises UsageError if they are too many.
    """
    found = []
    for file in list_files(folder):
        path = os.path.join(folder, file.path)
        if file.link and not _link_within(path, folder) and os.path.isfile(path):
            facts = os.stat(path)
            file = SyncedFile(file.path, facts.st_mode & 0o777, facts.st_size, facts.st_mtime_ns, "")
        found.append(file)
    return found


def installed_folders(interpreter: Interpreter) -> list[str]:
    """The folders here that have the environment's packages."""
    return _installed(interpreter, _elsewhere(interpreter)[0])


def _installed(interpreter: Interpreter, system: Sequence[str]) -> list[str]:
    return [*([interpreter.packages] if interpreter.own else []), *system]


def _elsewhere(interpreter: Interpreter) -> tuple[list[str], list[str]]:
    """The folders outside the prefix: those of installed packages, and those that a .pth file or PYTHONPATH names."""
    prefixes = [interpreter.prefix] if interpreter.prefix != interpreter.base_prefix else []
    prefixes += [interpreter.base_prefix] if interpreter.relocatable else []
    system, outside = [], []
    for folder in dict.fromkeys(interpreter.folders):
        if any(_is_in(folder, prefix) for prefix in prefixes) or not os.path.isdir(folder):
            continue
        if os.path.basename(folder) in _INSTALLED:
            system.append(folder)
        elif not any(_is_in(folder, library) for library in interpreter.library):
            outside.append(folder)
    return system, outside


def _topmost(paths: Sequence[str]) -> list[str]:
    """The folders of these, or of these files, that are not inside another one."""
    folders = sorted({os.path.dirname(path) if path.endswith(".py") else path for path in paths})
    return [one for one in folders if not any(one != other and _is_in(one, other) for other in folders)]


def _in_copy(path: str, outside: Sequence[str]) -> str:
    """Where the path is on a host."""
    folder = next(folder for folder in outside if _is_in(path, folder))
    return f"{CACHE}/{name_of_copy(folder)}{path.removeprefix(folder)}"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _walk(top: str, to: str, but: re.Pattern[str] | None, compiled: list[tuple[str, str]]) -> Iterator[EnvironmentFile]:
    """The files below a folder, whose path in the environment is `to`; without those whose path below it matches.

    Folders of compiled files are only noted in `compiled`.
    """
    left = [(top, "", f"{to}/" if to else "")]
    seen = set()
    while left:
        folder, relative, inside = left.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if but is not None and but.fullmatch(f"{relative}{name}"):
                    continue
                try:
                    linked = entry.is_symlink()
                    if linked and (link := _link_within(entry.path, top)):
                        yield EnvironmentFile(inside + name, 0o777, 0, 0, link, entry.path)
                    elif not entry.is_dir():
                        facts = entry.stat()
                        if stat.S_ISREG(facts.st_mode):
                            mode, size, modified = facts.st_mode & 0o777, facts.st_size, facts.st_mtime_ns
                            yield EnvironmentFile(inside + name, mode, size, modified, "", entry.path)
                    elif name == "__pycache__":
                        compiled.append((entry.path, inside + name))
                    else:
                        if linked:  # it leads out, maybe to a folder that we are in
                            facts = entry.stat()
                            if (facts.st_dev, facts.st_ino) in seen:
                                continue
                            seen.add((facts.st_dev, facts.st_ino))
                        left.append((entry.path, f"{relative}{name}/", f"{inside}{name}/"))
                except OSError:  # a link that leads nowhere
                    continue


def _link_within(path: str, top: str) -> str:
    """A link's target, relative to its folder, if it stays below `top`; else ""."""
    folder = os.path.dirname(path)
    target = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return os.path.relpath(target, folder) if _is_in(target, top) else ""


def _texts(
    files: Sequence[EnvironmentFile], interpreter: Interpreter, packages: str, outside: Sequence[str]
) -> tuple[list[list[Any]], list[EnvironmentFile]]:
    """The small files with paths in them, which are others on a host, with marks in their place; and the rest."""
    texts: list[list[Any]] = []
    kept = []
    places = {f"{prefix}/": f"{HERE}/" for prefix in (interpreter.prefix, os.path.realpath(interpreter.prefix))}
    copies = {folder: _in_copy(folder, outside) for folder in outside}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        text = ""
        if file.link or file.size > _SCRIPT_BYTES:
            pass
        elif folder == "bin":
            text = _replaced(file.source, places, start="#!")
        elif folder == packages and name.startswith("__editable__"):
            text = _replaced(file.source, copies)
        if text:
            texts.append([file.path, file.permissions, text])
        else:
            kept.append(file)
    return sorted(texts), kept


def _replaced(path: str, places: Mapping[str, str], start: str = "") -> str:
    """The file's text with others in place of these; "" if there are none, or it doesn't start so, or is no text."""
    try:
        with open(path, encoding="utf-8") as file:
            before = file.read(len(start))
            if before != start:
                return ""
            before += file.read()
    except (OSError, ValueError):
        return ""
    text = before
    for old, new in places.items():
        text = text.replace(old, new)
    return text if text != before else ""


def _digest(interpreter: Interpreter, files: Sequence[EnvironmentFile], texts: Sequence[Sequence[Any]]) -> str:
    told = json.dumps([interpreter.version, interpreter.abi, texts])
    lines = [f"{path}\0{mode:o} {size} {modified} {link}" for path, mode, size, modified, link, _ in files]
    return hashlib.sha256("\0".join([told, *lines]).encode("utf-8", "surrogateescape")).hexdigest()[:16]


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
