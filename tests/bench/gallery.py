"""All fault galleries, launchpad beside torchrun: python tests/bench/gallery.py [--launchpad-only] [CASE …]

Each program of gallery.py runs under both, with 4 ranks. Scored is what the launcher itself says at the end:
whether the right rank is named, and whether the cause is there. torchrun's last word is its block "Root Cause (first
observed failure)". A program that hangs is ended after LIMIT seconds under torchrun, which has no answer to it; seconds
are those from the start to the launcher's end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.gallery import CASES, MORE, SIZE, THIRD, Case, score  # noqa: E402

PROGRAMS = ROOT / "tests" / "programs"
LIMIT = 40.0


class Found(NamedTuple):
    rank: bool
    cause: bool
    seconds: float
    ended: bool  # by itself

    def __str__(self) -> str:
        if not self.ended:
            return f"hangs (ended after {LIMIT:.0f} s)"
        return f"{'right' if self.rank else 'wrong'} rank, {'' if self.cause else 'no '}cause, {self.seconds:.1f} s"


def finish(argv: list[str], environ: dict[str, str], limit: float) -> tuple[int, str, float, bool]:
    """Exit code, standard error, seconds, and whether it ended by itself."""
    begin = time.monotonic()
    environ = {**environ, "COLUMNS": "200"}  # pytest cuts its lines to the width
    # Not a pipe: ranks that outlive their launcher would keep it open.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=said)
        try:
            process.wait(limit)
            ended = True
        except subprocess.TimeoutExpired:
            process.terminate()
            ended = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        seconds = time.monotonic() - begin
        said.seek(0)
        return process.returncode, said.read(), seconds, ended


def by_launchpad(case: Case, folder: str) -> Found:
    environ = os.environ | {"XDG_STATE_HOME": folder, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
    options = ["--nproc", str(SIZE), "--backend", case.backend, *case.options]
    argv = [sys.executable, "-m", "launchpad", "run", *options, str(PROGRAMS / case.program), case.name]
    code, _, seconds, ended = finish(argv, environ, 2 * LIMIT)
    found = list(Path(folder).glob("launchpad/jobs/*/verdict.json"))  # and not those of a launchpad inside it
    if case.healthy:
        quiet = ended and code == 0 and not found
        return Found(quiet, quiet, seconds, ended)
    if not found:
        return Found(False, False, seconds, ended)
    return Found(*score(case, json.loads(found[0].read_text())), seconds, ended)


def by_torchrun(case: Case, folder: str) -> Found:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    code, text, seconds, ended = finish([*argv, str(PROGRAMS / case.program), case.name], environ, LIMIT)
    if case.healthy:
        return Found(code == 0, code == 0, seconds, ended)
    last = text.partition("Root Cause (first observed failure)")[2]
    named = re.search(r"rank\s*:\s*(\d+)", last)
    return Found(named is not None and int(named[1]) in case.ranks, bool(re.search(case.cause, last)), seconds, ended)


def main() -> None:
    """Print the table, then the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names; all where none is given")
    parser.add_argument("--launchpad-only", action="store_true", help="without torchrun, which takes most of the time")
    options = parser.parse_args()
    print("| program | launchpad | torchrun |\n|---|---|---|", flush=True)
    scores: dict[str, list[Found]] = {"launchpad": [], "torchrun": []}
    alarms = healthy = 0
    for case in [*CASES, *MORE, *THIRD]:
        if options.cases and case.name not in options.cases:
            continue
        if case.needs and not (shutil.which(case.needs) or importlib.util.find_spec(case.needs)):
            continue
        cells = []
        for name, runner in (("launchpad", by_launchpad), ("torchrun", by_torchrun)):
            if name == "torchrun" and (case.backend == "mpi" or options.launchpad_only):
                cells.append("" if options.launchpad_only else "has no MPI")
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                found = runner(case, folder)
            if not case.healthy:
                scores[name].append(found)
            elif name == "launchpad":
                healthy, alarms = healthy + 1, alarms + (not found.rank)
            cells.append(str(found) if not case.healthy else "quiet" if found.rank else "a false alarm")
        mpi = " (mpi)" if case.backend == "mpi" else ""
        print(f"| {case.name}{mpi}{' (healthy)' if case.healthy else ''} | {' | '.join(cells)} |", flush=True)
    for name, all_found in scores.items():
        ranks, causes = sum(one.rank for one in all_found), sum(one.cause for one in all_found)
        print(f"\n{name}: right rank in {ranks} of {len(all_found)}, right cause in {causes}")
    print(f"\nlaunchpad: {alarms} false alarms in {healthy} healthy programs")


if __name__ == "__main__":
    main()
