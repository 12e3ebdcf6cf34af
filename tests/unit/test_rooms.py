"""Where tests are: a module of launchpad/ has unit tests, or there is a reason why not."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import launchpad

PACKAGE = Path(launchpad.__file__).parent
TESTS = Path(__file__).parents[1]

# Why they have none: rooms, parts of rooms, modules.
REASONS = {
    "names what is public": "__init__",
    "starts the command: real/one_node": "__main__",
    "looks at processes and hosts: real/one_node, real/hosts": (
        "agent/__main__ agent/arrival agent/bridge agent/guard agent/holder agent/host/processes agent/loop "
        "agent/net/port agent/net/reachability agent/ranks/call_lines agent/ranks/calls agent/ranks/leftovers "
        "agent/ranks/signals agent/wards agent/zygote"
    ),
    "talks to libpmix and MPI programs: real/mpi": "agent/mpi/frames agent/mpi/pmix_server",
    "stops and reads processes: real/one_node/test_stacks.py, test_awaited.py": (
        "agent/stacks/children agent/stacks/debug_channel agent/stacks/dump agent/stacks/outside agent/stacks/part "
        "agent/stacks/profiler agent/stacks/source_lines agent/stacks/spy"
    ),
    "starts jobs: real/api, real/notebook": "api",
    "measures jobs: real/bench": "bench/__main__ bench/patterns",
    "the user's process and terminal: real/images": "caller",
    "the command line itself: real/one_node, real/terminal": "cli",
    "process groups of ranks: real/torch, real/mpi": "collectives",
    "what a user sees of a job: real/one_node, real/terminal": (
        "console/console console/debugger_sink console/stack_sink console/top_sink console/world_requests"
    ),
    "another process asks a job: real/terminal/test_top.py, real/one_node/test_stacks.py": "control",
    "tested by the verdicts that it is part of": "diagnosis/escapes diagnosis/nested diagnosis/reasons",
    "looks at hosts: real/one_node, real/hosts": "doctor",
    "forks: real/images": "forkserver",
    "part of a running job: real/one_node, real/hosts": (
        "head/requester head/gpu_leases head/debug_clients head/debuggers head/environment_source "
        "head/environment_sync head/hub "
        "head/master_search head/meetings head/mpi_service head/own_signals head/readiness head/role_planner "
        "head/roles head/session_calls head/sink head/stdin_forwarder"
    ),
    "processes that are kept: real/images": (
        "image/facts image/huge_pages image/job_image image/keeper_control image/place"
    ),
    "plain values, tested through those who read them": "job/duration job/state",
    "files and pipes: real/one_node/test_run_output.py": "output",
    "values that test_wire.py sends and reads": "protocol/defaults protocol/gpus protocol/message",
    "runs in the ranks: real": "rank",
    "files of jobs that ran: real/record": (
        "record/annotations record/ci record/circumstances record/liveness record/log_dir record/usage"
    ),
    "runs a job: real": "runner",
    "runs tests on ranks: real/pytest": "testing",
    "processes and connections: real/hosts, real/joined": "transport",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


@functools.cache
def modules() -> dict[str, Path]:
    """Those that have code: an empty `__init__` is none."""
    return {
        name_of(path): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py"
        or any(isinstance(one, ast.FunctionDef) for one in ast.parse(path.read_text()).body)
    }


def covered() -> set[str]:
    """What the unit tests of a room import of it, and what they are named after."""
    found = set()
    for path in sorted((TESTS / "unit").rglob("test_*.py")):
        room = path.parent.name if path.parent.name != "unit" else ""
        stem = path.stem.removeprefix("test_")
        names = {
            name for name in modules() if name.startswith(f"{room}/" if room else "") and name.split("/")[-1] == stem
        }
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launchpad"):
                base = (node.module or "").replace(".", "/").removeprefix("launchpad").lstrip("/")
                names |= {base, f"{base}/__init__"} | {f"{base}/{one.name}".lstrip("/") for one in node.names}
        found |= names & modules().keys()
    return found


def test_each_module_has_unit_tests_or_a_reason() -> None:
    """And no reason is left of what has tests by now."""
    without = modules().keys() - covered()
    excused = {entry: set() for entries in REASONS.values() for entry in entries.split()}
    for entry, names in excused.items():
        names |= {name for name in without if name == entry or name.startswith(f"{entry}/")}
    assert sorted(without - set().union(*excused.values())) == []
    assert [entry for entry, names in excused.items() if not names] == []


def test_unit_tests_start_no_process() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {word}"
        for path in sorted((TESTS / "unit").rglob("test_*.py"))
        for word in re.findall(
            r"^(?:import|from) (subprocess|pty|multiprocessing)\b|\bos\.(fork|posix_spawn)\(", path.read_text(), re.M
        )
    ]
    assert found == []


def test_each_folder_of_unit_tests_is_a_room() -> None:
    folders = {path.name for path in (TESTS / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert sorted(folders - {path.name for path in PACKAGE.iterdir() if path.is_dir()}) == []
