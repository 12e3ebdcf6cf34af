"""`--sync-env`: what the environment of the ranks' interpreter consists of on this machine.

That is what the interpreter imports besides its standard library: the packages of its prefix (a venv, or a conda
prefix, which also holds the interpreter itself), those of the system if it sees them, and folders elsewhere that an
editable install or PYTHONPATH leads to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.errors import UsageError
from launchpad.head.environment_files import Entry, EnvironmentFolder, Listing, is_in, walk
from launchpad.head.folder_listing import name_of_copy
from launchpad.head.outside_files import topmost
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
    folders: list[EnvironmentFolder] = []
    compiled: list[tuple[str, str]] = []
    if is_venv:
        folders += walk(prefix, "", _OWN, compiled)
        if interpreter.relocatable:
            folders += walk(base, "python", _NOT_IMPORTED, compiled)
    elif interpreter.relocatable:
        folders += walk(prefix, "", _NOT_IMPORTED, compiled)
    system, others = _elsewhere(interpreter)
    outside = topmost([*others, *interpreter.editable])
    for number, folder in enumerate(system):
        folders += walk(folder, f"lib/site-{number}", None, compiled)
    folders.sort()
    packages = f"lib/python{version}/site-packages"
    if interpreter.own:
        packages = os.path.relpath(interpreter.packages, prefix)
    texts = _texts(folders, interpreter, packages, outside)
    lines = [_in_copy(folder, outside) for folder in others]
    lines += [f"import site; site.addsitedir('{HERE}/lib/site-{number}')" for number in range(len(system))]
    texts.append([f"{packages}/{_PATHS_FILE}", 0o644, "".join(f"{line}\n" for line in lines)])
    name = os.path.basename(prefix.rstrip("/")) or "root"
    python = f"{'python/' if is_venv else ''}bin/python{version}" if interpreter.relocatable else ""
    environment = Environment(
        name=f"env-{name}-{_digest(interpreter, folders, texts)}",
        prefix=prefix,
        version=version,
        abi=interpreter.abi,
        python=python,
        venv=is_venv or not interpreter.relocatable,
        texts=texts,
        outside=outside,
        installed=_installed(interpreter, system),
    )
    return environment, Listing(folders, compiled, _places(interpreter, system, outside))


def _places(interpreter: Interpreter, system: Sequence[str], outside: Sequence[str]) -> dict[str, str]:
    """Where the folders here will be on a host."""
    prefix, base = interpreter.prefix, interpreter.base_prefix
    places = {folder: f"{HERE}/lib/site-{number}" for number, folder in enumerate(system)}
    places |= {folder: _in_copy(folder, outside) for folder in outside}
    if interpreter.own:
        places[prefix] = HERE
        if prefix != base and interpreter.relocatable:
            places[base] = f"{HERE}/python"
    return {os.path.realpath(folder): place for folder, place in places.items()} | places


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
        if any(is_in(folder, prefix) for prefix in prefixes) or not os.path.isdir(folder):
            continue
        if os.path.basename(folder) in _INSTALLED:
            system.append(folder)
        elif not any(is_in(folder, library) for library in interpreter.library):
            outside.append(folder)
    return system, outside


def _in_copy(path: str, outside: Sequence[str]) -> str:
    """Where the path is on a host."""
    folder = next(folder for folder in outside if is_in(path, folder))
    return f"{CACHE}/{name_of_copy(folder)}{path.removeprefix(folder)}"


def _texts(
    folders: Sequence[EnvironmentFolder], interpreter: Interpreter, packages: str, outside: Sequence[str]
) -> list[list[Any]]:
    """Take out the small files with paths in them, which are others on a host. Returns them, with marks for those."""
    texts: list[list[Any]] = []
    places = {f"{prefix}/": f"{HERE}/" for prefix in (interpreter.prefix, os.path.realpath(interpreter.prefix))}
    copies = {folder: _in_copy(folder, outside) for folder in outside}
    for folder in folders:
        if folder.path not in ("bin", packages):
            continue
        kept: list[Entry] = []
        for entry in folder.entries:
            name, permissions, size, _, link = entry
            text, source = "", f"{folder.source}/{name}"
            if link or size > _SCRIPT_BYTES:
                pass
            elif folder.path == "bin":
                text = _replaced(source, places, start="#!")
            elif name.startswith("__editable__"):
                text = _replaced(source, copies)
            if text:
                texts.append([f"{folder.path}/{name}", permissions, text])
            else:
                kept.append(entry)
        folder.entries[:] = kept
    return sorted(texts)


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


def _digest(interpreter: Interpreter, folders: Sequence[EnvironmentFolder], texts: Sequence[Sequence[Any]]) -> str:
    found = hashlib.sha256(json.dumps([interpreter.version, interpreter.abi, texts]).encode())
    for folder in folders:
        found.update(repr((folder.path, folder.entries)).encode())  # which escapes what can't be encoded
    return found.hexdigest()[:16]
