"""The shape of the code: which package may import which, and what is public."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchpad

ROOT = Path(launchpad.__file__).parent

# A room, and the rooms that it may import from: a staircase, the leaves first.
STAIRCASE: dict[str, set[str]] = {
    "_version": set(),
    "elf": {"named"},
    "errors": set(),
    "linux": set(),
    "named": set(),
    "listeners": {"linux"},
    "mpi_library": {"elf", "named"},
    "caller": set(),
    "image": {"linux", "named"},
    "protocol": {"linux", "named"},
    "job": {"errors", "named", "protocol"},
    "transport": {"_version", "caller", "errors", "image", "linux", "named", "protocol"},
    "control": {"errors", "job", "linux", "protocol"},
    "output": {"caller", "named", "protocol"},
    "diagnosis": {"job", "protocol"},
    "doctor": {"job", "named", "protocol"},
    "head": {
        *("_version", "caller", "doctor", "elf", "errors", "job", "linux", "named", "output", "protocol"),
        "transport",
    },
    "console": {"caller", "diagnosis", "doctor", "errors", "job", "named", "output", "protocol"},
    "record": {
        *("_version", "console", "diagnosis", "errors", "job", "linux", "named", "output", "protocol"),
        "transport",
    },
    "report": {"_version", "diagnosis", "errors", "job", "protocol", "record"},
    "runner": {
        *("console", "control", "diagnosis", "doctor", "errors", "head", "image", "job", "linux", "listeners"),
        *("mpi_library", "named", "output", "protocol", "record", "report", "transport"),
    },
    "agent": {"image", "linux", "listeners", "mpi_library", "named", "protocol", "rank"},
    "rank": set(),
    "forkserver": {"agent", "image", "linux", "rank"},
    "collectives": {"errors"},
    "bench": {"_version", "collectives", "console", "errors", "output", "protocol"},
    "testing": {"agent", "collectives", "diagnosis", "forkserver", "job", "linux", "mpi_library", "protocol", "rank"},
    "api": {"console", "errors", "head", "job", "linux", "named", "protocol", "rank", "runner", "transport"},
    "cli": {
        *(
            "_version",
            "bench",
            "caller",
            "console",
            "control",
            "diagnosis",
            "doctor",
            "errors",
            "head",
            "image",
            "job",
            "protocol",
        ),
        *("record", "report", "runner", "transport"),
    },
    "__init__": {"_version", "api", "errors"},
    "__main__": {"cli"},
}

# Modules that a room knows by their names alone.
BY_NAME = {
    "__init__": {"launchpad.api", "launchpad.errors"},  # what is public, imported when it is first used
    "cli": {"launchpad.cli", "launchpad.bench"},  # the commands; what the ranks of a bench run
    "runner": {"launchpad.collectives", "launchpad.forkserver"},  # a script that imports the first imports torch
    "rank": {"_launchpad.rank", "launchpad.collectives", "launchpad.errors"},  # where the rank's program has them
    "forkserver": {"_launchpad.forkserver"},
    "transport": {".agent"},  # of the package that was sent to a node
    "bench": {"launchpad.collectives"},
    "testing": {"launchpad.collectives", "launchpad.testing.member"},
}

# What is sent to nodes: it imports the standard library only.
SHIPPED = (
    *("_version", "agent", "elf", "forkserver", "image", "linux", "listeners", "mpi_library", "named", "protocol"),
    "rank",
)

# Where a heavy package may be imported at all.
HOMES = {
    "torch": {"bench", "collectives", "rank", "forkserver"},
    "mpi4py": {"bench", "collectives"},
    "paramiko": {"transport"},
    "rich": {"cli", "console", "record", "bench"},
    "matplotlib": {"bench"},
    "click": {"cli"},
    "psutil": {"record"},
}


@functools.cache
def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of its syntax tree; the first one is the module. Made once, as that takes most of the time here."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    """The trees take more memory than all other tests of a worker."""
    yield
    nodes.cache_clear()


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@functools.cache
def imported(path: Path) -> set[str]:
    """Absolute names of what a file imports, also inside functions."""
    package = ["launchpad", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for path in modules():
        room = room_of(path)
        for name in imported(path):
            parts = name.split(".")
            ours = parts[0] == "launchpad" and len(parts) > 1 and parts[1] in STAIRCASE
            upward = ours and parts[1] != room and parts[1] not in STAIRCASE[room]
            if upward or (parts[0] in HOMES and room not in HOMES[parts[0]]):
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def graph() -> dict[str, set[str]]:
    """Each of our modules, and those of ours that it imports."""
    names = {}
    for path in modules():
        parts = ["launchpad", *path.relative_to(ROOT).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {name: (imported(path) & names.keys()) - {name} for name, path in names.items()}
    # `from package import module` imports the module; the package is loaded, but not for anything in it.
    return {
        name: {one for one in ours if not any(other.startswith(f"{one}.") for other in ours)}
        for name, ours in found.items()
    }


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """A cycle, if there is one: what is left when everything that imports nothing of the rest is taken away."""
    left = {name: set(targets) for name, targets in edges.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_cycle_between_modules() -> None:
    assert cycle_in(graph()) == []


def test_no_cycle_between_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for path in modules():
        names = {name.split(".")[1] for name in imported(path) if name.startswith("launchpad.")}
        rooms.setdefault(room_of(path), set()).update(names & STAIRCASE.keys() - {room_of(path)})
    assert cycle_in(rooms) == []


def test_modules_known_by_name_stand_in_the_table() -> None:
    wrong = []
    for path in modules():
        known = tuple(BY_NAME.get(room_of(path), ()))
        for node in nodes(path):
            if isinstance(node, ast.Constant) and re.fullmatch(r"(_?launchpad)?(\.[a-z_0-9]+)+", str(node.value)):
                ours = str(node.value).removeprefix("_").removeprefix("launchpad").split(".")[1]
                if ours in STAIRCASE and not ours.startswith("__") and not str(node.value).startswith(known or "-"):
                    wrong.append(f"{path} names {node.value}")
    assert wrong == []


def test_what_is_declared_is_used() -> None:
    """Whoever installs launchpad installs these too."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"]}
    used = {name.split(".")[0] for path in modules() for name in imported(path)}
    assert declared <= used, f"imported nowhere: {declared - used}"


