"""What a node needs of launchpad, and how it is started there: any Python and sshd are enough."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from launchpad.errors import NodeError
from launchpad.named import NamedTuple
from launchpad.protocol import wire
from launchpad.protocol.commands import Resume
from launchpad.protocol.events import HoldEnded
from launchpad.transport.ssh.bootstrap import FOR_RANKS, HAVE, MARK, PACKAGE

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))
_CONTENTS = (
    "__init__.py",
    "_version.py",
    "elf.py",
    "linux.py",
    "listeners.py",
    "mpi_library.py",
    "named.py",
    "agent",
    "protocol",
    "forkserver",
    "image",
    "rank",
)

# With what functions are pickled: both sides have to have the same version.
_FOR_FUNCTIONS = "cloudpickle"

# What a script imports from an installed launchpad, and what the ranks of `launchpad bench` run; where none is
# installed, ranks find this on their path.
_FOR_RANKS = ("__init__.py", "_version.py", "errors.py", "time_left.py", "collectives", "bench")

# The exit code of a Python that did not get the whole first line: somebody else has read it, or there is no input.
CUT = os.EX_DATAERR

# Reads its first line byte by byte, so that nothing of what follows is taken, and executes the string in it. There is
# no quote, $ or backslash in it that a shell could make something of.
_RUN = (
    "import io,os;stdin=io.FileIO(0,closefd=False);line=stdin.readline();"
    f"len(line)=={{}} or os._exit({CUT});exec(eval(line));main(stdin)"
)

# The Pythons that may be used where python3 is too old; first the one like our own, for functions and --sync-env.
_VERSIONS = dict.fromkeys(f"3.{minor}" for minor in (sys.version_info[1], 14, 13, 12, 11, 10))

# What means something to csh (!, a newline) or fish (a backslash) even within single quotes.
_QUOTED_OTHERWISE = re.compile(r"[!\n\\]")

# What is written as octal numbers, so that neither that shell nor sh makes anything of it.
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 =;:,./_()\[\]{}<>|&*?~#-]")

_bundling = threading.Lock()

# What the shell in a container says: from then on --enter has done its part.
ENTERED = b"launchpad-entered\n"


@functools.cache
def bootstrap() -> bytes:
    """The first line on a link to a new agent: bootstrap.py as a string."""
    return _as_line(os.path.join(_HERE, "bootstrap.py"))


@functools.cache
def bridge() -> bytes:
    """The first line on a link to an agent that is held on the node: agent/bridge.py as a string."""
    return _as_line(os.path.join(_ROOT, "agent", "bridge.py"))


def _as_line(path: str) -> bytes:
    with open(path) as file:
        return ascii(file.read()).encode() + b"\n"


def held_at(place: str, secret: str, taken: int, done: int = -1) -> str:
    """What a Startup has for an agent that is held in this folder. The rest is as in Resume."""
    gone = "nothing of the job is left there: its time without a head was over, or the host was started again"
    said = MARK + HAVE + b"\n", os.fsencode(place), wire.encode(Resume(secret, taken, done))
    return " ".join(one.hex() for one in (*said, wire.encode(HoldEnded(time.monotonic_ns(), gone))))


def digest() -> str:
    """The hash of what a host needs: by this name it has it already if it has been used before.

    Raises NodeError where this installation is not whole.
    """
    with _bundling:  # many hosts need it at the same time
        return _digest()


def archive() -> bytes:
    """A zip: agent and forkserver, under a package name of its own, and what ranks import."""
    with _bundling:
        return _zip()


def packed() -> bytes:
    """What is sent to a host that needs it: the size and the hash of the zip, on a line, and the zip."""
    data = archive()
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}\n".encode() + data


@functools.cache
def _digest() -> str:
    found = hashlib.sha256()
    for name, data in _contents().items():
        found.update(f"{len(data)} {name}\n".encode() + data)
    return found.hexdigest()


@functools.cache
def _zip() -> bytes:
    import zipfile  # with what that imports, this takes 40 ms

    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        for name, data in _contents().items():
            zipped.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


@functools.cache
def _contents() -> dict[str, bytes]:
    """The files, by their names in the bundle."""
    found = {}
    for package, root, contents in (
        (PACKAGE, _ROOT, _CONTENTS),
        (f"{FOR_RANKS}/launchpad", _ROOT, _FOR_RANKS),
        (f"{FOR_RANKS}/{_FOR_FUNCTIONS}", _folder_of(_FOR_FUNCTIONS), ("",)),
    ):
        for path in sorted(_files(root, contents)):
            with open(os.path.join(root, path), "rb") as file:
                found[f"{package}/{path}"] = file.read()
    return found


def _files(root: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name.endswith(".py"):
            yield name
        for folder, _, files in os.walk(os.path.join(root, name)):
            yield from (os.path.relpath(os.path.join(folder, one), root) for one in files if one.endswith(".py"))


def _folder_of(package: str) -> str:
    """Where a package of one folder, in pure Python, is installed here."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise NodeError(f"{sys.executable} has no {package}, which launchpad needs: pip install {package}")
    return os.path.dirname(spec.origin)


class Startup(NamedTuple):
    """How to start on a node, and what."""

    python: str  # a path or a name
    exact: bool = False  # use no other Python; otherwise python3 where there is no such file, or a newer one
    enter: tuple[str, ...] = ()  # the words of --enter: a command that runs another one in a container
    asked: str = "{}"  # JSON for agent/arrival.py: {} for the agent
    held: str = ""  # start none, but be joined with the one that `held_at` says

    @property
    def program(self) -> bytes:
        """The first line on the link."""
        return bridge() if self.held else bootstrap()

    @property
    def sought(self) -> str:
        """The Python that may be missing, so that python3 is used; "" for none."""
        return "" if self.exact else self.python

    @property
    def words(self) -> list[str]:
        """The command line."""
        find = f"p={shlex.quote(self.python)}"
        others: list[str] = []
        if not self.exact:
            others += _VERSIONS
            names = " ".join(["python3", *(f"python{version}" for version in others), "python3"])
            find += f'; [ -x "$p" ] || for p in {names}; do command -v $p >/dev/null && break; done'
        if self.enter:
            find = f"echo {ENTERED.decode().strip()}; {find}"
        run = _RUN.format(len(self.program))
        # The last word is for a listing of processes.
        words = " ".join([*others, "launchpad-agent"])
        return [*self.enter, "/bin/sh", "-c", f'{find}; exec "$p" -I -S -c "{run}" {words}']

    @property
    def command(self) -> str:
        """The same as what sshd is to hand to the user's login shell, whichever that is."""
        line = f"exec {shlex.join(self.words)}"
        if not _QUOTED_OTHERWISE.search(line):
            return line
        plain = _NOT_PLAIN.sub(lambda found: "".join(f"\\0{byte:03o}" for byte in os.fsencode(found[0])), line)
        return f"""exec /bin/sh -c 'eval "$(printf %b "{plain}")"'"""
