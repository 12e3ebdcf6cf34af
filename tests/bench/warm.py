"""From the command to the first all_reduce and out, recovery, and memory: the part `warm` of launch.py.

With and without a kept image (`launchpad warm`). Each figure stands beside torchrun, mp.spawn and, where Open MPI is
installed, mpirun; and beside one bare `import torch`, which none of them can do without but a run from an image. gloo
over the loopback interface, no GPU.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 240.0
RECOVERY_DEADLINE = 20.0  # a launcher that has not come back by then does not

IMAGE = "launchpad, kept image"

LAZY = {"TORCH_GLOO_LAZY_INIT": "1"}
"""Has gloo connect two ranks when they first need it, under any launcher, instead of all with all."""

Command = Callable[[int, list[str]], list[str]]


def peers(images: str, name: str = "first_sum.py") -> dict[str, Command]:
    """Name and command line for so many ranks, of a program of this bench. `images`: XDG_RUNTIME_DIR of the kept."""
    beside = Path(sys.executable).parent
    program = str(PROGRAMS / name)
    kept = ["env", f"XDG_RUNTIME_DIR={images}", str(beside / "launchpad"), "run", "-n"]
    found: dict[str, Command] = {
        IMAGE: lambda n, more: [*kept, str(n), *_restarts(more), program, *more],
        "launchpad": lambda n, more: [str(beside / "launchpad"), "run", "-n", str(n), *_restarts(more), program, *more],
        "torchrun": lambda n, more: [
            *(str(beside / "torchrun"), "--nproc-per-node", str(n), *_restarts(more), program),
            *more,
        ],
        "mp.spawn": lambda n, _: [sys.executable, "-u", str(PROGRAMS / "spawned_sum.py"), str(n)],
    }
    mpirun = shutil.which("mpirun", path=os.pathsep.join(p for p in os.environ["PATH"].split(":") if p != str(beside)))
    if (
        mpirun
        and "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    ):
        options = ["--allow-run-as-root", "--oversubscribe", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
        found["mpirun"] = lambda n, more: [mpirun, *options, "-n", str(n), sys.executable, "-u", program, *more]
    return found


def _restarts(more: list[str]) -> list[str]:
    return ["--max-restarts", "3"] if more[:1] == ["crash"] else []


def environ() -> dict[str, str]:
    """For the peers that choose no port themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def first_sum(command: Command, ranks: int, variables: Mapping[str, str] = MappingProxyType({})) -> float:
    """Seconds from the command to its end."""
    start = time.monotonic()
    subprocess.run(command(ranks, []), env=environ() | variables, capture_output=True, timeout=DEADLINE, check=True)
    return time.monotonic() - start


def bare_import() -> float:
    """Seconds for `python -c "import torch"`."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], env=environ(), timeout=DEADLINE, check=True)
    return time.monotonic() - start


def recovery(command: Command) -> float | None:
    """Seconds from rank 1's death to the first all_reduce of the next attempt, of 4 ranks; None: it never came."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(4, ["crash", folder]), env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=RECOVERY_DEADLINE)
        except subprocess.TimeoutExpired:
            end(process)
        back = Path(folder, "back")
        return float(back.read_text()) - float(Path(folder, "crashed").read_text()) if back.exists() else None


def memory(command: Command, ranks: int) -> float:
    """MB (10^6 bytes) of proportional set size, of the launcher and all that descends from it, when all have summed."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(ranks, ["wait", folder]), env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + DEADLINE
        while len(list(Path(folder).glob("here*"))) < ranks:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        root = psutil.Process(process.pid)
        total = sum(one.memory_full_info().pss for one in [root, *root.children(recursive=True)])
        Path(folder, "go").touch()
        assert process.wait(timeout=DEADLINE) == 0
        return float(total) / 1e6


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that descends from it."""
    root = psutil.Process(process.pid)
    for one in [*root.children(recursive=True), root]:
        one.kill()
    process.wait()


def main(runs: int) -> None:
    """Run all parts and print a table."""
    with tempfile.TemporaryDirectory() as images:
        command = [str(Path(sys.executable).parent / "launchpad"), "warm"]
        where = {**environ(), "XDG_RUNTIME_DIR": images}
        begin = [*command, "--for", "1h"]
        for variables in ({}, LAZY):  # an image holds what torch has read from the environment
            subprocess.run(begin, env=where | variables, stdout=subprocess.DEVNULL, timeout=DEADLINE, check=True)
        try:
            measure(runs, images)
        finally:
            subprocess.run([*command, "--stop"], env=where, stdout=subprocess.DEVNULL, timeout=DEADLINE, check=True)


def measure(runs: int, images: str) -> None:
    """The same, with this XDG_RUNTIME_DIR for the images."""
    found = peers(images)
    print("| what | " + " | ".join(found) + " | one import torch |")
    print("|---" * (len(found) + 2) + "|")
    noop = {name: command for name, command in peers(images, "noop.py").items() if name != "mp.spawn"}
    printed: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(3 * runs):  # each is short
        for name, command in noop.items():
            printed[name].append(first_sum(command, 4))
    row("4 ranks that print and exit", [statistics.median(f or [0.0]) for f in printed.values()])
    for ranks, variables in ((1, {}), (4, {}), (16, {}), (64, {}), (16, LAZY), (64, LAZY)):
        # 64 ranks of mp.spawn or mpirun take minutes of this machine, and tell nothing that 16 don't.
        asked = found
        if ranks == 64 or variables:
            asked = {name: found[name] for name in (IMAGE, "launchpad", "torchrun")}
        figures: dict[str, list[float]] = {name: [] for name in [*found, "import"]}
        for run in range(runs):
            for name, command in asked.items():
                if name == "torchrun" and ranks == 64 and run > 0:  # a minute and more each
                    continue
                figures[name].append(first_sum(command, ranks, variables))
            figures["import"].append(bare_import())
        lazily = ", gloo connects lazily" if variables else ""
        medians = [statistics.median(f or [0.0]) for f in figures.values()]
        row(f"{ranks} ranks: start, first all_reduce, exit{lazily}", medians)
    tried = [IMAGE, "launchpad", "torchrun"]
    back: dict[str, list[float | None]] = {name: [] for name in tried}
    for _ in range(runs):
        for name in tried:
            back[name].append(recovery(found[name]))
    cells = []
    for name in tried:
        came = [seconds for seconds in back[name] if seconds is not None]
        median = f"{statistics.median(came):.2f} s, " if came else ""
        cells.append(f"{median}{len(came)} of {runs} came back")
    print(
        "| a rank dies: first all_reduce of the next attempt | "
        + " | ".join(cells)
        + " |"
        + " |" * (len(found) - len(tried) + 1)
    )
    # The processes of a job from an image don't descend from the command.
    sizes = {name: memory(command, 16) for name, command in found.items() if name not in (IMAGE, "mp.spawn")}
    cells = [f"{sizes[name]:.0f} MB" if name in sizes else "" for name in found]
    print("| memory of 16 ranks and their launcher (PSS) | " + " | ".join(cells) + " | |")


def row(what: str, figures: list[float]) -> None:
    """One line of the table, each peer's seconds with their ratio to ours; 0 for what was not measured."""
    cells = [f"{figures[0]:.2f} s"] + [f"{f:.2f} s ({f / figures[0]:.1f}x)" if f else "" for f in figures[1:]]
    print(f"| {what} | " + " | ".join(cells) + " |", flush=True)