def test_a_node_needs_the_standard_library_only() -> None:
    there = {*sys.stdlib_module_names, "launchpad"}
    wrong = [
        f"{path} imports {name}"
        for path in modules()
        if room_of(path) in SHIPPED
        for name in imported(path)
        if name.split(".")[0] not in there
    ]
    assert wrong == []


def test_a_node_may_have_python_3_10() -> None:
    new = set(
        "Self dataclass_transform Never NotRequired Required Unpack LiteralString TypeVarTuple assert_never".split()
    )
    wrong = [
        f"{path}:{node.lineno}"
        for path in modules()
        if room_of(path) in SHIPPED
        for node in nodes(path)[0].body  # type: ignore[attr-defined]  # without those for type checkers
        if isinstance(node, ast.ImportFrom) and node.module == "typing" and new & {one.name for one in node.names}
    ]
    wrong += [
        f"{path}:{node.lineno}: the byte order has no default in 3.10"
        for path in modules()
        if room_of(path) in SHIPPED
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("from_bytes", "to_bytes") and len(node.args) + len(node.keywords) < 2
    ]
    assert wrong == []


def test_a_module_says_what_it_does() -> None:
    assert [path for path in modules() if not ast.get_docstring(nodes(path)[0])] == []


def test_no_class_name_stands_for_two_things() -> None:
    names = [node.name.lstrip("_") for path in modules() for node in nodes(path) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_patterns_name_the_fields_that_they_use() -> None:
    """By position they would take something else without an error, once a field is put before it."""
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.MatchClass) and node.patterns and not hasattr(builtins, ast.unparse(node.cls))
    ]
    assert wrong == []


def lines_of(function: ast.FunctionDef) -> int:
    """Without its docstring, which may be a page of the public interface."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    said = function.body[0] if ast.get_docstring(function) else None
    return lines - ((said.end_lineno or 0) - said.lineno + 1 if said else 0)


def test_functions_are_short() -> None:
    wrong = [
        f"{path}:{node.lineno}: {node.name} has {lines_of(node)} lines"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and lines_of(node) > 60
    ]
    assert wrong == []


def test_the_public_surface_is_exact() -> None:
    errors = "ConnectError FrontendError JobTimeout LaunchpadError NodeError RankError Ranks RemoteTraceback".split()
    more = "Results Role UnpicklableError UsageError WorldError __version__".split()
    assert launchpad.__all__ == [*errors, *more, "load_ipython_extension", "ranks", "run", "stop_by"]
    assert all(hasattr(launchpad, name) for name in launchpad.__all__)
