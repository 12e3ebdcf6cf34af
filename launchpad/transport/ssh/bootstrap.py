"""Run on a node with nothing installed: unpack the bundle, unless it is there already, and run agent/arrival.py of it.

This file is sent as text, as the first line on the link, and executed by any Python (see `transport/ssh/bundle.py`).
So it imports nothing of ours, and even Python 3.6 can run it to look for a newer one, or to say that it is too old. The
second line is the bundle's hash, and what arrival.py is to do, as JSON. The answer is MARK and then HAVE, or NEED, upon
which the size and the hash of a zip follow, and that; or a sentence that says what went wrong. A shell's greeting may
come before the mark. The words of the command line are the minor versions of Python that may be used instead, the best
one first.
"""

import io
import json
import os
import sys
from typing import Iterator, NoReturn  # noqa: UP035

# In two parts, so that a shell that prints this text does not answer with the mark.
MARK = b"\0" + b"launchpad "
HAVE = b"have"
NEED = b"need"

# The package name inside the bundle. It differs from that of an installed launchpad.
PACKAGE = "launchpad_node"

# The directory next to it, with what a rank may import under launchpad's own name (agent/ranks/starter.py).
FOR_RANKS = "for_ranks"

# Where Pythons are, besides PATH, which is short for commands that come over SSH.
PLACES = (
    "/usr/local/bin",
    "/usr/bin",
    "/opt/*/bin",
    "~/.local/bin",
    "~/.pyenv/versions/*/bin",
    "~/.local/share/uv/python/*/bin",
    "~/*conda*/bin",
    "~/miniforge*/bin",
)

# What a newer Python runs: this file and what followed it, from the descriptor that its second word names.
_RUN_AGAIN = (
    "import io,sys;given=io.FileIO(int(sys.argv[1]));line=given.readline();exec(eval(line));"
    "main(io.FileIO(0,closefd=False),given.readline())"
)

# Bundles that were not used for this long belong to an old version.
_KEPT_SECONDS = 30 * 86400


def main(stdin: io.FileIO, given: bytes = b"") -> None:
    """Read the second line from `stdin`, a raw file, unless it is `given`. Never returns."""
    given = given or stdin.readline()
    digest, text = given.decode().split(None, 1)
    asked = json.loads(text)
    if sys.version_info < (3, 10):  # noqa: UP036
        _run_newer(given)
        version = ".".join(map(str, sys.version_info[:2]))
        todo = "install one there" if sys.argv[1:-1] else "name another one with --python"
        _refuse(f"its Python ({sys.executable}) is {version}, and launchpad needs 3.10 or newer: {todo}")
    if not sys.platform.startswith("linux"):
        _refuse(f"it runs {sys.platform}; launchpad's ranks need Linux")
    if "checkup" in asked:
        sys.dont_write_bytecode = True
        sys.path.insert(0, _without_a_trace(stdin, digest))
        _arrive(asked)
    tried = []
    data = b""
    for base in _bases():
        folder = os.path.join(base, "agent-" + digest)
        try:
            _make_private(base)
            if os.path.isdir(folder):
                _keep(folder)
                if not data:
                    _say(HAVE)
                break
            unpacking = _make_unpacking(base)
            if not data:
                os.rmdir(unpacking)  # it was only a test; nothing must be left if the head is gone by now
                _say(NEED)
                data = _receive(stdin)
                os.mkdir(unpacking, 0o700)
            _unpack(data, unpacking, folder)
            _forget_old(base)
            break
        except OSError as error:
            tried.append(f"{base}: {error.strerror or error}")
    else:
        reason = f"can't store the agent ({'; '.join(tried)}); free some space, or provide a writable home directory"
        if not data:
            _refuse(reason)
        os.write(2, reason.encode("utf-8", "replace"))  # we have already answered; the head now expects frames
        os._exit(1)
    sys.path.insert(0, folder)
    _arrive(asked)


def _run_newer(given: bytes) -> None:
    """Have a Python that is new enough go on from here, if there is one."""
    import tempfile

    python = next(_newer(sys.argv[1:-1]), "")
    if not python:
        return
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(globals()["line"] + given)
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        os.execv(python, [python, "-I", "-S", "-c", _RUN_AGAIN, str(file.fileno()), sys.argv[-1]])


