"""The forkserver's loop: imports what the ranks need, reports whether forking is sound, forks ranks on request.

A request from the agent comes with descriptors: each rank's stdin, stdout and stderr, or the socket on which to serve
the store. Replies are JSON lists: first ["ready", why not or ""]; for each fork request ["forked", number, pid] per
process, then ["done", why the others were not forked]. If it is to become a rank itself: ["became", number].
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..image import channel
from ..rank import become, exit, mpi_init, own_process, program, stack_server, store

LINK = 3

# Number of tool ids in PEP 669.
_MOST_TOOLS = 6

# Allocators and runtimes that are preloaded for speed and work in forks too.
_HARMLESS = ("libjemalloc", "libtcmalloc", "libmimalloc", "libiomp5", "libomp", "libgomp", "libstdc++", "libgcc_s")

# Schedulers send these to every process of a job. Blocked, so that a rank gets those that are sent to it meanwhile.
_OUTLIVED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

# What each rank imports.
_IN_EACH_RANK = (
    "faulthandler",
    "fcntl",
    *(f"{become.__package__}.{name}" for name in ("collective_times", "milestones")),
)

Request = dict[str, Any]

_request: Request = {}  # the last one that was forked for
_libraries: list[weakref.ref[Any]] = []


def main() -> None:
    """Serve the agent. `_serve` returns only in a new process: a rank, or the store."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    os.set_inheritable(LINK, False)
    link = socket.socket(fileno=LINK)
    request, _ = _receive(link)
    if "main" in request:
        from . import kept_head

        kept_head.keep(link, request["rehearse"], request["main"], watched_by)
    if "keep" in request:
        from . import kept_image

        link = kept_image.keep(link, request["keep"], preload, stays=request["stays"])
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)  # again: it has its caller's mask now
        request, _ = _receive(link)
        why_not = kept_image.begin(request)
    else:
        # So that imports find the same modules as in the ranks.
        program.put_first_on_path(sys.argv[1:], request["calls"])
        why_not = preload(request["preload"])
    _say(link, "ready", why_not)
    heeds_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupt:  # a rank that has not started must not show a traceback of ours
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    request, fds = _serve(link)
    if "serve" in request:
        store.serve(fds[0], request["serve"])
    else:
        become.become(request, fds, mask)

        def heed_signals() -> None:
            if heeds_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not by `signal`, whose frame would stand in a traceback.
            __import__("_signal").pthread_sigmask(signal.SIG_SETMASK, mask)

        program.run(request["argv"], request["calls"], heed_signals)


def preload(names: list[str]) -> str:
    """Import the modules. Returns why forking this process is unsound, "" if it is sound."""
    if own_process.is_free_threaded():
        return "this Python is free-threaded, which is not known to be safe after a fork"
    if why_not := watched_by():
        return why_not
    if not all(name.startswith("torch") for name in names):
        mpi_init.hold()
    begun_by: dict[str, str] = {}  # the module whose import started a thread, by the thread's number; or "gpu"
    with frozen():
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:  # the ranks will hit it too, and show it in full
                if name.startswith("torch._") and isinstance(error, ModuleNotFoundError):  # an older torch
                    continue
                return f"importing {name} here failed ({type(error).__name__})"
            for started in _started():
                begun_by.setdefault(started, name)
        if "torch" in names:
            store.install()
            stack_server.install()
            _keep_library()
        for name in _IN_EACH_RANK:
            importlib.import_module(name)
        # Here and not in each rank, where both would write to hundreds of pages, and so copy them.
        importlib.invalidate_caches()
        exit.remember()
    if why_not := watched_by():  # an import may have started it
        return why_not
    try:
        gpu, threads = own_process.holds_gpu(), own_process.threads()
    except OSError:
        return "/proc doesn't show whether an import opened the GPU or started a thread"
    if gpu:
        return f"importing {begun_by.get('gpu', 'a module')} opened the GPU, which a forked process can't use"
    if threads > 1:
        # OpenBLAS stops its threads at a fork, for good.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if own_process.threads() > 1:
            which = next((begun_by[started] for started in _started() if started in begun_by), "a module")
            return f"importing {which} started a thread, which a forked process would not have"
    return ""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What is created meanwhile is left alone by garbage collection, here and in the ranks."""
    enabled = gc.isenabled()
    gc.disable()  # an import leaves little garbage, and looking for it takes a sixth of torch's
    try:
        yield
    finally:
        gc.freeze()  # otherwise a collection in a rank would write to every page, and unshare it
        if enabled:
            gc.enable()


def _started() -> list[str]:
    """The numbers of all threads but the main one, and "gpu" once that is open."""
    try:
        gpu = ["gpu"] if own_process.holds_gpu() else []
        return [number for number in os.listdir("/proc/self/task") if number != str(os.getpid())] + gpu
    except OSError:
        return []


def watched_by() -> str:
    """The tracer or preloaded library that watches this process, and would miss what its forks do; "" for none."""
    if sys.gettrace() or sys.getprofile():
        return "a tracer or profiler has been running since the interpreter started"
    tool = _tool()
    if tool:
        return f"{tool} watches the interpreter (sys.monitoring)"
    library = _preloaded(os.environ.get("LD_PRELOAD", ""))
    if library:
        return f"{library} is in LD_PRELOAD, and may do work at the start and end of each process"
    return ""


def _tool() -> str:
    """The first tool registered with sys.monitoring."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12
    if monitoring is None:
        return ""
    return next((str(name) for name in map(monitoring.get_tool, range(_MOST_TOOLS)) if name is not None), "")


