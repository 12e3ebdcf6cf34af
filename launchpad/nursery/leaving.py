"""A forked rank's end: what an interpreter does at its exit, but for tearing down what was imported before the fork.

Of the steps of CPython's Py_FinalizeEx these are kept: non-daemon threads are joined, atexit's functions run,
`__main__` and the modules that the rank has imported are cleared, the garbage is collected (so files are flushed and
`__del__` runs), standard output is flushed. Tearing torch down in 64 ranks would take ten seconds: every page of
it would be written to, so copied.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import types
from _weakref import ref  # `weakref` takes longer to import than all of this

from . import accounts

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable

_Module = type(sys)

_imported_before: set[str] = set()

# With this pause between two threads' turns no daemon thread meets the modules that we clear.
_NO_TURNS = 1000.0

# Of Py_FinalizeEx: standard output could not be flushed.
_FLUSH_FAILED = 120


def remember() -> None:
    """What is imported by now was imported before the fork."""
    _imported_before.update(sys.modules)


def leave(how: list[BaseException], ours: tuple[str, ...]) -> None:
    """Tell how the program ended as the interpreter would, finish, and end the process. Never returns.

    `how`: the exception that ended it, if one did; it is taken. `ours`: the files whose frames stand above the
    program's in the traceback.
    """
    ended = how.pop() if how else None
    interrupted = isinstance(ended, KeyboardInterrupt)
    if ended is None:
        accounts.keep_end()
    accounts.keep(ended, ours=ours)
    code = _tell(ended, ours)
    del ended
    _finish_threads()
    atexit._run_exitfuncs()
    flushed = _flush()
    sys.setswitchinterval(_NO_TURNS)
    finish_mpi = _mpi_finisher() if code == 0 else None
    # Once the modules are cleared nothing can be imported.
    import ctypes

    signal = __import__("_signal")  # not the Python one, which may be among the modules that are emptied
    flush_c = ctypes.CDLL(None).fflush
    _clear_modules()
    flushed = _flush() and flushed
    if finish_mpi:
        finish_mpi()
    flush_c(None)  # what C code has in its stdio buffers
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if flushed else _FLUSH_FAILED)


def give_up(how: list[BaseException], ours: tuple[str, ...]) -> None:
    """Tell how the program ended, as in `leave`, and have the interpreter exit as it would. Never returns."""
    ended = how.pop()
    accounts.keep(ended, ours=ours)
    if isinstance(ended, SystemExit):
        raise ended
    code = _tell(ended, ours)
    if isinstance(ended, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it was told
        raise ended
    del ended
    raise SystemExit(code)


def _tell(ended: BaseException | None, ours: tuple[str, ...]) -> int:
    if ended is None:
        return 0
    if isinstance(ended, SystemExit):
        return _exit_code(ended.code)
    trace = ended.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    ended.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(ended), ended, trace
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
    """handle_system_exit of CPython's Python/pythonrun.c."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF if -(2**63) <= value < 2**63 else 0xFF
    _flush()
    print(value, file=sys.stderr)
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
            if stream is not None and not stream.closed:
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


def _clear_modules() -> None:
    """finalize_modules of CPython's Python/pylifecycle.c, for the modules that the nursery did not have."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    vars(sys).pop("last_exc", None)

    # While all is still reached from outside, this sorts every object before what it holds: so a text file will be
    # flushed into its buffer, then the buffer into the file, when the next collection finds all three unreachable.
    gc.collect()
    names = [name for name in sys.modules if name not in _imported_before or name == "__main__"]
    # cffi's libraries stand there as modules, and can't be referred to weakly.
    left = [ref(one) for one in map(sys.modules.pop, names) if isinstance(one, types.ModuleType) and _weak(one)]
    gc.collect()
    # What something else still holds is emptied, the newest first, private names before the others.
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
    """mpi4py finalizes MPI in a C function that only a whole interpreter exit calls. The module is not held by this.

    A rank that has failed must not: it would wait there for the others, who wait for it elsewhere.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return lambda: None
    initialized, finalized, finalize = mpi.Is_initialized, mpi.Is_finalized, mpi.Finalize
    return lambda: finalize() if initialized() and not finalized() else None