def _newer(versions: "list[str]") -> "Iterator[str]":
    """The Pythons here of these versions that do start."""
    import glob
    import subprocess

    places = os.environ.get("PATH", "").split(os.pathsep)
    places += [path for place in PLACES for path in sorted(glob.glob(os.path.expanduser(place)))]
    for version in versions:
        for place in places:
            path = os.path.join(place, "python" + version)
            if os.access(path, os.X_OK):
                check = "import sys; sys.exit(sys.version_info < (3, 10))"
                argv = [path, "-I", "-S", "-c", check]
                if (
                    subprocess.call(
                        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                    == 0
                ):
                    yield path


def _arrive(asked: "dict[str, object]") -> NoReturn:
    arrival = __import__(PACKAGE + ".agent.arrival", fromlist=["main"])
    arrival.main(asked)
    os._exit(1)  # it does not return


def _without_a_trace(stdin: io.FileIO, digest: str) -> str:
    """Where the bundle can be imported from: its folder if it is there already, else memory."""
    for base in _bases():
        folder = os.path.join(base, "agent-" + digest)
        if _is_private(base) and os.path.isdir(folder):
            _say(HAVE)
            return folder
    _say(NEED)
    memory = os.memfd_create("launchpad")
    os.write(memory, _receive(stdin))
    return f"/proc/self/fd/{memory}"


def _say(word: bytes) -> None:
    try:
        os.write(1, MARK + word + b"\n")
    except OSError:  # the head is gone
        os._exit(1)


def _refuse(reason: str) -> NoReturn:
    _say(reason.encode("utf-8", "replace"))
    os._exit(1)


def _bases() -> Iterator[str]:
    """Directories for the bundle: in the user's cache, else in a place where anyone may create one."""
    home = os.path.expanduser("~")
    yield os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "launchpad")
    for shared in ("/var/tmp", "/tmp", "/dev/shm"):
        yield os.path.join(shared, f"launchpad-{os.getuid()}")


def _make_private(folder: str) -> None:
    """Create the directory, or check that it is ours and closed to others: we are going to run what is in it."""
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    if not _is_private(folder):
        raise OSError("not a directory that only you can enter")


def _is_private(folder: str) -> bool:
    """Whether only the user can enter it. It may be a link of the user's own, to another disk."""
    try:
        facts = os.stat(folder)
        owners = {facts.st_uid, os.lstat(folder).st_uid}
    except OSError:
        return False
    return owners == {os.getuid()} and facts.st_mode & 0o170077 == 0o040000


def _keep(folder: str) -> None:
    """Mark the bundle as used, for _forget_old."""
    try:
        os.utime(folder)
    except OSError:  # a read-only home
        pass


def _make_unpacking(base: str) -> str:
    path = os.path.join(base, f"unpacking-{os.getpid()}-{os.urandom(4).hex()}")
    os.mkdir(path, 0o700)
    return path


def _receive(stdin: io.FileIO) -> bytes:
    import hashlib

    try:
        size, digest = stdin.readline().decode().split()
    except (OSError, ValueError):  # the head is gone
        os._exit(1)
    data = b""
    while len(data) < int(size):
        try:
            piece = stdin.read(int(size) - len(data))
        except OSError:
            piece = b""
        if not piece:
            os._exit(1)
        data += piece
    if hashlib.sha256(data).hexdigest() != digest:
        os.write(2, b"the bundle arrived damaged: its hash is wrong\n")
        os._exit(1)
    return data


def _unpack(data: bytes, unpacking: str, folder: str) -> None:
    import shutil
    import zipfile

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as bundle:
            bundle.extractall(unpacking)
        os.rename(unpacking, folder)
    except OSError:
        shutil.rmtree(unpacking, ignore_errors=True)
        if not os.path.isdir(folder):  # unless another launchpad was faster
            raise


def _forget_old(base: str) -> None:
    import shutil
    import time

    for name in os.listdir(base):
        path = os.path.join(base, name)
        try:
            if name.startswith(("agent-", "unpacking-")) and time.time() - os.stat(path).st_mtime > _KEPT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # already gone
            pass
