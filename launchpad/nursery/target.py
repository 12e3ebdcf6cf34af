"""In a forked process: become the rank, run its program as `python` would, and leave as `python` would."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import types
from typing import Any

from . import leaving, mpi, process, store


def put_first_on_path(words: list[str]) -> None:
    """Set sys.path[0] as the interpreter does for `python SCRIPT ARGS` and `python -m MODULE ARGS`."""
    if words[0] != "-m" and _is_package(words[0]):
        sys.path.insert(0, absolute(words[0]))
    elif not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0])))


def _is_package(path: str) -> bool:
    """Whether it is a folder or an archive, with a __main__.py in it, rather than a script."""
    import pkgutil

    return not path.endswith(".py") and pkgutil.get_importer(path) is not None


def absolute(path: str) -> str:
    """As the interpreter makes the path of its script absolute: without looking at what is there."""
    return os.path.join(os.getcwd(), path.removeprefix("./"))


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Turn this copy of the nursery into what executing the rank's command line would have given."""
    os.setsid()
    process.die_with_parent(request["agent"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(request["environ"])
    _show(request["argv"])
    _open_stdin()
    _reseed()
    store.hold(request["store"])
    importlib.invalidate_caches()
    leaving.remember()


def _show(argv: list[str]) -> None:
    """Have us, and others, see the rank's own command line."""
    process.show_as([os.fsencode(word) for word in argv], dict(os.environb))
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]


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


def execute(argv: list[str]) -> None:
    """In a fresh interpreter: run a command line as `run` does. Returns when all went well, for a whole exit."""
    put_first_on_path(argv[2:])
    _show(argv)
    leaving.remember()
    ended = _run(argv)
    if ended and not (isinstance(ended[0], SystemExit) and ended[0].code in (None, 0)):
        leaving.leave(ended, ours=__file__)


def run(argv: list[str]) -> None:
    """Run a command line `python -u (SCRIPT | -m MODULE) ARGS` in this interpreter, and leave. Never returns."""
    leaving.leave(_run(argv), ours=__file__)


def _run(argv: list[str]) -> list[BaseException]:
    """What ended it, if something did; to be emptied by who takes it: a traceback holds every frame's variables."""
    main = _fresh_main()
    ended: list[BaseException] = []
    try:
        mpi.release()
        if argv[2] == "-m":
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
    new = types.ModuleType("__main__")
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
    from importlib.machinery import SourceFileLoader

    path = absolute(path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main)  # noqa: S102


def _run_main(name: str, alter_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # as the interpreter does for -m
