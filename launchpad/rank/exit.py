"""Exits a forked rank as an interpreter would, but without tearing down what was imported before the fork.

These steps of CPython's Py_FinalizeEx are kept: non-daemon threads are joined, atexit functions run, `__main__` and the
modules that the rank has imported are cleared, garbage is collected (so files are flushed and `__del__` runs), standard
output is flushed. Tearing down torch in 64 ranks would take ten seconds, because it writes to every page and so copies
it.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
import types
from _weakref import ref  # `weakref` takes longer to import than all of this

from . import exceptions, stack_server

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_imported_before: set[str] = set()

# Gloo's threads have this long to drop what they have finished, in seconds.
_GLOO_SECONDS = 1.0

# Exit code of Py_FinalizeEx if standard output can't be flushed.
_FLUSH_FAILED = 120


def remember() -> None:
    """Note which modules are imported before the program is run."""
    _imported_before.update(sys.modules)
    sys.modules[__name__] = sys.modules.pop(__name__)  # from here on, newer ones follow


def imported_since() -> list[str]:
    """The names of the modules imported since. To look at all would write to each name, and so copy its page."""
    newest_first: list[str] = []
    for name in reversed(sys.modules):
        if name == __name__:
            break
        if name not in _imported_before:
            newest_first.append(name)
    return newest_first[::-1]


def leave(how: list[BaseException], ours: tuple[str, ...]) -> None:
    """Report how the program ended as the interpreter would, clean up, and exit. Never returns.

    `how`: the exception that ended the program, if any; it is removed from the list. `ours`: files whose frames above
    the program's are left out of the traceback.
    """
    ended = how.pop() if how else None
    interrupted = isinstance(ended, KeyboardInterrupt)
    if ended is None:
        exceptions.keep_end()
    exceptions.keep(ended, ours=ours)
    code = _report(ended, ours)
    del ended
    _finish_threads()
    atexit.unregister(stack_server.retire)  # this interpreter stays until the end
    atexit._run_exitfuncs()
    flushed = _flush()
    _let_gloo_finish()
    finish_mpi = _mpi_finisher() if code == 0 else None
    # Nothing can be imported once the modules are cleared.
    import ctypes

    signal = __import__("_signal")  # not the Python module, which may be cleared
    flush_c = ctypes.CDLL(None).fflush
    threading = sys.modules.get("threading")
    left = _drop_modules()
    stack_server.end_thread()
    if threading is not None:
        _hold_daemons(threading, ctypes)
    _empty(left)
    flushed = _flush() and flushed
    if finish_mpi:
        finish_mpi()
    flush_c(None)  # the stdio buffers of C code
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if flushed else _FLUSH_FAILED)


def give_up(how: list[BaseException], ours: tuple[str, ...]) -> None:
    """Report how the program ended, like `leave`, but let the interpreter exit normally. Never returns."""
    ended = how.pop()
    exceptions.keep(ended, ours=ours)
    if isinstance(ended, SystemExit):
        raise ended
    code = _report(ended, ours)
    if isinstance(ended, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # already reported
        raise ended
    del ended
    raise SystemExit(code)


def _report(ended: BaseException | None, ours: tuple[str, ...]) -> int:
    if ended is None:
        return 0
    if isinstance(ended, SystemExit):
        return _exit_code(ended.code)
    trace = ended.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    ended.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(ended), ended, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = ended
    _flush()
    try:
        sys.excepthook(type(ended), ended, trace)
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:
        import traceback

        print("Error in sys.excepthook:", file=sys.stderr)
        inner = error.__traceback__
        traceback.print_exception(type(error), error, inner.tb_next if inner else None)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(ended), ended, trace)
    return 1


def _exit_code(value: object) -> int:
    """Like handle_system_exit in CPython's Python/pythonrun.c."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF if -(2**63) <= value < 2**63 else 0xFF
    _flush()
    try:
        if sys.stderr is None:
            os.write(2, f"{value}\n".encode(errors="backslashreplace"))
        else:
            print(value, file=sys.stderr)
    except BaseException:  # as in CPython, how it fails is not told; the newline goes to C's stderr
        os.write(2, b"\n")
    return 1


