"""The nursery's loop: import what the ranks will need, say whether forking is sound, fork ranks whenever asked.

The agent's requests are descriptors: a file with the request as JSON, then each rank's stdin, stdout and stderr, or the
socket that the store is to serve. Our answers are JSON lists: ["ready", why not or ""]; for a request to fork
["forked", number, pid] each, then ["done", why those that were not forked were not].
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import signal
import socket
import sys
import weakref
from typing import Any

from . import answering, mpi, process, program, store, target

LINK = 3
MOST_DESCRIPTORS = 253  # SCM_MAX_FD

Request = dict[str, Any]


def main() -> None:
    """Serve the agent. What returns from `_serve` is a rank, or the store's process."""
    os.set_inheritable(LINK, False)
    link = socket.socket(fileno=LINK)
    program.put_first_on_path(sys.argv[1:])  # what is imported here is found where the ranks would find it
    request, _ = _receive(link)
    _say(link, "ready", _preload(request["preload"]))
    heeds_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupt:  # a rank that has not begun shows no traceback of ours
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    request, fds = _serve(link)
    if "serve" in request:
        store.serve(fds[0], request["serve"])
    else:
        target.become(request, fds)
        if heeds_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        program.run(request["argv"])


def _preload(names: list[str]) -> str:
    """Import the modules. Returns why this process is no good to be forked, "" where it is."""
    if not all(name.startswith("torch") for name in names):
        mpi.hold()
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # the ranks will meet it too, and show it whole
            return f"importing {name} here failed ({type(error).__name__})"
    if "torch" in names:
        store.install()
        answering.install()
        _keep_library()
    gc.collect()
    gc.freeze()  # else the ranks' garbage collectors would write to every page, and unshare it
    if sys.gettrace() or sys.getprofile():
        return "a tracer or profiler runs in the interpreter from its start"
    if process.holds_gpu():
        return "an import has opened the GPU, which no forked process can use"
    if process.threads() > 1:
        # OpenBLAS's threads end at a fork by its own handler, and stay ended.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if process.threads() > 1:
            return "an import has started a thread, which no forked process would have"
    return ""


def _keep_library() -> None:
    """At a rank's exit torch would unregister its own operators, one by one: 6 800 pages that are shared until then."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _serve(link: socket.socket) -> tuple[Request, list[int]]:
    """Fork for each request. Returns, in the new processes only, what each is to do, and its descriptors."""
    while True:
        request, fds = _receive(link)
        share = len(fds) // len(request["processes"])
        born, go = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            _say(link, "done", _no_process(error))
            _close(born, go, *fds)
            continue
        if middle == 0:
            os.close(go)
            middle = os.getpid()
            for place, wanted in enumerate(request["processes"]):
                try:
                    pid = os.fork()
                except OSError as error:
                    _say(link, "done", _no_process(error))
                    os._exit(1)
                if pid:
                    _say(link, "forked", wanted["number"], pid)
                    continue
                # The one in the middle is gone, and the agent our parent, when the nursery says so.
                if os.read(born, 1) != b"g" or os.getppid() == middle:
                    os._exit(1)
                os.close(born)
                link.close()
                own = fds[place * share : (place + 1) * share]
                _close(*(fd for fd in fds if fd not in own))
                return wanted, own
            os._exit(0)
        _, status = os.waitpid(middle, 0)
        if not os.WIFSIGNALED(status):
            os.write(go, b"g" * len(request["processes"]))
        if status == 0:
            _say(link, "done", "")
        elif os.WIFSIGNALED(status):
            _say(link, "done", f"it was killed by signal {os.WTERMSIG(status)} while being made")
        _close(born, go, *fds)


def _no_process(error: OSError) -> str:
    return f"no process could be made for it: {error.strerror}"


def _receive(link: socket.socket) -> tuple[Request, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = link.recvmsg(1, socket.CMSG_SPACE(MOST_DESCRIPTORS * fds.itemsize))
    if not data:
        os._exit(0)  # the agent is gone
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    with open(fds[0]) as file:
        request = json.load(file)
    return request, list(fds[1:])


def _say(link: socket.socket, *words: object) -> None:
    link.send(json.dumps(words).encode())


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
