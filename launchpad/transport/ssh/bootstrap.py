"""Runs on a node where nothing is installed: unpacks what was sent, unless it is there already, and becomes the guard.

It is sent as text, the first line on the link, and executed by any Python (`transport/ssh/parcel.py` says how); so it
imports nothing of ours, and even a Python 3.6 can say that it is too old. The second line is the parcel's hash and
size. It answers with MARK and one of: HAVE; NEED, and then the parcel follows; or why it can't go on. A shell's
greeting may stand before the mark.
"""

import io
import os
import sys
from typing import Iterator, NoReturn  # noqa: UP035

MARK = b"\0launchpad "
HAVE = b"have"
NEED = b"need"

# The parcel's own package: an installed launchpad is another one.
PACKAGE = "launchpad_node"

# Beside it: a folder with what a rank may import under launchpad's own name (agent/starter.py).
FOR_RANKS = "for_ranks"

# What nobody has used for so long is of an older version.
_KEPT_SECONDS = 30 * 86400


def main(stdin: io.FileIO) -> None:
    """Read the second line from `stdin`, a raw file; never returns."""
    digest, size = stdin.readline().decode().split()
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:2]))
        _refuse(f"its Python ({sys.executable}) is {version}; launchpad needs 3.10 or newer")
    if not sys.platform.startswith("linux"):
        _refuse(f"it runs {sys.platform}; launchpad's ranks need Linux")
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
                os.rmdir(unpacking)  # it could be made; who is told so may be gone by now
                _say(NEED)
                data = _receive(stdin, int(size), digest)
                os.mkdir(unpacking, 0o700)
            _unpack(data, unpacking, folder)
            _forget_old(base)
            break
        except OSError as error:
            tried.append(f"{base}: {error.strerror or error}")
    else:
        reason = f"no folder can be made for the agent ({'; '.join(tried)}); make room, or a home folder"
        if not data:
            _refuse(reason)
        os.write(2, reason.encode("utf-8", "replace"))  # our answer has been given: frames are expected from here on
        os._exit(1)
    sys.path.insert(0, folder)
    guard = __import__(PACKAGE + ".agent.guard", fromlist=["main"])
    guard.main(None)


def _say(word: bytes) -> None:
    try:
        os.write(1, MARK + word + b"\n")
    except OSError:  # nobody listens any more
        os._exit(1)


def _refuse(reason: str) -> NoReturn:
    _say(reason.encode("utf-8", "replace"))
    os._exit(1)


def _bases() -> Iterator[str]:
    """Folders to keep it in: the user's cache; else one of our own where everybody may make one."""
    home = os.path.expanduser("~")
    yield os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "launchpad")
    for shared in ("/var/tmp", "/tmp", "/dev/shm"):
        yield os.path.join(shared, f"launchpad-{os.getuid()}")


def _make_private(folder: str) -> None:
    """Make it, or find it ours and closed to others: what lies there is going to be run."""
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    facts = os.lstat(folder)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o170077 != 0o040000:
        raise OSError("not a folder that only you can enter")


def _keep(folder: str) -> None:
    """It is used: see _forget_old."""
    try:
        os.utime(folder)
    except OSError:  # a home that can only be read
        pass


def _make_unpacking(base: str) -> str:
    path = os.path.join(base, f"unpacking-{os.getpid()}-{os.urandom(4).hex()}")
    os.mkdir(path, 0o700)
    return path


def _receive(stdin: io.FileIO, size: int, digest: str) -> bytes:
    import hashlib

    data = b""
    while len(data) < size:
        try:
            piece = stdin.read(size - len(data))
        except OSError:
            piece = b""
        if not piece:
            os._exit(1)
        data += piece
    if hashlib.sha256(data).hexdigest() != digest:
        os.write(2, b"what was received is not what was sent\n")
        os._exit(1)
    return data


def _unpack(data: bytes, unpacking: str, folder: str) -> None:
    import shutil
    import zipfile

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parcel:
            parcel.extractall(unpacking)
        os.rename(unpacking, folder)
    except OSError:
        shutil.rmtree(unpacking, ignore_errors=True)
        if not os.path.isdir(folder):  # or another launchpad was faster
            raise


def _forget_old(base: str) -> None:
    import shutil
    import time

    for name in os.listdir(base):
        path = os.path.join(base, name)
        try:
            if name.startswith(("agent-", "unpacking-")) and time.time() - os.stat(path).st_mtime > _KEPT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # gone by now
            pass
