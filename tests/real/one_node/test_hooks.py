"""What of ours is in a rank: nothing with --no-hooks, and otherwise what the manual's page on ranks lists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launchpad as package
from launchpad.job.plan import CONTRACT
from tests.support.command import DEADLINE, PROGRAMS, Launchpad
from tests.support.needs import needs_mpi, needs_torch

ROOT = Path(package.__file__).parent
MANUAL = ROOT / "manual" / "ranks.md"

OURS = "ours"  # a module, a function, a file of launchpad's

# torchrun's, where they are not set.
DEFAULTS = {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "LAUNCHPAD_STOP_BY"}

IN_TORCH = ("torch.distributed.distributed_c10d", "torch.distributed.rendezvous")

Facts = dict[str, Any]


def read(text: str) -> Facts:
    """What finds.py has printed, without what differs between any two processes."""
    for pattern, name in (
        (r"0x[0-9a-f]+", "N"),
        (r"(?<!\w)_launchpad\w*(\.[\w<>]+)*", OURS),
        (r"/[^\"]*/launchpad/[\w/]+\.py", OURS),  # the installed package, or this checkout
        (r"/[^\"]*/launchpad-[^/\"]*/0\.crash", "crash"),
    ):
        text = re.sub(pattern, name, text)
    facts: Facts = json.loads(text.removeprefix("[0] "))
    return facts


def plain(launchpad: Launchpad, *words: str) -> Facts:
    """What the program finds under plain Python, with its standard streams as launchpad has them."""
    where: dict[str, Any] = {"env": launchpad.environ, "cwd": launchpad.folder, "start_new_session": True}
    argv = [sys.executable, "-u", *words]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=DEADLINE, **where
    )
    return read(done.stdout)


def in_rank(launchpad: Launchpad, *words: str) -> Facts:
    done = launchpad.run("run", *words)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def differences(before: Facts, after: Facts) -> Facts:
    """What is another now, by name: of a list what has come, of a dictionary each key by itself, else the new value."""
    found: Facts = {}
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict):
            found |= {f"{name} {key}": now.get(key) for key in {*was, *now} if was.get(key) != now.get(key)}
        elif was != now:
            found[name] = [one for one in now if one not in was] if isinstance(was, list) else now
    return found


def without_contract(found: Facts) -> Facts:
    """The differences but for torchrun's variables, which have to be there."""
    variables = {name.partition(" ")[2] for name in found if name.startswith("environ ")}
    assert variables >= CONTRACT
    return {name: pair for name, pair in found.items() if name.removeprefix("environ ") not in CONTRACT | DEFAULTS}


@pytest.mark.parametrize(
    "words",
    [
        ["looks.py"],
        ["-m", "looks"],
        pytest.param(["looks.py", *IN_TORCH], marks=needs_torch, id="with torch"),
    ],
    ids=["script", "module", "with torch"],
)
def test_without_hooks_a_rank_is_what_plain_python_is(launchpad: Launchpad, words: list[str]) -> None:
    (launchpad.folder / "looks.py").write_text((PROGRAMS / "finds.py").read_text())
    assert without_contract(differences(plain(launchpad, *words), in_rank(launchpad, "--no-hooks", *words))) == {}


# What hooks add: by name, the words by which the manual names it, and what it is.
EITHER: dict[str, tuple[str, Any]] = {
    "modules": ("`_launchpad", {OURS}),
    "stack": ("`inspect.stack()`", {OURS}),
    "thread_hook": ("`threading.excepthook`", [OURS]),
    "handlers 39": ("`SIGRTMIN+5`", OURS),
    "handlers 40": ("`SIGRTMIN+6`", OURS),
    "masks SigCgt": (
        "`SIGSEGV`, `SIGABRT`, `SIGBUS`, `SIGFPE` and `SIGILL`",
        [2, 4, 6, 7, 8, 11, 39, 40],
    ),  # 2: Python's
    "faulthandler": ("`faulthandler`", True),
    "alternate_stack": ("alternate signal stack", True),
    "descriptors 200": ("descriptor 200", "crash"),
    "descriptors 250": ("descriptor 250", "/memfd:launchpad-stacks (deleted)"),
    "meta_path": ("`sys.meta_path`", [OURS]),
}
EXECUTED = {"atexit": ("an `atexit` function has both", 1)}
FORKED = {"frozen": ("`gc.freeze()`", True)}
WITH_TORCH = {"patched _check_valid_timeout": ("`_check_valid_timeout`", OURS)}
STORE = {"patched _create_c10d_store": ("`_create_c10d_store`", OURS)}

