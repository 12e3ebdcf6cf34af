"""Runs the cases of somebody else's MPI suite under launchpad and under the library's own launcher, and compares."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from launchpad.mpi_library import NAMES, OPEN_MPI, Mpi

PATIENCE = 20.0  # for a launcher that was told to end


class Case(NamedTuple):
    """A program of the suite, on a number of ranks."""

    name: str
    np: int
    command: list[str]
    folder: Path
    environ: dict[str, str]
    judge: Callable[[int, str], Verdict]  # of exit code and output


class Verdict(NamedTuple):
    """What came of a case under a launcher."""

    passed: bool
    what: str
    failed: frozenset[str] = frozenset()  # parts of the case


class Launcher(NamedTuple):
    """What starts the ranks."""

    name: str
    command: list[str]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all suites have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, metavar="DIR")
    made.add_argument("--only", default="", metavar="REGEX", help="only cases with such a name")
    made.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each case (120)")
    return made


def compare(mpi: Mpi, cases: Iterable[Case], options: argparse.Namespace) -> int:
    """Run each case under both, print what differs and the counts; 1 if launchpad fails where the other doesn't."""
    ours, peer = launchers(mpi)
    print(f"{NAMES[mpi.library]}: {mpi.why}; {ours.name}, {peer.name}\n", flush=True)
    counts: Counter[tuple[bool, bool]] = Counter()
    for case in cases:
        if not re.search(options.only, case.name):
            continue
        (one, output), (other, _) = (run(case, launcher, options.limit) for launcher in (ours, peer))
        counts[one.passed, other.passed] += 1
        if one == other and one.passed:
            continue
        print(f"{case.name} -n {case.np}", flush=True)
        for launcher, verdict, others in ((ours, one, other), (peer, other, one)):
            print(f"  {launcher.name}: {', '.join([verdict.what, *sorted(verdict.failed - others.failed)])}")
        if other.passed and not one.passed:
            print("".join(f"    {line}\n" for line in output.splitlines()[-20:]), end="", flush=True)
    print(f"\n| of {counts.total()} cases | |\n|---|---|")
    print(f"| pass under both | {counts[True, True]} |\n| fail under both | {counts[False, False]} |")
    print(f"| only {ours.name} fails | {counts[False, True]} |\n| only {peer.name} fails | {counts[True, False]} |")
    return 1 if counts[False, True] else 0


def launchers(mpi: Mpi) -> tuple[Launcher, Launcher]:
    """Launchpad, and the launcher that belongs to a library: in the bin folder nearest to it."""
    names = ["mpirun.openmpi", "mpirun"] if mpi.library == OPEN_MPI else ["mpiexec.hydra"]
    places = (
        [parent / "bin" / name for parent in Path(os.path.realpath(mpi.path)).parents for name in names]
        if mpi.path
        else []
    )
    found = next((place for place in places if place.exists()), None)
    if found is None:
        sys.exit(f"no {names[-1]} belongs to the MPI that was found ({mpi.why})")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\d+\.\d+\.\d+", said)
    allowed = ["--allow-run-as-root", "--oversubscribe"] if mpi.library == OPEN_MPI else []
    ours = [sys.executable, "-m", "launchpad", "run", "--backend", "mpi"]
    return (
        Launcher("launchpad", ours),
        Launcher(f"{found.name} {version.group() if version else ''}".strip(), [str(found), *allowed]),
    )


def run(case: Case, launcher: Launcher, limit: float) -> tuple[Verdict, str]:
    """Run a case to its end, or to its time limit; also its output."""
    process = subprocess.Popen(
        [*launcher.command, "-n", str(case.np), *case.command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=case.folder, env=os.environ | case.environ, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=PATIENCE)
        return Verdict(False, f"not over after {limit:g} s"), output
    return case.judge(process.returncode, output), output
