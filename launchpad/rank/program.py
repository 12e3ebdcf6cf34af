"""Runs a Python rank's program and exits, both as `python` would.

Every executed Python rank loads this, so it imports little more than an interpreter has loaded anyway.
"""

from __future__ import annotations

import builtins
import os
import sys

from . import exceptions

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


# Files whose frames are above the program's in tracebacks.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = tuple(
    os.path.join(_PACKAGE, *name.split("/"))
    for name in ("rank/program.py", "rank/call.py", "rank/call_server.py", "forkserver/forking.py")
)


def set_argv(argv: list[str], calls: str) -> None:
    """Set `sys.argv` and `sys.orig_argv` for the command line `python -u (SCRIPT | -m MODULE | FUNCTION) ARGS`.

    `calls`: "function" for FILE.py:NAME or MODULE:NAME, "pickled" for a pickled function (see rank/call.py),
    "session" for many of them (rank/call_server.py), else "".
    """
    sys.orig_argv[:] = argv
    if calls:
        from . import call

        file, module, _ = call.split(argv[2])
        sys.argv[:] = [file or module, *argv[3:]]
        return
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]


def put_first_on_path(words: list[str], calls: str) -> None:
    """Set sys.path[0] as `python SCRIPT ARGS` or `python -m MODULE ARGS` would; likewise for functions."""
    first = first_on_path(words, calls, os.getcwd())
    if first:
        sys.path.insert(0, first)


def first_on_path(words: list[str], calls: str, cwd: str) -> str:
    """What `put_first_on_path` puts there in this folder; "" for nothing."""
    script = words[0] if words[0] != "-m" else ""
    if calls in ("pickled", "session"):  # the caller's path comes with the function
        return ""
    if calls:
        from . import call

        script = call.split(words[0])[0]
    elif script and _is_package(os.path.join(cwd, script)):
        return os.path.join(cwd, script.removeprefix("./"))
    if getattr(sys.flags, "safe_path", False):
        return ""
    return os.path.dirname(os.path.realpath(os.path.join(cwd, script))) if script else cwd


def _is_package(path: str) -> bool:
    """Whether this is a folder or archive with a __main__.py rather than a script."""
    if path.endswith(".py"):
        return False
    import pkgutil

    return pkgutil.get_importer(path) is not None


def absolute(path: str) -> str:
    """Make a script's path absolute as the interpreter does, without looking at the file system."""
    return os.path.join(os.getcwd(), path.removeprefix("./"))


def execute(argv: list[str], calls: str, *, whole: bool) -> None:
    """Run a command line in a fresh interpreter, which then exits normally: returns, or raises SystemExit.

    Unless `whole`, as in an MPI world, a program that fails exits without interpreter shutdown.
    """
    put_first_on_path(argv[2:], calls)
    set_argv(argv, calls)
    exceptions.begin()
    if not whole:
        from . import exit

        exit.remember()
    ended = _run(argv, calls)
    if not ended or (isinstance(ended[0], SystemExit) and exceptions.is_success(ended[0].code)):
        exceptions.keep_end()
        return
    from . import exit

    if not whole:
        exit.leave(ended, ours=_OURS)
    exit.give_up(ended, ours=_OURS)


def run(argv: list[str], calls: str, heed_signals: Callable[[], None]) -> None:
    """Run a command line (see `set_argv`) in a forked interpreter, and exit. Never returns.

    `heed_signals`: what lets signals come from here on.
    """
    from . import exit

    exit.leave(_run(argv, calls, heed_signals), ours=_OURS)


def _run(argv: list[str], calls: str, heed_signals: Callable[[], None] = lambda: None) -> list[BaseException]:
    """The exception that ended the program, if any. The caller empties the list: tracebacks keep variables alive."""
    main = _fresh_main()
    ended: list[BaseException] = []
    try:
        heed_signals()
        if "mpi4py" in sys.modules:
            from . import mpi_init

            mpi_init.release()
        if calls == "session":
            from . import call_server

            call_server.serve()
        elif calls:
            from . import call

            call.call_pickled() if calls == "pickled" else call.call(argv[2])
        elif argv[2] == "-m":
            _run_main(argv[3], True)
        elif _is_package(argv[2]):
            _run_main("__main__", False)
        else:
            _run_script(argv[2], main)
    except BaseException as error:
        ended.append(error)
    del main
    return ended


def _fresh_main() -> dict[str, Any]:
    """A new `__main__`: gc.freeze has put the old one out of reach of garbage collection."""
    old = sys.modules["__main__"]
    new = type(sys)("__main__")
    vars(new).update({name: value for name, value in vars(old).items() if name.startswith("__")})
    vars(new).update(__doc__=None, __builtins__=builtins)
    vars(new).pop("__file__", None)
    vars(new).pop("__cached__", None)
    if "__annotations__" in vars(new):
        vars(new)["__annotations__"] = {}
    sys.modules["__main__"] = new
    if sys.modules.get("__mp_main__") is old:  # multiprocessing's name for it, used when spawned children pickle
        sys.modules["__mp_main__"] = new
    return vars(new)


def _run_script(path: str, main: dict[str, Any]) -> None:
    """Like pymain_run_file in CPython's Modules/main.c."""
    loaders = __import__("_frozen_importlib_external")  # importlib.machinery has them too, but is slower to import
    path = absolute(path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    if path.endswith(".pyc") or source[:4] == loaders.MAGIC_NUMBER:
        import marshal

        if source[:4] != loaders.MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        loader, code = loaders.SourcelessFileLoader, marshal.loads(source[16:])
    else:
        loader, code = loaders.SourceFileLoader, None
    main.update(__loader__=loader("__main__", path), __file__=path, __cached__=None)
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main)  # noqa: S102


def _run_main(name: str, alter_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # as the interpreter does for -m
