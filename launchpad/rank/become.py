"""Turns a forked process into the rank that executing its command line would have started."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

from . import exceptions, exit, import_watch, own_process, program, stack_server, store


def become(request: dict[str, Any], fds: list[int], mask: set[int]) -> None:
    """Turn this copy of the forkserver into the rank that the request describes; `mask`: the signals it blocks."""
    if request["own_session"]:
        if os.getsid(0) != os.getpid():  # as the forkserver, it may have one
            os.setsid()
    else:
        os.setpgid(0, 0)
    own_process.die_with_parent(request["agent"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if request["bind"]:
        _bind(*request["bind"])
    os.environ.update(request["environ"])
    argv = request["argv"]
    own_process.show_as([os.fsencode(word) for word in argv], dict(os.environb))
    program.set_argv(argv, request["calls"])
    _open_stdin()
    _reseed()
    store.hold(request["store"])
    stack_server.prepare(*request["stacks"])
    import_watch.watch()
    if request["debug"]:
        from . import debugger

        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # one that ends the job ends it while it waits, too
        debugger.wait(stack_server.start)
        exit.remember()
    exceptions.begin()


def _bind(cpus: list[int], nodes: list[int]) -> None:
    from . import affinity

    try:
        affinity.bind(cpus, nodes)
    except OSError as error:  # they have been taken from us since they were read
        os.write(2, f"launchpad: this rank can't be bound to its CPUs {cpus}: {error.strerror}\n".encode())
        os._exit(1)


def _open_stdin() -> None:
    """Recreate sys.stdin: it remembers whether the old file was seekable."""
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
    """Reseed the random generators. Python's `random` reseeds itself after a fork."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
