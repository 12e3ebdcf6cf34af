"""Runs the cases of somebody else's MPI suite under launchpad and under the library's own launcher, and compares."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
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
    places = [parent / "bin" / name for parent in Path(os.path.realpath(mpi.path)).parents for name in names]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        sys.exit(f"no {names[-1]} belongs to the MPI that was found ({mpi.why})")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\d+\.\d+\.\d+", said)
    allowed = ["--allow-run-as-root", "--oversubscribe"] if mpi.library == OPEN_MPI else []
    name = f"{found.name} {version.group()}" if version else found.name
    ours = Launcher("launchpad", [sys.executable, "-m", "launchpad", "run", "--backend", "mpi"])
    return ours, Launcher(name, [str(found), *allowed])


def run(case: Case, launcher: Launcher, limit: float) -> tuple[Verdict, str]:
    """Run a case to its end, or to its time limit; also its output."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            [*launcher.command, "-n", str(case.np), *case.command],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            cwd=case.folder, env=os.environ | case.environ,
        )  # fmt: skip
        code = _wait(process, limit)
        file.seek(0)
        output = file.read().decode(errors="replace")
    return (Verdict(False, f"not over after {limit:g} s") if code is None else case.judge(code, output)), output


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code of a launcher; None if it had to be ended."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE)
    return None
