"""Has debugpy listen in a rank, at a Unix socket that only its user can reach, and waits for a client.

debugpy would listen at a TCP port, which every user of the machine can reach, and start a second process with a token
on its command line. Without that process (`in_process_debug_adapter`) it is still its own server, and we hand it our
socket in place of the one that it would make. The agent leads the client there.
"""

from __future__ import annotations

import _thread
import importlib
import os
import sys
import time

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# It would warn of frozen modules of the standard library, in which it can't stop.
_NO_WARNING = "PYDEVD_DISABLE_FILE_VALIDATION"

# How long the main thread may take to heed the signal.
MAIN_SECONDS = 15.0

_done = _thread.allocate_lock()  # held until the debugger listens, or can't
_problem = ""
_listens = False


def wait(start: Callable[[], bool]) -> None:
    """Before the program starts, wait until the agent has had us listen, and a client is attached.

    `start` starts the thread of stack_server.py. If there is no debugger, exit with code 2.
    """
    import threading  # noqa: F401  # takes the thread that first imports it for the main one

    _done.acquire()
    if not start():
        _fail("its agent can't be reached")
    _done.acquire()
    if _problem:
        _fail(_problem)
    debugpy: Any = sys.modules["debugpy"]
    debugpy.debug_this_thread()
    debugpy.wait_for_client()


def _fail(problem: str) -> None:
    sys.stderr.write(f"launchpad: --debug: {problem}\n")
    sys.stderr.flush()
    os._exit(2)


def listen(path: str, signum: int) -> str:
    """Have debugpy listen at this Unix socket, unless it does. Returns why it can't, or "".

    Called in the thread of stack_server.py, which the debugger then leaves alone. `signum` has the main thread import
    `threading`, which takes the thread that first imports it for the main one.
    """
    global _problem, _listens
    until = time.monotonic() + MAIN_SECONDS
    if "threading" not in sys.modules:
        os.kill(os.getpid(), signum)
    while "threading" not in sys.modules:
        if time.monotonic() > until:
            return "its main thread runs C code; try again"
        time.sleep(0.01)
    import threading

    own: Any = threading.current_thread()
    own.pydev_do_not_trace = own.is_pydev_daemon_thread = True
    if not _listens:
        # debugpy traces the thread that calls it, so that must be another one.
        thread = threading.Thread(target=_listen, args=(path,), name="launchpad-debugger", daemon=True)
        thread.start()
        thread.join()
    if _done.locked():
        _done.release()
    return _problem


def _listen(path: str) -> None:
    global _problem, _listens
    try:
        _problem = _begin(path)
    except Exception as error:
        _problem = f"debugpy can't listen: {type(error).__name__}: {error}"
    _listens = not _problem


def _begin(path: str) -> str:
    before = os.environ.get(_NO_WARNING)
    os.environ[_NO_WARNING] = "1"
    try:
        debugpy = importlib.import_module("debugpy")
        importlib.import_module("debugpy.server.api")
    except ImportError as error:
        if error.name != "debugpy":
            return f"debugpy can't be imported: {error}"
        return f"debugpy is not installed; run {sys.executable} -m pip install debugpy"
    finally:
        os.environ.pop(_NO_WARNING)
        if before is not None:
            os.environ[_NO_WARNING] = before
    pydevd: Any = sys.modules.get("pydevd")
    original = getattr(pydevd, "create_server_socket", None)
    if original is None:
        return f"debugpy {debugpy.__version__} is not known to launchpad; install another version"
    if debugpy.server.api.listen.called:
        return "the program itself has called debugpy.listen; connect there"
    listener = _bound(path)

    def create_server_socket(*_: object, **__: object) -> Any:
        pydevd.create_server_socket = original
        return listener

    pydevd.create_server_socket = create_server_socket
    debugpy.listen(("127.0.0.1", 0), in_process_debug_adapter=True)
    os.register_at_fork(after_in_child=_let_go)
    return ""


def _let_go() -> None:
    """In a forked process, whose debugger has no threads: one that stopped at a breakpoint would stay there."""
    import threading

    try:
        sys.modules["debugpy"].trace_this_thread(False)
        threading.settrace(None)
    except Exception:
        pass


def _bound(path: str) -> Any:
    """A Unix socket that is bound to `path`, and gives (path, 0) as its address, like a TCP socket's."""
    import socket

    class Server(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return path, 0

    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        made = Server(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")  # a socket's path is limited to 107 bytes
    finally:
        os.close(folder)
    made.listen(1)
    return made
