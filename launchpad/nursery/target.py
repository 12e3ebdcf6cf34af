"""In a forked process: become the rank that executing its command line would have given."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

from . import accounts, answering, leaving, process, program, store


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Turn this copy of the nursery into what executing the rank's command line would have given."""
    os.setsid()
    process.die_with_parent(request["agent"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(request["environ"])
    argv = request["argv"]
    process.show_as([os.fsencode(word) for word in argv], dict(os.environb))
    program.set_argv(argv)
    _open_stdin()
    _reseed()
    store.hold(request["store"])
    answering.prepare(*request["answers"])
    if "torch" not in sys.modules:
        answering.watch()
    importlib.invalidate_caches()
    accounts.begin()
    leaving.remember()


def _open_stdin() -> None:
    """Make sys.stdin anew: whether it can seek was found out, and kept, when it was another file."""
    old: Any = sys.stdin
    if old is None:
        return
    raw = io.FileIO(0, "r", closefd=False)
    raw.name = "<stdin>"
    new = io.TextIOWrapper(
        io.BufferedReader(raw),
        old.encoding,
        old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    new.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = new  # type: ignore[misc]


def _reseed() -> None:
    """Give this process randomness of its own. Python's random needs nothing: it reseeds itself after a fork."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
