"""The call that goes to the ranks: the function, its arguments, and what it takes to unpickle them there.

Functions of `__main__`, lambdas and closures go by value; those of modules go by reference, and the modules are
imported by the ranks, which get the caller's import path. A module that is on no path goes by value too.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Any

from launchpad.errors import UnpicklableError, UsageError
from launchpad.nursery import pickling

# A notebook's cell, a script; what is larger shows no source lines in a traceback on another machine.
_LINES = 20_000


def pack(function: Callable[..., Any], arguments: Sequence[Any], backend: str | None, cwd: str) -> int:
    """A file in memory that holds the call; its descriptor. `cwd`: where the ranks will run, here or in a copy of it.

    Raises UnpicklableError, which names the part that can't be pickled.
    """
    if not callable(function):
        raise UsageError(f"launchpad.run calls a function on each rank, and {function!r:.80} can't be called")
    about = {
        "python": list(sys.version_info[:2]),
        "path": [_relative(path, cwd) for path in _own_path()],
        "sources": _sources(function),
        "backend": backend,
        "name": name_of(function),
    }
    import cloudpickle

    by_value = _unimportable(function)
    fd = os.memfd_create("launchpad-call")
    try:
        if by_value is not None:
            cloudpickle.register_pickle_by_value(by_value)
        pickling.dump(about, fd)
        pickling.dump((function, tuple(arguments)), fd)
    except OSError as error:
        os.close(fd)
        raise UsageError(f"there is no room for the arguments: {error.strerror}") from None
    except Exception:
        os.close(fd)
        for value, name in [(function, f"the function {name_of(function)}"), *_named(arguments)]:
            if "is changed by being pickled" not in (why := pickling.why_not(value, name)):
                mend = "make it inside the function, or give the ranks what it is made from"
                raise UnpicklableError(f"{why}; {mend}") from None
        raise
    finally:
        if by_value is not None:
            cloudpickle.unregister_pickle_by_value(by_value)
    return fd


def name_of(function: Callable[..., Any]) -> str:
    """How the function is called in messages and in listings of processes."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def _named(arguments: Sequence[Any]) -> list[tuple[Any, str]]:
    return [(value, f"argument {place}") for place, value in enumerate(arguments, start=1)]


def _own_path() -> list[str]:
    """What the caller's import path has beyond that of any interpreter like ours: scripts' folders, PYTHONPATH …"""
    usual = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    roots = [os.path.join(one, "lib") for one in (sys.prefix, sys.base_prefix)]
    found = []
    for path in sys.path:
        path = os.path.abspath(path)
        real = os.path.realpath(path)
        if real not in usual and not any(real.startswith(os.path.join(os.path.realpath(one), "")) for one in roots):
            found.append(path)
    return found


def _relative(path: str, cwd: str) -> str:
    """What lies below the working folder is found below the ranks' one, which may be a copy elsewhere."""
    inside = path == cwd or path.startswith(os.path.join(cwd, ""))
    return os.path.relpath(path, cwd) if inside else path


def _sources(function: Callable[..., Any]) -> dict[str, list[str]]:
    """The lines of the function's file, where the ranks may not have it: of a notebook's cell, of `__main__`."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != "__main__":
        return {}
    lines = linecache.getlines(code.co_filename, getattr(function, "__globals__", None))
    return {code.co_filename: lines} if 0 < len(lines) <= _LINES else {}


def _unimportable(function: Callable[..., Any]) -> types.ModuleType | None:
    """The function's module, where no import would find it: pytest's importlib mode, exec'd files, notebooks' magic."""
    name = getattr(function, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name in sys.builtin_module_names:
        return None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        except (ImportError, ValueError):
            return module
        if spec is None:
            return module if getattr(sys.modules.get(parts[0]), "__file__", None) else None
        path = spec.submodule_search_locations
    return None
