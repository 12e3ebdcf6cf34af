"""Run a Python rank's program as `python` would, and leave as `python` would.

Every executed Python rank loads this: it imports what an interpreter has at its start, and little more.
"""

from __future__ import annotations

import builtins
import os
import sys

from . import accounts

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any


# Words in a script's place on the command line; nursery/calling.py does what they say.
CALLS = ("--call", "--pickled")

# Their frames stand above the program's in a traceback.
_OURS = (__file__, os.path.join(os.path.dirname(__file__), "calling.py"))


def set_argv(argv: list[str]) -> None:
    """What the program finds in `sys` for its command line `python -u (SCRIPT | -m MODULE | --call FUNCTION) ARGS`."""
    sys.orig_argv[:] = argv
    if argv[2] in CALLS:
        from . import calling

        file, module, _ = calling.split(argv[3])
        sys.argv[:] = [file or module, *argv[4:]]
        return
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]


def put_first_on_path(words: list[str]) -> None:
    """Set sys.path[0] as for `python SCRIPT ARGS` or `python -m MODULE ARGS`; for functions likewise."""
    script = words[0] if words[0] != "-m" else ""
    if words[0] in CALLS:
        from . import calling

        if words[0] == calling.PICKLED:  # the caller's path comes with the function
            return
        script = calling.split(words[1])[0]
    elif script and _is_package(script):
        sys.path.insert(0, absolute(script))
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)) if script else os.getcwd())


def _is_package(path: str) -> bool:
    """Whether it is a folder or an archive, with a __main__.py in it, rather than a script."""
    if path.endswith(".py"):
        return False
    import pkgutil

    return pkgutil.get_importer(path) is not None


def absolute(path: str) -> str:
    """As the interpreter makes the path of its script absolute: without looking at what is there."""
    return os.path.join(os.getcwd(), path.removeprefix("./"))


def execute(argv: list[str], *, whole: bool) -> None:
    """In a fresh interpreter: run a command line as `run` does, for a whole exit: returns, or raises SystemExit.

    `whole`: also where the program has failed; else, as in an MPI world, there is none then.
    """
    put_first_on_path(argv[2:])
    set_argv(argv)
    accounts.begin()
    if not whole:
        from . import leaving

        leaving.remember()
    ended = _run(argv)
    if not ended or (isinstance(ended[0], SystemExit) and ended[0].code in (None, 0)):
        accounts.keep_end()
        return
    from . import leaving

    if not whole:
        leaving.leave(ended, ours=_OURS)
    leaving.give_up(ended, ours=_OURS)


def run(argv: list[str]) -> None:
    """Run a command line `python -u (SCRIPT | -m MODULE) ARGS` in this interpreter, and leave. Never returns."""
    from . import leaving

    leaving.leave(_run(argv), ours=_OURS)


def _run(argv: list[str]) -> list[BaseException]:
    """What ended it, if something did; to be emptied by who takes it: a traceback holds every frame's variables."""
    main = _fresh_main()
    ended: list[BaseException] = []
    try:
        if "mpi4py" in sys.modules:
            from . import mpi

            mpi.release()
        if argv[2] in CALLS:
            from . import calling

            calling.call(argv[3]) if argv[2] == calling.NAMED else calling.call_pickled()
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
    """A new `__main__`. The old one was frozen with the rest: no garbage collection would ever reach what is in it."""
    old = sys.modules["__main__"]
    new = type(sys)("__main__")
    vars(new).update({name: value for name, value in vars(old).items() if name.startswith("__")})
    vars(new).update(__doc__=None, __builtins__=builtins)
    vars(new).pop("__file__", None)
    vars(new).pop("__cached__", None)
    if "__annotations__" in vars(new):
        vars(new)["__annotations__"] = {}
    sys.modules["__main__"] = new
    return vars(new)


def _run_script(path: str, main: dict[str, Any]) -> None:
    """As pymain_run_file of CPython's Modules/main.c does."""
    loader = __import__("_frozen_importlib_external").SourceFileLoader  # what importlib.machinery calls it, sooner

    path = absolute(path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.update(__loader__=loader("__main__", path), __file__=path, __cached__=None)
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main)  # noqa: S102


def _run_main(name: str, alter_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # as the interpreter does for -m
