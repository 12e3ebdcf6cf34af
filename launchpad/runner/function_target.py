"""Recognises functions as targets (FILE.py:NAME and MODULE:NAME), and checks them in the source."""

from __future__ import annotations

import os
from typing import Any

from launchpad.errors import UsageError

_AST_ONLY = 0x400  # ast.PyCF_ONLY_AST; ast itself takes milliseconds to import


def split(word: str) -> tuple[str, str] | None:
    """FILE.py:NAME or MODULE:NAME as its two parts, or None for any other word."""
    place, colon, name = word.rpartition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        return None
    return (place, name) if is_file(place) or all(part.isidentifier() for part in place.split(".")) else None


def is_file(place: str) -> bool:
    """Whether the part before the colon is a file rather than a module. rank/call.py has the same rule."""
    return place.endswith(".py") or "/" in place


def check(word: str, *, here: bool) -> None:
    """Raise UsageError if the source shows that there is no such function, or that ranks can't call it.

    The file is looked up below the current folder, but need not exist unless a rank runs `here`. Functions that are
    imported, decorated or computed are left for the ranks to check.
    """
    found = split(word)
    assert found is not None
    place, name = found
    path = place if is_file(place) else place.replace(".", "/") + ".py"
    if not is_file(place) and not os.path.isfile(path):
        path = os.path.join(place.replace(".", "/"), "__init__.py")
    try:
        with open(path, "rb") as file:
            tree: Any = compile(file.read(), path, "exec", _AST_ONLY, dont_inherit=True)
    except OSError as error:
        if here and is_file(place):
            raise UsageError(f"{place} can't be read: {error.strerror}") from None
        return
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the ranks will report it
    defined = {node.name: node for node in tree.body if type(node).__name__ in ("FunctionDef", "AsyncFunctionDef")}
    node = defined.get(name)
    if node is None:
        if name.split(".")[0] not in _bound(tree) and not _binds_unseen(tree):
            has = f"it has {', '.join(defined)}" if defined else "it has no function"
            raise UsageError(f"{path} has no {name} ({has})")
    elif type(node).__name__ == "AsyncFunctionDef":
        raise UsageError(f"{word} is a coroutine function; give a plain function that calls asyncio.run")
    elif not node.decorator_list:
        _check_parameters(word, node.args)


def _check_parameters(word: str, args: Any) -> None:
    positional = [one.arg for one in (*args.posonlyargs, *args.args)]
    needed = positional[: len(positional) - len(args.defaults)]
    needed_keywords = [
        one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None
    ]
    if len(needed) not in (0, 2) or needed_keywords:
        needs = ", ".join(needed + needed_keywords)
        raise UsageError(f"{word} takes ({needs}); it must take (rank, size), or nothing")


def _bound(tree: Any) -> set[str]:
    """All names that are bound anywhere in the file."""
    return {name for node in _nodes(tree) for name in _names(node)}


def _names(node: Any) -> list[str]:
    match type(node).__name__:
        case "Name":
            return [node.id] if type(node.ctx).__name__ == "Store" else []
        case "ClassDef" | "FunctionDef" | "AsyncFunctionDef":
            return [node.name]
        case "Import" | "ImportFrom":
            return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    return []


def _binds_unseen(tree: Any) -> bool:
    """Whether names may be bound invisibly: `import *`, a module's __getattr__, globals()."""
    return bool({"*", "__getattr__"} & _bound(tree)) or any(
        getattr(node, "id", "") == "globals" for node in _nodes(tree)
    )


def _nodes(tree: Any) -> list[Any]:
    found = [tree]
    for node in found:
        for field in node._fields:
            value = getattr(node, field, None)
            found += [one for one in (value if isinstance(value, list) else [value]) if hasattr(one, "_fields")]
    return found