def _preloaded(libraries: str) -> str:
    """The first preloaded library that isn't known to be harmless."""
    names = [os.path.basename(path) for path in libraries.replace(":", " ").split()]
    return next((name for name in names if not name.startswith(_HARMLESS)), "")


def _keep_library() -> None:
    """Keep torch from unregistering its operators when a rank exits, which would unshare 6,800 pages.

    A finalizer that only stayed registered would be looked at then: 200 pages.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            library, unregister, arguments, _ = finalizer.detach()
            _libraries.append(weakref.ref(library, functools.partial(_call, unregister, arguments)))


def _call(function: Callable[..., object], arguments: tuple[Any, ...], _: object) -> None:
    function(*arguments)


def _serve(link: socket.socket) -> tuple[Request, list[int]]:
    """Fork for each request. Returns only in the new processes, with what each has to do and its descriptors."""
    while True:
        request, fds = _receive(link)
        if "becomes" in request:
            while signal.sigtimedwait(_OUTLIVED, 0):  # sent to the forkserver
                pass
            gc.freeze()
            _say(link, "became", request["number"])
            link.close()
            return request["becomes"], fds
        born, go = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            _say(link, "done", _no_process(error))
            channel.close([born, go, *fds])
            continue
        if middle == 0:
            global _request
            _request = request  # kept: a rank that freed what is of the others would write to it, and copy its pages
            gc.freeze()
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
                if not _may_go(born, middle):
                    os._exit(1)
                os.close(born)
                link.close()
                first = sum(one["fds"] for one in request["processes"][:place])
                own = fds[first : first + wanted["fds"]]
                channel.close([fd for fd in fds if fd not in own])
                return wanted, own
            os._exit(0)
        _, status = os.waitpid(middle, 0)
        os.write(go, (b"n" if os.WIFSIGNALED(status) else b"g") * len(request["processes"]))
        if status == 0:
            _say(link, "done", "")
        elif os.WIFSIGNALED(status):
            _say(link, "done", f"signal {os.WTERMSIG(status)} killed it during the fork")
        channel.close([born, go, *fds])


def _may_go(born: int, middle: int) -> bool:
    """Wait until the intermediate process is gone and the agent is our parent; False if we must not go on.

    The forkserver says so. If it is killed before, the end of the pipe does, and the intermediate process ends by
    itself when it has forked all.
    """
    said = os.read(born, 1)
    while not said and os.getppid() == middle:
        time.sleep(0.001)
    return said != b"n" and os.getppid() != middle


def _no_process(error: OSError) -> str:
    return f"its process can't be created: {error.strerror}"


def _receive(link: socket.socket) -> tuple[Request, list[int]]:
    received = channel.receive(link)
    if received is None:
        os._exit(0)  # the agent is gone
    return received


def _say(link: socket.socket, *words: object) -> None:
    link.send(json.dumps(words).encode())