WAYS = {
    "executed": (["--start-method", "exec"], [], {**EITHER, **EXECUTED}),
    "forked": (["--preload", "multiprocessing"], [], {**EITHER, **FORKED}),
    "executed, with torch": (["--start-method", "exec"], IN_TORCH, {**EITHER, **EXECUTED, **WITH_TORCH}),
    "forked, with torch": (
        ["--preload", "torch,torch.distributed"],
        IN_TORCH,
        {**EITHER, **WITH_TORCH, **FORKED, **STORE},
    ),
}
# What modules do that are imported before the program starts. OpenBLAS ends its threads at a fork.
IMPORTED = {"atexit", "warnings", "main __warningregistry__", "threads"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_torch if "torch" in name else ()) for name in WAYS])
def test_hooks_make_the_differences_that_the_manual_names(launchpad: Launchpad, name: str) -> None:
    way, imports, listed = WAYS[name]
    script = "looks.py"  # not in a checkout, which may be named launchpad
    (launchpad.folder / script).write_text((PROGRAMS / "finds.py").read_text())
    before, after = plain(launchpad, script, *imports), in_rank(launchpad, *way, script, *imports)
    found = without_contract(differences(before, after))
    page = MANUAL.read_text()
    theirs = set(found["modules"]) - {OURS}
    found |= {"modules": set(found["modules"]) - theirs, "stack": set(found["stack"])}
    if "forked" in name:
        found["meta_path"] = [finder for finder in found.get("meta_path", []) if "mpi4py" not in finder]
        found = {what: value for what, value in found.items() if value != [] and what not in IMPORTED}
    else:
        found["atexit"] = after["atexit"] - before["atexit"]
        assert [module for module in theirs if f"`{module}`" not in page] == []
    assert found == {what: value for what, (_, value) in listed.items()}
    assert [words for words, _ in listed.values() if words not in page] == []


# What works without hooks, and what is refused.


def test_without_hooks_the_verdict_has_exit_codes_and_last_words(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--no-hooks", "raises.py")
    assert done.returncode == 1
    first = done.stderr[done.stderr.index("launchpad: rank") :].splitlines()[0]
    assert re.match(r"launchpad: rank \d failed first: ValueError: the learning rate is negative \(exit code 1", first)


@needs_torch
def test_without_hooks_record_tells_what_was_raised(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--no-hooks", "recorded.py")
    assert done.returncode == 1
    assert "launchpad:     KeyError: 'no such column'" in done.stderr.partition("rank 1 failed first")[2]


@needs_torch
def test_without_hooks_ranks_meet(launchpad: Launchpad) -> None:
    """Rank 0 serves torch's store, on the port that was held for it."""
    (launchpad.folder / "sums.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print('sum', x.item())\ndist.destroy_process_group()\n"
    )
    done = launchpad.run("run", "-n", 2, "--no-hooks", "sums.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] sum 2.0", "[1] sum 2.0"]), done.stderr


@needs_mpi
def test_without_hooks_ranks_are_an_mpi_world(launchpad: Launchpad) -> None:
    (launchpad.folder / "world.py").write_text(
        "import sys\nfrom mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.allreduce(1), [name for name in sys.modules if name.startswith('_launchpad')])\n"
    )
    done = launchpad.run("run", "-n", 2, "--no-hooks", "--backend", "mpi", "world.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2 []", "[1] 2 []"]), done.stderr


def test_without_hooks_ranks_that_sleep_are_a_stall(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--no-hooks", "--stall-timeout", 1, "hangs.py", "sleeping")
    assert done.returncode == 124
    for rank in range(2):
        says = rf"rank {rank} is sleeping in \w+ \(no stacks: not a Python rank, or one without hooks\)"
        assert re.search(says, done.stderr), done.stderr


def test_without_hooks_a_rank_that_computes_is_no_stall(launchpad: Launchpad) -> None:
    words = ("--no-hooks", "--stall-timeout", 0.6, "hangs.py", "slow", 3, ".")
    done = launchpad.run("run", "-n", 2, *words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["exits.py:run"], "--no-hooks: exits.py:run needs launchpad's code to call it; give a script"),
        (["--start-method", "fork", "exits.py"], "--start-method fork forks them; leave one of them out"),
        (["--preload", "json", "exits.py"], "--preload forks them; leave one of them out"),
    ],
)
def test_what_needs_hooks_is_refused_without_them(launchpad: Launchpad, words: list[str], says: str) -> None:
    (launchpad.folder / "exits.py").write_text("def run():\n    pass\n")
    done = launchpad.run("run", "--no-hooks", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--preload", ""], ["--start-method", "exec"], ["--start-method", "spawn"]])
def test_what_executes_ranks_anyway_is_not_refused(launchpad: Launchpad, words: list[str]) -> None:
    done = launchpad.run("run", "--no-hooks", *words, "exits.py", 0)
    assert (done.returncode, done.stderr) == (0, "")
