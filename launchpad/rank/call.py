"""Runs a function as the rank's program: sets up the process group, calls it, tears the group down.

The function is named on the command line (FILE.py:NAME or MODULE:NAME), or comes pickled with its arguments; then what
it returns or raises goes back pickled too.
"""

from __future__ import annotations

import os
import sys

from . import exceptions, pickling

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# Exit code of a rank whose program can't be run.
CANNOT = 2


def split(word: str) -> tuple[str, str, str]:
    """FILE.py:NAME or MODULE:NAME as (file or "", module or "", name)."""
    place, _, name = word.rpartition(":")
    return (place, "", name) if place.endswith(".py") or "/" in place else ("", place, name)


class Refused(Exception):
    """The function can't be called. Arguments: the name of a class in launchpad.errors, and why."""


def call(word: str) -> None:
    """Call the function named on the command line, and ignore what it returns."""
    try:
        _call(word)
    except Refused as refused:
        print(f"launchpad: error: {refused.args[1]}", file=sys.stderr)
        raise SystemExit(CANNOT) from None


def _call(word: str) -> None:
    file, module, name = split(word)
    function = _load_file(file) if file else _load_module(module)
    for part in name.split("."):
        if not hasattr(function, part):
            _refuse(f"{file or module} has no {name}")
        function = getattr(function, part)
    if not callable(function):
        _refuse(f"{word} can't be called: it is of type {type(function).__name__}")
    arguments = arguments_for(function, word)
    group = Group(os.environ.get("LAUNCHPAD_BACKEND") or None)
    try:
        function(*arguments)
    except Exception as error:
        explain(error)
        raise
    group.end()


def _load_file(path: str) -> Any:
    """Import a file under its own name, so that its definitions can be pickled."""
    from importlib.machinery import ModuleSpec, SourceFileLoader
    from importlib.util import module_from_spec

    path = os.path.join(os.getcwd(), path.removeprefix("./"))
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        _refuse(f"can't open {path}: {error.strerror}")
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules or not name.isidentifier():
        name = "launchpad_function"
    spec = ModuleSpec(name, SourceFileLoader(name, path), origin=path)
    spec.has_location = True
    module = sys.modules[name] = module_from_spec(spec)
    # Not by the loader, whose frames would show up in tracebacks.
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return module


def _load_module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def arguments_for(function: Callable[..., Any], name: str) -> tuple[int, ...]:
    """The arguments for a function: (rank, size) or none, by its signature (like runner/function_target.py)."""
    import inspect

    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C
        return ()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in positional if one.default is one.empty]
    keywords = [one.name for one in parameters if one.kind == one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) not in (0, 2) or keywords:
        needs = ", ".join(needed + keywords)
        _refuse(f"{name} takes ({needs}); it must take (rank, size), or nothing")
    if needed or [one.name for one in positional[:2]] in (["rank", "size"], ["rank", "world_size"]):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return ()


# A key in the group's store.
_ALL_UP = "launchpad/all up"


class Group:
    """The process group around the call."""

    def __init__(self, backend: str | None) -> None:
        self._group = pickling.import_beside("launchpad.collectives", first=False)
        try:
            self._group.init_process_group(backend)
        except sys.modules["launchpad.errors"].LaunchpadError as error:
            raise Refused(type(error).__name__, str(error)) from None
        self._store: Any = None
        if self._group.get_backend() != "mpi":  # which has no store
            get = getattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", None)
            if get is None:  # another torch
                self._group.barrier()
                return
            self._store = get()
            if self._store.add("launchpad/up", 1) == self._group.get_world_size():
                self._store.set(_ALL_UP, "")

    def end(self) -> None:
        """Destroy the group once every rank has finished init. Don't call it after an exception: others may be stuck.

        Gloo connects all ranks to each other in init. A rank that exits earlier looks crashed to one still connecting.
        """
        if self._store is not None:
            try:
                self._store.wait([_ALL_UP])
            except Exception:  # rank 0 hosted the store and has exited, so every rank had finished init
                pass
        if self._group.is_initialized():
            self._group.destroy_process_group()


