"""Launching, beside torchrun and mpirun in one run: python tests/bench/launch.py [--runs N] [--part PART]

noop: 4 ranks that print and exit. mpi: 4 that join an MPI_COMM_WORLD and sum over it, launchpad's by MPICH. mpi-kept:
the same, launchpad's from a kept image. openmpi: all by Open MPI. openmpi-told: the same, and all are told to leave out
the adapters that launchpad leaves out itself where they are missing. crash: from a rank's death until its launcher is
gone. lines: two million lines from 4 ranks, each marked with its rank. damaged: how many of those did not arrive whole.
memory: the launcher's own processes while it passes them on.

faults: what is left after a fault (faults.py); warm: until the first all_reduce (warm.py). Only where asked for.

Peers take turns, so that a machine whose speed drifts drifts for all of them. Figures are medians; the last column is
the peer's figure over Launchpad's. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4
LINES = 2_000_000
DEADLINE = 120.0

WITHOUT_PSM = "^ofi,psm,psm2"  # ofi is left out by Debian's file of parameters


class Peer(NamedTuple):
    """A launcher, told to start RANKS ranks."""

    name: str
    command: Sequence[str]
    tagged: Sequence[str]  # the options that have it mark each line with its rank
    interpreter: Sequence[str]  # what a Python program needs in front of it

    def argv(self, program: str, *args: object, tagged: bool = False) -> list[str]:
        """The command line that runs one of the bench's programs."""
        options = self.tagged if tagged else []
        return [*self.command, *options, *self.interpreter, str(PROGRAMS / program), *map(str, args)]


def installed() -> list[Peer]:
    """Launchpad, then what there is of the others."""
    beside = Path(sys.executable).parent
    python = [sys.executable, "-u"]  # as launchpad and torchrun start it
    found = [Peer("launchpad", [str(beside / "launchpad"), "run", "--nproc", str(RANKS)], [], [])]
    if (beside / "torchrun").exists():
        found.append(Peer("torchrun", [str(beside / "torchrun"), "--nproc-per-node", str(RANKS)], ["--tee", "3"], []))
    # With the mpich wheel installed, the mpirun beside the interpreter is Hydra, and Open MPI's is the system's.
    elsewhere = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != str(beside))
    for path in (shutil.which("mpirun", path=elsewhere), str(beside / "mpiexec.hydra")):
        if path is None or not os.path.exists(path):
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if "Open MPI" in version:
            name = f"mpirun (Open MPI {version.splitlines()[0].split()[-1]})"
            allowed = ["--allow-run-as-root", "--oversubscribe"]
            found.append(Peer(name, [path, *allowed, "-n", str(RANKS)], ["--tag-output"], python))
        else:
            found.append(Peer("mpiexec (Hydra)", [path, "-n", str(RANKS)], ["-prepend-rank"], python))
    return found


def noop(peer: Peer) -> float:
    """Seconds for 4 ranks that print and exit."""
    start = time.monotonic()
    done = subprocess.run(peer.argv("noop.py"), capture_output=True, timeout=DEADLINE, check=True)
    seconds = time.monotonic() - start
    assert done.stdout.count(b"here") == RANKS, done
    return seconds


def mpi(peer: Peer, *, kept: bool = False, library: str = "", variables: Mapping[str, str] | None = None) -> float:
    """Seconds for 4 ranks that join an MPI_COMM_WORLD, sum over it and leave, by mpi4py.

    kept: launchpad's ranks are forked from an image that has imported mpi4py.MPI. library: "Open MPI" if all are to use
    that. Not a number for a launcher that can't.
    """
    if peer.name != "launchpad" and (peer.name == "torchrun" or library not in peer.name):
        return math.nan
    environ = os.environ | (variables or {})
    if "Open MPI" in peer.name or library:  # mpi4py takes the MPI of its own environment first, whoever has started it
        environ["MPI4PY_LIBMPI"] = "libmpi.so.40"
    own = ["--backend", "mpi"] if peer.name == "launchpad" else []
    if own and kept:
        own += ["--preload", "mpi4py.MPI"]
        environ |= _image_of_mpi(peer.command[0])
    argv = peer._replace(command=[*peer.command, *own]).argv("mpi_sum.py")
    start = time.monotonic()
    done = subprocess.run(argv, capture_output=True, timeout=DEADLINE, check=True, env=environ)
    seconds = time.monotonic() - start
    assert done.stdout.count(b"here") == RANKS, done
    return seconds


