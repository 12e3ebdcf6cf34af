"""Decides what to import before forking: by the command line, and by the imports in the target's source.

Missing an import costs only time, because then each rank imports torch itself. But a program may be forked only if it
can't tell the difference: one that sets variables for torch before importing it has to be executed.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launchpad.console.message import say_on_stderr
from launchpad.errors import UsageError
from launchpad.image import WITH_OPTIMIZERS
from launchpad.job.spec import Bind, Target
from launchpad.named import NamedTuple
from launchpad.runner.function_target import is_file
from launchpad.runner.options import RunOptions

TORCH = ("torch", "torch.distributed")

# These take effect at the start or very end of a process, which a forked rank doesn't go through.
NOT_FORKED = (
    "PYTHONINSPECT",
    "PYTHONDUMPREFS",
    "PYTHONMALLOCSTATS",
    "PYTHONPROFILEIMPORTTIME",
    "COVERAGE_PROCESS_START",
    "COVERAGE_PROCESS_CONFIG",  # coverage 7.10 and later, with patch = subprocess
    "CPUPROFILE",  # gperftools
    "HEAPPROFILE",
    "HEAPCHECK",
    "LD_AUDIT",
)

# With these, OpenMP chooses CPUs for its threads when it is loaded, of those that the process may use then.
_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

# Packages that import torch as soon as they are imported.
_IMPORTS_TORCH = frozenset(
    "torch torchvision torchaudio torchtext torchdata torchmetrics torchtitan torchtune lightning pytorch_lightning "
    "accelerate deepspeed fairscale torchrec torch_geometric timm".split()
)

# Variables that torch, or a library in it, reads at import.
READ_AT_IMPORT = "(OMP|MKL|KMP|GOMP|OPENBLAS|TORCH|PYTORCH|ATEN|LD|DNNL|ONEDNN|NPY|PYTHON)_?[A-Z0-9_]*"

# Limits on what is read: files of a program, and bytes of a file.
_FILES = 300
_BYTES = 2 << 20

# Compiled for programs that import something.
_IMPORT = rb"(?m)^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*|[^#\n;]*)|import[ \t]+([^#\n;]+))"

_AST_ONLY = 0x400  # ast.PyCF_ONLY_AST; ast itself takes milliseconds to import


class Found(NamedTuple):
    """What the source shows."""

    torch: bool
    why_not: str  # why forking is unsound, "" if it isn't
    optimizes: bool = False  # it makes optimizers, and sets no variables that their imports read


def what_to_preload(
    options: RunOptions, target: Target, look: Callable[[], Found], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The modules to import before the ranks are forked; empty if the ranks are executed instead.

    `look` reads the target's source.
    """
    if options.no_hooks:
        _check_no_hooks(options, target)
        return ()
    requested = options.preload
    if requested is not None and options.start_method in ("exec", "spawn"):
        raise UsageError(
            f"--preload is for forked ranks, but --start-method {options.start_method} executes them; "
            "leave one of them out"
        )
    names = module_names(requested or "")
    if names and target.kind == "program":
        raise UsageError(f"--preload: {target.name} is not a Python target, so nothing can be imported for it")
    if requested is not None and not names:
        return ()
    if options.start_method in ("exec", "spawn") or target.kind == "program":
        return ()
    found = look()
    why_not = found.why_not or why_not_forked(environ, options.binds)
    if why_not and (found.torch or names):
        if not options.reports.quiet:
            from launchpad.console.notes import not_forked

            say_on_stderr(not_forked(why_not))
        return ()
    torch = (*TORCH, WITH_OPTIMIZERS) if found.optimizes else TORCH
    return tuple(dict.fromkeys([*(torch if found.torch else ()), *names]))


def executes_ranks(options: RunOptions) -> bool:
    """Whether the user wants ranks executed in any case."""
    nothing = options.preload is not None and not options.preload.strip(", ")
    return nothing or options.start_method in ("exec", "spawn")


