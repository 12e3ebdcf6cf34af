"""The shape of the code: which package may import which, what a plain run loads, what is public."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import launchpad

ROOT = Path(launchpad.__file__).parent

# A room, and the rooms that it may import from. Leaves: errors, events, failures, stacks, commands, wire, job.
STAIRCASE = {
    "__init__": {"errors", "functions"},
    "__main__": {"cli"},
    "errors": set(),
    "events": set(),
    "commands": set(),
    "failures": set(),
    "stacks": set(),
    "wire": {"commands", "events", "failures", "stacks"},
    "job": {"commands", "errors", "events"},
    "agent": {"commands", "events", "failures", "stacks", "wire"},
    "nursery": set(),
    "collectives": {"errors"},
    "bench": {"collectives", "errors"},
    "transport": {"commands", "errors", "events", "job", "wire"},
    "head": {"commands", "errors", "events", "failures", "job", "stacks", "transport", "wire"},
    "report": {"bench", "errors", "events", "failures", "job", "stacks"},
    "functions": {"cli", "commands", "errors", "events", "failures", "head", "job", "nursery", "report", "transport"},
    "cli": {"bench", "errors", "events", "failures", "head", "job", "report", "transport"},
}

# Where a heavy package may be imported at all.
HOMES = {
    "torch": {"bench", "collectives", "nursery"},
    "mpi4py": {"bench", "collectives"},
    "paramiko": {"transport"},
    "rich": {"report", "cli"},
    "matplotlib": {"report"},
    "click": {"cli"},
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Absolute names of what a file imports, also inside functions."""
    package = ["launchpad", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "launchpad" and len(parts) > 1 and parts[1] in STAIRCASE:
            assert parts[1] == room or parts[1] in STAIRCASE[room], f"{room} imports {name}"
        if parts[0] in HOMES:
            assert room in HOMES[parts[0]], f"{room} imports {name}"


@pytest.mark.parametrize(
    "path",
    [p for p in modules() if room_of(p) in ("agent", "nursery", "wire", "events", "failures", "commands", "stacks")],
    ids=str,
)
def test_agent_needs_the_standard_library_only(path: Path) -> None:
    for name in imported(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "launchpad", f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_does_and_stays_short(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert text.count("\n") <= 350, f"{path} is too long to do one thing"


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    show = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_plain_run_loads_only_what_it_needs() -> None:
    """Each of these costs milliseconds before the first rank starts."""
    heavy = {"torch", "paramiko", "rich", "psutil", "numpy", "subprocess", "asyncio", "logging", "tempfile", "socket"}
    head = loaded("import launchpad.cli.entry, launchpad.cli.main, launchpad.cli.run, launchpad.transport.local")
    assert not head & heavy
    # What only some jobs need: MPI worlds, a watch for stalls, a verdict, stacks.
    late = {"head.worlds", "head.stall", "job.mpi"} | {f"report.{name}" for name in ("verdict", "telling", "places")}
    assert not head & {f"launchpad.{name}" for name in late}


def test_the_agent_loads_only_what_it_needs() -> None:
    heavy = {"subprocess", "asyncio", "logging", "tempfile", "dataclasses", "inspect", "pathlib", "shutil", "threading"}
    heavy |= {"zlib"}
    code = "import site; before = set(__import__('sys').modules)\nimport launchpad.agent.agent, launchpad.agent.guard"
    assert not (loaded(code) - loaded("import site")) & heavy


def test_an_executed_rank_loads_only_what_it_needs(tmp_path: Path) -> None:
    """Every Python rank pays for it; what calls, MPI and failures need is loaded for them."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.modules)\n")
    plain, rank = (
        set(subprocess.check_output([sys.executable, *words, script], text=True, timeout=60).split())
        for words in ((), (ROOT / "nursery" / "executed.py",))
    )
    own = {f"_launchpad_rank{name}" for name in ("", ".accounts", ".answering", ".program", ".shown")}
    assert rank - plain <= own | {"__future__", "_ctypes", "faulthandler", "fcntl"}


@pytest.mark.parametrize("name", ["commands", "events", "failures", "stacks"])
def test_a_vocabulary_has_its_annotations_as_types(name: str) -> None:
    """A NamedTuple compiles each annotation that is a string, in head and agent, before the first rank starts."""
    assert "from __future__ import annotations" not in (ROOT / f"{name}.py").read_text()


def test_the_public_surface_is_exact() -> None:
    errors = "ConnectError FrontendError JobTimeout LaunchpadError NodeError RankError RemoteTraceback".split()
    more = "Results UnpicklableError UsageError WorldError __version__ run".split()
    assert launchpad.__all__ == [*errors, *more]
    assert all(hasattr(launchpad, name) for name in launchpad.__all__)
