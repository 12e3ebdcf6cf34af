"""Packs the call for the ranks (the function, its arguments, what unpickling needs), and sends it to their nodes.

Functions of `__main__`, lambdas and closures are pickled by value. Functions of modules are pickled by reference, and
the ranks import the modules with the caller's import path. A module that is not importable is pickled by value too.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from launchpad.errors import UnpicklableError, UsageError
from launchpad.head.bringup import BringUp
from launchpad.head.sender import PIECE_BYTES, send
from launchpad.protocol.commands import Call
from launchpad.rank import pickling

# Enough for a notebook cell or a script. Tracebacks from other machines show no source lines of larger files.
_LINES = 20_000


def pack(function: Callable[..., Any], arguments: Sequence[Any], backend: str | None, cwd: str) -> int:
    """Write the call to a memfd and return its descriptor. `cwd`: the ranks' working directory, or its original here.

    Raises UnpicklableError, which names the part that can't be pickled.
    """
    _check("launchpad.run", function)
    about = about_caller(backend, cwd) | {"sources": _sources(function), "name": name_of(function)}
    return _written([about], function, arguments, in_main=False, by_value=_unimportable(function))


def pack_session(backend: str | None, cwd: str) -> int:
    """Write what the ranks of a session need before their first call; the same way."""
    fd = os.memfd_create("launchpad-call")
    pickling.dump(about_caller(backend, cwd) | {"sources": {}}, fd)
    return fd


def about_caller(backend: str | None, cwd: str) -> dict[str, Any]:
    """What the ranks need to know about the caller."""
    return {
        "python": list(sys.version_info[:2]),
        "path": [_relative(path, cwd) for path in _own_path()],
        "backend": backend,
    }


class CallPacker:
    """Packs the calls of a session. What the ranks know from earlier calls is left out, and not looked up again."""

    def __init__(self, cwd: str) -> None:
        """`cwd`: the ranks' working directory, or its original here."""
        self._cwd = cwd
        self._path: list[str] = []  # sys.path as it was
        self._sent: list[str] = []  # what the ranks get of it
        self._shown: dict[str, list[str]] = {}  # sources by file
        self._by_value: dict[str, types.ModuleType | None] = {}  # by module

    def pack(self, function: Callable[..., Any], arguments: Sequence[Any]) -> int:
        """Like the function `pack`."""
        _check("ranks.run", function)
        if sys.path != self._path:
            self._path = list(sys.path)
            self._sent = [_relative(path, self._cwd) for path in _own_path()]
        sources = _sources(function)
        new = {name: lines for name, lines in sources.items() if self._shown.get(name) is not lines}
        # The paths go with each call, as one that is cancelled never reaches the ranks.
        about = {"path": self._sent, "sources": new, "name": name_of(function)}
        module = getattr(function, "__module__", None) or ""
        if module not in self._by_value:
            self._by_value[module] = _unimportable(function)
        file = _written([about], function, arguments, in_main=True, by_value=self._by_value[module])
        self._shown |= new
        return file


def _check(caller: str, function: Any) -> None:
    if not callable(function):
        raise UsageError(f"{caller} needs a function to call on each rank, but {function!r:.80} is not callable")


# Held while a module is registered with cloudpickle, whose registry is the process's.
_registering = threading.Lock()


def _written(
    before: Sequence[Any],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    in_main: bool,
    by_value: types.ModuleType | None = None,
) -> int:
    if by_value is None:
        return _dumped(before, function, arguments, in_main, None)
    with _registering:
        return _dumped(before, function, arguments, in_main, by_value)


def _dumped(
    before: Sequence[Any],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    in_main: bool,
    by_value: types.ModuleType | None,
) -> int:
    import cloudpickle

    fd = os.memfd_create("launchpad-call")
    registers = by_value is not None and by_value.__name__ not in cloudpickle.list_registry_pickle_by_value()
    try:
        if registers:
            cloudpickle.register_pickle_by_value(by_value)
        for value in before:
            pickling.dump(value, fd)
        pickling.dump((function, tuple(arguments)), fd, in_main=in_main)
    except OSError as error:
        os.close(fd)
        raise UsageError(f"no memory for the function and its arguments: {error.strerror}") from None
    except Exception:
        os.close(fd)
        for value, name in [(function, f"the function {name_of(function)}"), *_named(arguments)]:
            if "is changed by being pickled" not in (why := pickling.why_not(value, name)):
                remedy = "create it inside the function, or pass what it is created from"
                raise UnpicklableError(f"{why}; {remedy}") from None
        raise
    finally:
        if registers:
            cloudpickle.unregister_pickle_by_value(by_value)
    return fd


def deliver(bringup: BringUp, nodes: Sequence[int], call: int) -> None:
    """Send what the descriptor `call` holds to nodes that are other machines, in pieces, over their links.

    They have it all when this returns. Raises NodeError.
    """
    if nodes:
        view = pickling.map_file(call, shared=False)
        send(bringup, {node: _pieces(view) for node in nodes}, "the function")


def _pieces(view: memoryview) -> Iterator[Call]:
    return (Call(bytes(view[at : at + PIECE_BYTES])) for at in range(0, len(view), PIECE_BYTES))


def name_of(function: Callable[..., Any]) -> str:
    """The function's name for messages and process listings."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def _named(arguments: Sequence[Any]) -> list[tuple[Any, str]]:
    return [(value, f"argument {place}") for place, value in enumerate(arguments, start=1)]


def _own_path() -> list[str]:
    """The caller's import path without the interpreter's own entries: the script's folder, PYTHONPATH …"""
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
    """A path below the working directory, relative to it: the ranks' working directory may be a copy elsewhere."""
    inside = path == cwd or path.startswith(os.path.join(cwd, ""))
    return os.path.relpath(path, cwd) if inside else path


def _sources(function: Callable[..., Any]) -> dict[str, list[str]]:
    """The lines of the function's file if the ranks may not have it: a notebook cell, or `__main__`."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != "__main__":
        return {}
    try:
        lines, _ = inspect.findsource(function)  # which knows what was typed at the prompt of Python 3.13, too
    except (OSError, TypeError):
        return {}
    return {code.co_filename: lines} if len(lines) <= _LINES else {}


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Where an import would find the module: on the path, or by the finder of an editable installation."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next((spec for find in finders if find and (spec := find(name, path, None))), None)


def _unimportable(function: Callable[..., Any]) -> types.ModuleType | None:
    """The function's module if it can't be imported: pytest's importlib mode, exec'd files, notebook magic."""
    name = getattr(function, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name in sys.builtin_module_names:
        return None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = _find(".".join(parts[:depth]), path)
        except (ImportError, ValueError):
            return module
        if spec is None:
            return module if getattr(sys.modules.get(parts[0]), "__file__", None) else None
        path = spec.submodule_search_locations
    return None