def why_not_forked(environ: Mapping[str, str], bind: Bind) -> str:
    """The variable by which ranks that are bound so would differ if they were forked; "" for none."""
    if name := next((name for name in NOT_FORKED if environ.get(name)), ""):
        return f"{name} is set"
    if bind != "none" and (name := next((name for name in _PINNING if environ.get(name)), "")):
        return f"{name} is set, and chooses CPUs when torch is imported, before a forked rank would be bound"
    return ""


def module_names(text: str) -> tuple[str, ...]:
    """The value of --preload. Raises UsageError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {name}: not a module's name; write --preload MODULE,MODULE")
    return names


def _check_no_hooks(options: RunOptions, target: Target) -> None:
    """Raise UsageError for options that need our code in the ranks."""
    if target.kind == "function":
        raise UsageError(
            f"--no-hooks: {target.name} needs launchpad's code to call it; give a script, or leave --no-hooks out"
        )
    forks = "--preload" if (options.preload or "").strip(", ") else ""
    if options.start_method in ("fork", "forkserver"):
        forks = f"--start-method {options.start_method}"
    if forks:
        raise UsageError(f"--no-hooks executes each rank, but {forks} forks them; leave one of them out")


def look_through(target: Target, cwd: str, environ: Mapping[str, str]) -> Found:
    """Read the target's source files on this machine."""
    torch, why_not = target.kind == "function", ""  # it is called within a process group
    optimizes, sets = False, False
    for path in _sources(target, cwd, environ.get("PYTHONPATH", "")):
        one = _examine(path)
        torch = torch or one.torch
        why_not = why_not or one.early
        optimizes = optimizes or one.optimizes
        sets = sets or one.sets
    return Found(torch, why_not, optimizes and not sets)


def _sources(target: Target, cwd: str, pythonpath: str) -> Iterator[str]:
    """The target's file, and the local files that it imports, directly or indirectly."""
    roots = [os.path.join(cwd, part) for part in pythonpath.split(os.pathsep) if part]
    kind, name = target.kind, target.name
    if kind == "function":
        name = name.rpartition(":")[0]
        kind = "script" if is_file(name) else "module"
    if kind == "module":
        roots.insert(0, cwd)
        todo = _find(name, roots)
        todo += _find(name + ".__main__", roots) if target.kind == "module" else []
    elif kind == "script":
        path = os.path.join(cwd, name)
        todo = [os.path.join(path, "__main__.py") if os.path.isdir(path) else path]
        roots.insert(0, os.path.dirname(os.path.realpath(todo[0])))
    else:
        return
    seen: set[str] = set()
    while todo and len(seen) < _FILES:
        path = todo.pop(0)
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in _imported(path):
            todo += _find(name, roots) if not name.startswith(".") else _find_relative(name, path)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_BYTES)
    except OSError:
        return b""


def _imported(path: str) -> Iterator[str]:
    """The names in a file's import statements, as written, including names that may or may not be modules."""
    source = _read(path)
    for match in re.finditer(_IMPORT, source) if b"import" in source else ():
        base, names, plain = (part.decode(errors="replace") if part else "" for part in match.groups())
        for part in re.sub("#.*", "", plain or names).split(","):
            name = part.strip(" \t\r\n\\()").split(" ")[0].strip()
            if plain:
                yield name
            elif base:
                yield base
                yield f"{base}{'' if base.endswith('.') else '.'}{name}"


def _find(name: str, roots: list[str]) -> list[str]:
    """The files of a module and its parent packages, if they are below one of the roots."""
    parts = name.split(".")
    if not all(parts):
        return []
    for root in roots:
        head = os.path.join(root, parts[0])
        if os.path.isfile(head + ".py"):
            return [head + ".py"]
        if os.path.isdir(head):
            return _below(root, parts)
    return []


def _find_relative(name: str, path: str) -> list[str]:
    dots = len(name) - len(name.lstrip("."))
    folder = os.path.dirname(path)
    for _ in range(dots - 1):
        folder = os.path.dirname(folder)
    return _below(folder, [part for part in name[dots:].split(".") if part])


def _below(folder: str, parts: list[str]) -> list[str]:
    found = []
    for part in parts:
        folder = os.path.join(folder, part)
        found += [path for path in (folder + ".py", os.path.join(folder, "__init__.py")) if os.path.isfile(path)]
    return found