@functools.cache
def _image_of_mpi(launchpad: str) -> dict[str, str]:
    """Keep an image that has imported mpi4py.MPI, until the bench ends; returns the variables of runs that use it."""
    folder = tempfile.mkdtemp()
    variables = {"XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
    warm = functools.partial(
        subprocess.run, env=os.environ | variables, stdout=subprocess.DEVNULL, timeout=DEADLINE, check=True
    )
    warm([launchpad, "warm", "--preload", "mpi4py.MPI"])
    atexit.register(shutil.rmtree, folder)
    atexit.register(warm, [launchpad, "warm", "--stop"])
    return variables


def crash(peer: Peer) -> float:
    """Seconds from the moment in which rank 1 exits with 7 until its launcher is gone; the other ranks obey TERM."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(peer.argv("crash.py", folder), capture_output=True, timeout=DEADLINE, check=False)
        gone = time.monotonic()
        return gone - float(Path(folder, "crashed").read_text())


def lines(peer: Peer) -> float:
    """Seconds for LINES lines from 4 ranks into a file, marked with their ranks."""
    return _lines(peer)[0]


def damaged(peer: Peer) -> float:
    """Of these lines, how many did not arrive whole and once."""
    return _lines(peer)[2]


def memory(peer: Peer) -> float:
    """MB (10^6 bytes): the sum of the largest resident sets of the launcher's own processes, while it passes lines."""
    return _lines(peer)[1] / 1e6


def _lines(peer: Peer) -> tuple[float, int, int]:
    with tempfile.TemporaryFile() as out:
        start = time.monotonic()
        process = subprocess.Popen(
            peer.argv("lines.py", LINES // RANKS, tagged=True), stdout=out, stderr=subprocess.DEVNULL
        )
        largest: dict[int, int] = {}
        watcher = threading.Thread(target=_watch, args=(process, largest))
        watcher.start()
        assert process.wait(timeout=DEADLINE) == 0
        seconds = time.monotonic() - start
        watcher.join()
        out.seek(0)
        return seconds, sum(largest.values()), LINES - _whole_lines(out.read())


def _watch(process: subprocess.Popen[bytes], largest: dict[int, int]) -> None:
    """Keep the peak resident set (VmHWM) of each process below the launcher that is no rank."""
    while process.poll() is None:
        try:
            launcher = psutil.Process(process.pid)
            for one in [launcher, *launcher.children(recursive=True)]:
                if not any(word.endswith("lines.py") for word in one.cmdline()[:-2] if one.pid != process.pid):
                    largest[one.pid] = max(largest.get(one.pid, 0), _peak(one.pid))
        except (psutil.Error, OSError):
            pass
        time.sleep(0.05)


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _whole_lines(text: bytes) -> int:
    """How many different lines of the ranks stand there whole, behind whatever mark the launcher puts on them."""
    ends = b"of a program that prints a lot"
    whole = set()
    for line in text.splitlines():
        words = line[line.find(b"rank ") :].split()
        if b" ".join(words[4:]) == ends and words[1].isdigit() and len(words[3]) == 7 and words[3].isdigit():
            whole.add(int(words[1]) * LINES + int(words[3]))
    return len(whole)


PARTS: dict[str, tuple[str, Callable[[Peer], float], str]] = {
    "noop": ("4 ranks that print and exit", noop, "s"),
    "mpi": ("4 ranks that join an MPI world, sum and exit", mpi, "s"),
    "mpi-kept": ("… launchpad from a kept image of mpi4py.MPI", functools.partial(mpi, kept=True), "s"),
    "openmpi": ("4 ranks that join a world of Open MPI, sum and exit", functools.partial(mpi, library="Open MPI"), "s"),
    "openmpi-told": (
        f"… all with OMPI_MCA_mtl={WITHOUT_PSM}",
        functools.partial(mpi, library="Open MPI", variables={"OMPI_MCA_mtl": WITHOUT_PSM}),
        "s",
    ),
    "crash": ("a rank exits with 7: launcher exits after", crash, "s"),
    "lines": ("2 000 000 marked lines from 4 ranks", lines, "s"),
    "damaged": ("… of them cut, lost or mixed up", damaged, "lines"),
    "memory": ("the launcher's peak memory meanwhile", memory, "MB"),
}


def main() -> None:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each peer in each part (after one more)")
    parser.add_argument(
        "--part", choices=[*PARTS, "faults", "warm"], action="append", help="only this part; repeatable"
    )
    options = parser.parse_args()
    if options.part == ["faults"]:
        import faults

        faults.main()
        return
    if options.part == ["warm"]:
        import warm

        warm.main(options.runs)
        return
    found = installed()
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; {options.runs} runs each\n"
    )
    print("| what | " + " | ".join(peer.name for peer in found) + " | ratios |")
    print("|---" * (len(found) + 2) + "|")
    for part in options.part or PARTS:
        if part not in PARTS:
            continue
        what, measure, unit = PARTS[part]
        figures: list[list[float]] = [[] for _ in found]
        for run in range(options.runs + 1):
            for peer, results in zip(found, figures, strict=True):
                figure = measure(peer)
                if run > 0:
                    results.append(figure)
        medians = [statistics.median(results) for results in figures]
        cells = ["" if math.isnan(m) else f"{m:.{3 if unit == 's' else 0}f} {unit}" for m in medians]
        ratios = ", ".join(f"{m / medians[0]:.2g}x" for m in medians[1:] if m == m) if medians[0] else ""
        print(f"| {what} | " + " | ".join(cells) + f" | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
