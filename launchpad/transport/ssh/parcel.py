"""What a node needs of launchpad, and how it is started there: any Python and sshd are enough."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shlex
import zipfile

from launchpad.transport.ssh.bootstrap import PACKAGE

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))
_CONTENTS = ("__init__.py", "commands.py", "events.py", "wire.py", "agent", "nursery")

# Reads its first line byte by byte, so that nothing of what follows is taken, and executes the string in it. There is
# no quote, $ or backslash in it that a shell could make something of; its last word is for a listing of processes.
_RUN = "import io;stdin=io.FileIO(0,closefd=False);exec(eval(stdin.readline()));main(stdin)"


@functools.cache
def bootstrap() -> bytes:
    """The first line on the link: bootstrap.py as a string."""
    with open(os.path.join(_HERE, "bootstrap.py")) as file:
        return ascii(file.read()).encode() + b"\n"


@functools.cache
def parcel() -> tuple[str, bytes]:
    """The hash and the bytes of a zip with the agent and the nursery, under a package name of its own."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_files()):
            with open(os.path.join(_ROOT, path), "rb") as file:
                entry = zipfile.ZipInfo(f"{PACKAGE}/{path}")  # of one date, so that the same files have the same hash
                archive.writestr(entry, file.read(), zipfile.ZIP_DEFLATED)
    data = made.getvalue()
    return hashlib.sha256(data).hexdigest(), data


def _files() -> list[str]:
    found = []
    for name in _CONTENTS:
        path = os.path.join(_ROOT, name)
        inside = [f"{name}/{one}" for one in os.listdir(path)] if os.path.isdir(path) else [name]
        found += [one for one in inside if one.endswith(".py")]
    return found


def command(python: str, *, exact: bool) -> str:
    """What sshd is to hand to the user's login shell, whichever that is.

    `python`: a path or a name; unless it is to be `exact`, python3 where there is no such file.
    """
    find = f"p={shlex.quote(python)}"
    if not exact:
        find += '; [ -x "$p" ] || p=python3'
    script = f'{find}; exec "$p" -I -S -c "{_RUN}" launchpad-agent'
    return f"exec /bin/sh -c {shlex.quote(script)}"
