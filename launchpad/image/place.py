"""Where the keeper of images listens, and where interpreters are. The command looks here first: it imports little."""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False  # as in channel.py
if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_LARGEST_PRIME = 4_294_967_291  # below 2**32

# Whether the package was sent to this node (transport/ssh/bundle.py).
_SENT = os.path.basename(PACKAGE) == "launchpad_node"


def folder(environ: Mapping[str, str]) -> str:
    """The private folder for our sockets; it need not exist."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime) and not _SENT:
        return os.path.join(runtime, "launchpad")
    # logind removes the runtime folder when the last session of the user ends, and with SSH that is ours.
    shared = environ.get("TMPDIR", "") if _SENT else ""
    return os.path.join(shared if os.path.isabs(shared) else "/tmp", f"launchpad-warm-{os.getuid()}")


def path(environ: Mapping[str, str]) -> str:
    """Where the keeper of this installation listens."""
    number = int.from_bytes(os.fsencode(PACKAGE), "big") % _LARGEST_PRIME
    return os.path.join(folder(environ), f"warm-{number:08x}")


def keeper_command(function: str) -> list[str]:
    """The command line of a keeper (forkserver/keeper.py). `function`: what it runs."""
    root, package = os.path.split(PACKAGE)
    code = f"import sys; sys.path.insert(0, {root!r}); from {package}.forkserver import keeper; keeper.{function}()"
    return [sys.executable, "-I", "-S", "-c", code]


def is_private(place: str) -> bool:
    """Whether this is a folder that only this user can enter."""
    try:
        facts = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def interpreter(path: str) -> str:
    """The one name for an interpreter that has several in its folder: of python, python3 and python3.12 the last."""
    name = os.path.join(os.path.dirname(path), os.path.basename(os.path.realpath(path)))
    return name if os.path.realpath(name) == os.path.realpath(path) else path


def exists(environ: Mapping[str, str]) -> bool:
    """Whether there is, or was, a keeper of this installation."""
    return os.path.exists(path(environ))
