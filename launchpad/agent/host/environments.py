"""Keeps environments that came from the head's machine (`--sync-env`), and has ranks run in one.

Each is a folder beside the copies of `--sync`. Its files come as those do; then it is made a venv of a Python of this
node, or comes with its own. A mark in it, written last, says that it works.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence

from ...protocol.commands import CACHE, HERE, FindEnvironment, MakeEnvironment, Start
from ...protocol.events import EnvironmentFound, EnvironmentMade
from ..part import AgentHub, AgentPart
from .synced_folder import base_folder, describe, hold, path_in

# Where Pythons are, besides PATH, which is short for commands that come over SSH.
_PLACES = (
    "/usr/bin",
    "/usr/local/bin",
    "/opt/*/bin",
    "~/.local/bin",
    "~/.pyenv/versions/*/bin",
    "~/.local/share/uv/python/*/bin",
    "~/*conda*/bin",
    "~/miniforge*/bin",
)

# A Python may have to be loaded over a network.
_TRIAL_SECONDS = 60.0

MARK = "launchpad.json"


class Environments(AgentPart):
    """Carries out the head's FindEnvironment and MakeEnvironment."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._python = ""  # the interpreter of the environment that the ranks run in
        self._libraries: list[str] = []  # folders, for the dynamic linker

    def on(self, command: FindEnvironment | MakeEnvironment) -> None:
        """Look for one, or have one work."""
        answer = find(command) if isinstance(command, FindEnvironment) else make(command)
        self._python = answer.python
        if isinstance(command, FindEnvironment):
            self._libraries = command.libraries
        if self._python:
            self._libraries = _library_folders(os.path.dirname(os.path.dirname(self._python)), self._libraries)
        self._activate(os.environ)  # for a health check
        self._hub.outbox.say(answer)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Let ranks find its programs."""
        self._activate(environ)

    def _activate(self, environ: MutableMapping[str, str]) -> None:
        """What `activate` in a venv does. Libraries that were found by an absolute path are found by a variable."""
        if self._python:
            folder = os.path.dirname(self._python)
            environ["VIRTUAL_ENV"] = os.path.dirname(folder)
            _put_first(environ, "PATH", folder)
            _put_first(environ, "LD_LIBRARY_PATH", os.pathsep.join(self._libraries))


def _put_first(environ: MutableMapping[str, str], name: str, paths: str) -> None:
    before = environ.get(name) or os.environ.get(name, "")
    if paths and not f"{before}{os.pathsep}".startswith(f"{paths}{os.pathsep}"):
        environ[name] = os.pathsep.join(filter(None, (paths, before)))


def _library_folders(folder: str, beside: Sequence[str]) -> list[str]:
    """Where shared libraries look for others: those of the environment, and those `beside` it."""
    try:
        with open(os.path.join(folder, MARK)) as file:
            own: list[str] = json.load(file).get("libraries", [])
    except (OSError, ValueError):  # it is being removed
        own = []
    return list(dict.fromkeys(_placed(one, folder) for one in (*own, *beside)))


def _placed(text: str, folder: str) -> str:
    return text.replace(HERE, folder).replace(CACHE, os.path.dirname(folder))


def find(command: FindEnvironment) -> EnvironmentFound:
    """Whether it is here, and what it could be made with."""
    python = base = problem = ""
    try:
        folder = path_in(base_folder(), command.name)
        if os.path.exists(os.path.join(folder, MARK)) and os.access(_python_in(folder), os.X_OK):
            python = _python_in(folder)
            os.utime(os.path.join(folder, MARK))  # it is used
            hold(folder)  # for as long as this process lives
        elif not command.python:
            base = next(pythons(command.version, command.abi), "")
    except (OSError, ValueError) as error:
        problem = describe(error)
    return EnvironmentFound(time.monotonic_ns(), python, base, os.uname().machine, glibc(), problem)


def make(command: MakeEnvironment) -> EnvironmentMade:
    """Write what differs from machine to machine, try the interpreter, and mark the environment as whole."""
    try:
        folder = path_in(base_folder(), command.name)
        if command.venv:
            _make_venv(folder, command.python, command.version)
        for path, permissions, text in command.texts:
            _write(path_in(folder, path), _placed(text, folder), permissions)
        python = _python_in(folder)
        problem = _try(python, folder, [_placed(one, folder) for one in command.libraries])
        if not problem:
            mark = {"origin": command.origin, "libraries": command.libraries}
            _write(os.path.join(folder, MARK), json.dumps(mark), 0o600)
    except (OSError, ValueError) as error:
        return EnvironmentMade(time.monotonic_ns(), "", describe(error))
    return EnvironmentMade(time.monotonic_ns(), "" if problem else python, problem)


def _python_in(folder: str) -> str:
    return os.path.join(folder, "bin", "python")


def _make_venv(folder: str, python: str, version: str) -> None:
    """What python -m venv makes, which is a package of its own on some systems."""
    base = os.path.join(folder, python)
    target = os.path.relpath(base, os.path.join(folder, "bin")) if base.startswith(folder + "/") else base
    for name in ("python", "python3", f"python{version}"):
        _put(os.path.join(folder, "bin", name), functools.partial(os.symlink, target))
    lines = (f"home = {os.path.dirname(base)}", "include-system-site-packages = false", f"version = {version}", "")
    _write(os.path.join(folder, "pyvenv.cfg"), "\n".join(lines), 0o644)


def _write(path: str, text: str, permissions: int) -> None:
    """Replace the file: another environment may have linked the one that is there."""

    def make(new: str) -> None:
        with open(new, "x", encoding="utf-8") as file:
            file.write(text)
        os.chmod(new, permissions)

    _put(path, make)


def _put(path: str, make: Callable[[str], None]) -> None:
    """Have it made beside, and put it in place at once: another host that has the same home may be about to, too."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        make(new)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise


def _try(python: str, folder: str, libraries: Sequence[str]) -> str:
    """Why the interpreter doesn't work; "" if it does."""
    argv = [python, "-c", "import sys; print(sys.prefix)"]
    environ = dict(os.environ)
    _put_first(environ, "LD_LIBRARY_PATH", os.pathsep.join(libraries))
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_SECONDS, check=False, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"{python} doesn't start within {_TRIAL_SECONDS:g} s"
    said = (done.stdout or done.stderr).decode(errors="replace").splitlines()[-1:]
    if done.returncode == 0 and said and os.path.realpath(said[0]) == os.path.realpath(folder):
        return ""
    return f"{python} doesn't work: {said[0] if said else f'exit code {done.returncode}'}"


def pythons(version: str, abi: str) -> Iterator[str]:
    """The interpreters of this version here whose extension modules are named so."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}" == version
    if own and importlib.machinery.EXTENSION_SUFFIXES[0] == abi:
        yield getattr(sys, "_base_executable", "") or sys.executable
    for path in _candidates(f"python{version}"):
        argv = [path, "-I", "-S", "-c", "import _imp; print(_imp.extension_suffixes()[0])"]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.stdout.decode(errors="replace").strip() == abi:
            yield path


def _candidates(name: str) -> Sequence[str]:
    found = [shutil.which(name)]
    for place in _PLACES:
        found += sorted(glob.glob(os.path.join(os.path.expanduser(place), name)))
    return list(dict.fromkeys(path for path in found if path and os.access(path, os.X_OK)))


def glibc() -> str:
    """The C library's version; "" with another one."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (ValueError, OSError):  # another C library
        return ""
