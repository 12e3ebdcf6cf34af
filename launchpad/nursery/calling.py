"""In a rank whose program is a function: begin the process group, call it, end the group.

The function is one that the command line names (`--call FILE.py:NAME` or `--call MODULE:NAME`), or it came pickled,
with its arguments, and what it returns or raises goes back the same way (`--pickled`).
"""

from __future__ import annotations

import os
import sys

from . import accounts, pickling

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

NAMED = "--call"
PICKLED = "--pickled"

# A rank whose program can't be run.
_CANNOT = 2


def split(word: str) -> tuple[str, str, str]:
    """FILE.py:NAME or MODULE:NAME as (file or "", module or "", name)."""
    place, _, name = word.rpartition(":")
    return (place, "", name) if place.endswith(".py") or "/" in place else ("", place, name)


class _Refused(Exception):
    """The function can't be called: the name of a class of launchpad.errors, and why."""


def call(word: str) -> None:
    """Call the function that the command line names; what it returns is of no interest."""
    try:
        _call(word)
    except _Refused as refused:
        print(f"launchpad: error: {refused.args[1]}", file=sys.stderr)
        raise SystemExit(_CANNOT) from None


def _call(word: str) -> None:
    file, module, name = split(word)
    function = _load_file(file) if file else _load_module(module)
    for part in name.split("."):
        if not hasattr(function, part):
            _refuse(f"{file or module} has no {name}")
        function = getattr(function, part)
    if not callable(function):
        _refuse(f"{word} can't be called: it is of type {type(function).__name__}")
    arguments = _arguments(function, word)
    group = _begin(os.environ.get("LAUNCHPAD_BACKEND") or None)
    try:
        function(*arguments)
    except ValueError as error:
        _explain_second_group(error)
        raise
    if group.is_initialized():  # where something was raised this would wait for ranks that wait elsewhere
        group.destroy_process_group()


def _load_file(path: str) -> Any:
    """Import a file under its own name, so that what it defines can be pickled."""
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
    # By hand rather than by the loader, whose frames would stand in the traceback.
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return module


def _load_module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _arguments(function: Callable[..., Any], name: str) -> tuple[int, ...]:
    """What a function takes of (rank, size): both or nothing, as its signature says (so does head/functions.py)."""
    import inspect

    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function in C
        return ()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in positional if one.default is one.empty]
    keywords = [one.name for one in parameters if one.kind == one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) not in (0, 2) or keywords:
        needs = ", ".join(needed + keywords)
        _refuse(f"{name} takes ({needs}); a function that ranks call takes (rank, size), or nothing")
    if needed or [one.name for one in positional[:2]] in (["rank", "size"], ["rank", "world_size"]):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return ()


def _begin(backend: str | None) -> Any:
    """The process group; returns launchpad.collectives."""
    group = pickling.import_beside("launchpad.collectives", first=False)
    try:
        group.init_process_group(backend)
    except sys.modules["launchpad.errors"].LaunchpadError as error:
        raise _Refused(type(error).__name__, str(error)) from None
    return group


def _explain_second_group(error: ValueError) -> None:
    if "default process group twice" in str(error):
        error.add_note("launchpad begins the group before it calls the function, which is not to do it again")


def _refuse(why: str) -> NoReturn:
    raise _Refused("UsageError", why)


def call_pickled() -> None:
    """Call what LAUNCHPAD_CALL holds, and write to LAUNCHPAD_RESULT how that ended; both are files.

    How: ("returned", value), ("raised", the exception pickled or None, its last line, its traceback), or ("refused",
    a class of launchpad.errors, why).
    """
    with open(os.environ.pop("LAUNCHPAD_CALL"), "rb") as file:
        given = pickling.map_file(file.fileno(), shared=False)
    result = os.open(os.environ.pop("LAUNCHPAD_RESULT"), os.O_WRONLY | os.O_CREAT, 0o600)
    about, given = pickling.load(given)
    rank = os.environ["RANK"]
    if list(sys.version_info[:2]) != about["python"]:
        here, there = (".".join(map(str, one)) for one in (sys.version_info[:2], about["python"]))
        why = f"rank {rank} has Python {here} ({sys.executable}) and launchpad.run was called from {there}"
        why += ": functions travel as bytecode, so both have to be the same"
        pickling.dump(("refused", "UsageError", why), result)
        _end(_CANNOT)
    sys.path[:0] = [path for path in map(os.path.abspath, about["path"]) if path not in sys.path]
    _show_sources(about["sources"])
    group = None
    try:
        try:
            function, arguments = pickling.load(given)[0]
        except ModuleNotFoundError as error:
            error.add_note(f"rank {rank} has to import what the function needs, and {sys.executable} can't")
            raise
        if about["backend"] is not None:
            group = _begin(about["backend"] or None)
        value = function(*(arguments or _arguments(function, about["name"])))
    except _Refused as refused:
        pickling.dump(("refused", *refused.args), result)
        _end(_CANNOT)
    except Exception as error:
        if isinstance(error, ValueError):
            _explain_second_group(error)
        accounts.keep_last(error, ours=(__file__,))
        pickling.dump(_in_words(error), result)
        _end(1)
    except KeyboardInterrupt:
        _end(130)
    try:
        pickling.dump(("returned", value), result)
    except OSError as error:
        raise OSError(error.errno, f"what rank {rank} returned can't be kept: {error.strerror}") from None
    except Exception:
        why = pickling.why_not(value, f"what rank {rank} returned")
        why += "; return tensors, arrays or plain values instead"
        pickling.dump(("refused", "UnpicklableError", why), result)
        _end(1)
    if group is not None and group.is_initialized():
        group.destroy_process_group()


def _end(code: int) -> NoReturn:
    """What was raised is told by the caller, and not here too."""
    raise SystemExit(code) from None


def _show_sources(sources: dict[str, list[str]]) -> None:
    """So that a traceback shows the lines of what is no file here, of a notebook's cells for example."""
    import linecache

    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _in_words(error: Exception) -> tuple[str, bytes | None, str, str]:
    import pickle
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    last = "".join(traceback.format_exception_only(error)).strip()
    try:
        pickled = pickling.import_beside("cloudpickle", first=True).dumps(error.with_traceback(None))
        pickle.loads(pickled)  # many an exception can be pickled and not be made again
    except Exception:
        pickled = None
    return "raised", pickled, last, text