def explain(error: Exception) -> None:
    """Add a note to an exception that comes from how launchpad calls functions."""
    if isinstance(error, ValueError) and "default process group twice" in str(error):
        error.add_note(
            "launchpad initializes the process group before it calls the function; don't do it again in the function"
        )


def _refuse(why: str) -> NoReturn:
    raise Refused("UsageError", why)


def call_pickled() -> None:
    """Call the function in the file LAUNCHPAD_CALL, and write the outcome to the file LAUNCHPAD_RESULT.

    The outcome is ("returned", value), ("raised", pickled exception or None, its last line, its traceback), or
    ("refused", name of a class in launchpad.errors, why).
    """
    about, given, result = begin()
    group = None
    try:
        function, arguments = load_function(given)
        if about["backend"] is not None:
            group = Group(about["backend"] or None)
        value = function(*(arguments or arguments_for(function, about["name"])))
    except Refused as refused:
        pickling.dump(("refused", *refused.args), result)
        end(CANNOT)
    except Exception as error:
        explain(error)
        exceptions.keep_last(error, ours=(__file__,))
        pickling.dump(in_words(error), result)
        end(1)
    except KeyboardInterrupt:
        end(130)
    try:
        pickling.dump(("returned", value), result)
    except OSError as error:
        raise OSError(error.errno, f"can't save what rank {os.environ['RANK']} returned: {error.strerror}") from None
    except Exception:
        pickling.dump(unpicklable(value), result)
        end(1)
    if group is not None:
        group.end()


def begin() -> tuple[dict[str, Any], memoryview, int]:
    """Read what describes the caller. Returns it, what follows it in the file, and a descriptor for the outcome."""
    with open(os.environ.pop("LAUNCHPAD_CALL"), "rb") as file:
        given = pickling.map_file(file.fileno(), shared=False)
    result = os.open(os.environ.pop("LAUNCHPAD_RESULT"), os.O_WRONLY | os.O_CREAT, 0o600)
    about, given = pickling.load(given)
    if list(sys.version_info[:2]) != about["python"]:
        here, there = (".".join(map(str, one)) for one in (sys.version_info[:2], about["python"]))
        why = f"rank {os.environ['RANK']} has Python {here} ({sys.executable}) and launchpad was called from {there}"
        why += "; functions are sent as bytecode, so the versions must be the same"
        pickling.dump(("refused", "UsageError", why), result)
        end(CANNOT)
    prepare(about)
    return about, given, result


def prepare(about: dict[str, Any]) -> None:
    """Import from where the caller does, and let tracebacks show its sources."""
    sys.path[:0] = [path for path in map(os.path.abspath, about["path"]) if path not in sys.path]
    _show_sources(about["sources"])


def load_function(given: memoryview) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments."""
    try:
        pickling.import_beside("cloudpickle", first=True)  # which the pickle names
        function, arguments = pickling.load(given)[0]
    except ModuleNotFoundError as error:
        rank = os.environ["RANK"]
        error.add_note(f"rank {rank} has to import what the function needs, but {sys.executable} can't")
        raise
    return function, arguments


def unpicklable(value: Any) -> tuple[str, str, str]:
    """The outcome of a call that has returned what can't be pickled."""
    why = pickling.why_not(value, f"what rank {os.environ['RANK']} returned")
    return "refused", "UnpicklableError", f"{why}; return tensors, arrays or plain values instead"


def end(code: int) -> NoReturn:
    """Exit silently: the caller reports the exception."""
    raise SystemExit(code) from None


def _show_sources(sources: dict[str, list[str]]) -> None:
    """Let tracebacks show the source of what is not a file here, such as notebook cells."""
    import linecache

    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def in_words(error: Exception, ours: tuple[str, ...] = ()) -> tuple[str, bytes | None, str, str]:
    """The outcome of a call that has raised this. `ours`: more files whose frames above the function's are left out."""
    import pickle
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, *ours):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    last = "".join(traceback.format_exception_only(error)).strip()
    try:
        pickled = pickling.import_beside("cloudpickle", first=True).dumps(error.with_traceback(None))
        pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
    except Exception:
        pickled = None
    return "raised", pickled, last, text