def _finish_threads() -> None:
    threading = sys.modules.get("threading")
    if threading is None:
        return
    try:
        threading._shutdown()
    except BaseException as error:
        import traceback

        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        traceback.print_exception(error)


def _flush() -> bool:
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:
            if stream is sys.stdout:
                done = False
                try:
                    import traceback

                    print(f"Exception ignored in: {stream!r}", file=sys.stderr)
                    traceback.print_exception(error)
                except BaseException:
                    pass
    return done


def _let_gloo_finish() -> None:
    """Wait until gloo's threads are idle.

    To drop an operation they take the interpreter's lock, and clearing a DDP joins them while it holds that lock
    (torch 2.13): a thread that was late with its last operation would block us forever.
    """
    idle, deadline = 0, time.monotonic() + _GLOO_SECONDS
    while idle < 2 and (states := _gloo_threads()) and time.monotonic() < deadline:
        idle = idle + 1 if states == {"S"} else 0
        time.sleep(0.001)  # without the lock


def _gloo_threads() -> set[str]:
    """The states of gloo's threads that run operations: R where one runs or is to run."""
    if "torch.distributed" not in sys.modules:
        return set()
    states = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/stat") as file:
                name, _, rest = file.read().rpartition(") ")
            if "(pt_gloo" in name:
                states.add(rest[0])
    except OSError:
        pass
    return states


def _drop_modules() -> list[ref[types.ModuleType]]:
    """Like the first half of finalize_modules in CPython's Python/pylifecycle.c, for modules imported after the fork.

    Returns those modules. Threads run on meanwhile, as a destructor may wait for one.
    """
    sys.last_type = sys.last_value = sys.last_traceback = None
    vars(sys).pop("last_exc", None)

    # While everything is still reachable, this reorders the collector's list: each object comes before those that it
    # refers to. So when the next collection finds a text file unreachable, the file is flushed into its buffer first,
    # then the buffer into the descriptor.
    gc.collect()
    main = ("__main__", "__mp_main__")  # multiprocessing's name for it is the second
    names = [name for name in main if name in _imported_before and name in sys.modules] + imported_since()
    # cffi puts libraries there as modules, which can't be weakly referenced.
    left = [ref(one) for one in map(sys.modules.pop, names) if isinstance(one, types.ModuleType) and _weak(one)]
    gc.collect()
    return left


def _hold_daemons(threading: Any, ctypes: Any) -> None:
    """Let daemon threads run no more Python code, as they would meet emptied modules. CPython's end when it finalizes.

    `threading`, `ctypes`: the modules, which can't be imported any more.
    """
    never = threading.Lock()
    never.acquire()

    class Held(BaseException):
        """Raised in a thread at its next turn; the thread never gets beyond making it, and so into no handler."""

        def __init__(self) -> None:
            never.acquire()

    for thread in threading.enumerate():
        # C code waits for its own threads, which are dummies here.
        if not thread.daemon or thread.ident is None or isinstance(thread, threading._DummyThread):
            continue
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Held))
        # As when CPython ends it, let a destructor that joins it go on.
        if sys.version_info >= (3, 13):
            thread._handle._set_done()
        elif thread._tstate_lock is not None and thread._tstate_lock.locked():
            thread._tstate_lock.release()


def _empty(left: list[ref[types.ModuleType]]) -> None:
    """Like the second half: empty the modules that are still referenced, newest first, private names first."""
    for reference in reversed(left):
        module = reference()
        if module is None:
            continue
        space = vars(module)
        for private in (True, False):
            for name in list(space):
                if name != "__builtins__" and (name.startswith("_") and name[1:2] != "_") == private:
                    space[name] = None
    gc.collect()


def _weak(module: object) -> bool:
    return type(module).__weakrefoffset__ > 0


def _mpi_finisher() -> Callable[[], None]:
    """A function that finalizes MPI, as mpi4py does only in a full interpreter exit. It doesn't keep the module alive.

    Not for failed ranks: they would block in MPI_Finalize, while the others wait for them elsewhere.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return lambda: None
    initialized, finalized, finalize = mpi.Is_initialized, mpi.Is_finalized, mpi.Finalize
    return lambda: finalize() if initialized() and not finalized() else None