class _File(NamedTuple):
    """What a file of the program does."""

    torch: bool = False  # imports it
    early: str = ""  # what it sets before it does, and why that matters
    optimizes: bool = False  # names torch.optim
    sets: bool = False  # a variable that torch reads, wherever


def _examine(path: str) -> _File:
    source = _read(path)
    mentions = any(name.split(".")[0] in _IMPORTS_TORCH or name == "launchpad.collectives" for name in _imported(path))
    sets = b"environ" in source or b"putenv" in source
    if not (mentions or sets):
        return _File()
    try:
        tree = compile(source, path, "exec", _AST_ONLY, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _File()  # the ranks will say it
    try:
        facts = list(_facts(tree))
    except RecursionError:  # an expression of a thousand terms
        return _File(mentions)
    torch_line = min((line for line, kind, _ in facts if kind == "torch"), default=0)
    settings = [(line, name) for line, kind, name in facts if kind == "sets"]
    early = ""
    for line, name in settings:
        if not torch_line or line < torch_line:
            where = f"{os.path.relpath(path)}, line {line}"
            early = f"{where} sets {name}, which torch is to find when it is imported"
            break
    optimizes = any(kind == "optimizes" for _, kind, _ in facts)
    return _File(bool(torch_line), early, optimizes, bool(settings))


def _facts(node: Any) -> Iterator[tuple[int, str, str]]:
    """(line, "torch", module) for each import of it, (line, "sets", variable) for each assignment, and "optimizes"."""
    kind = type(node).__name__
    if kind == "If" and "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", "")):
        return
    if kind in ("Import", "ImportFrom"):
        names = [node.module or ""] if kind == "ImportFrom" else [alias.name for alias in node.names]
        if kind == "ImportFrom" and node.module == "launchpad":
            names += [f"launchpad.{alias.name}" for alias in node.names]
        if "torch.optim" in names or (kind == "ImportFrom" and node.module == "torch" and _names(node, "optim")):
            yield node.lineno, "optimizes", "torch.optim"
        for name in names:
            if not getattr(node, "level", 0) and (
                name.split(".")[0] in _IMPORTS_TORCH or name.startswith("launchpad.collectives")
            ):
                yield node.lineno, "torch", name
    elif kind in ("Assign", "AugAssign"):
        for to in node.targets if kind == "Assign" else [node.target]:
            if type(to).__name__ == "Subscript" and _is_environ(to.value):
                yield from _setting(to.slice, node.lineno)
    elif kind == "Call":
        yield from _call(node)
    elif kind == "Attribute" and node.attr == "optim" and getattr(node.value, "id", "") == "torch":
        yield node.lineno, "optimizes", "torch.optim"
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else [value]:
            if hasattr(child, "_fields"):
                yield from _facts(child)


def _names(node: Any, name: str) -> bool:
    return any(alias.name == name for alias in node.names)


def _call(node: Any) -> Iterator[tuple[int, str, str]]:
    function = node.func
    method = getattr(function, "attr", getattr(function, "id", ""))
    if (method == "putenv" and node.args) or (method == "setdefault" and node.args and _is_environ(function.value)):
        yield from _setting(node.args[0], node.lineno)
    elif method == "update" and hasattr(function, "value") and _is_environ(function.value):
        for given in node.args:
            keys = given.keys if type(given).__name__ == "Dict" else [None]
            for key in keys:
                yield from _setting(key, node.lineno)
        for keyword in node.keywords:
            if keyword.arg and re.fullmatch(READ_AT_IMPORT, keyword.arg):
                yield node.lineno, "sets", keyword.arg


def _is_environ(node: Any) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environb")


def _setting(key: Any, line: int) -> Iterator[tuple[int, str, str]]:
    """The variable that is set, if it matters; a computed name may be any variable."""
    name = getattr(key, "value", None) if type(key).__name__ == "Constant" else None
    if name is None:
        yield line, "sets", "a variable whose name is computed"
    elif isinstance(name, str) and re.fullmatch(READ_AT_IMPORT, name):
        yield line, "sets", name
