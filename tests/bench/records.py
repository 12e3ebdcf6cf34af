"""Reading the record of a long job: python tests/bench/records.py [--ranks N] [--restarts N] [--within SECONDS]

The job has run for a week, on nodes with 8 ranks each. In each attempt, another rank fails, an eighth of the others
fail because of it, and the rest are stopped. Its samples are as far apart as in so long a job, and the first and the
last attempts have left output. `launchpad why`, `logs --rank`, `report` and `jobs` read the record, each in a process
of its own: seconds are those from its start to its end, memory is the most that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launchpad.head.samples import MOST_FIGURES
from launchpad.protocol.events import (
    ExceptionRaised,
    JobOver,
    JobPlanned,
    ModulesImported,
    PhaseChanged,
    RankExited,
    RankStarted,
    Restarted,
)
from launchpad.record.event_lines import line_of

ROOT = Path(__file__).parents[2]
PER_NODE = 8
WEEK = 7 * 24 * 3600
SECOND = 10**9
PERIOD = 5.0  # between the first samples

# How many attempts, of the last ones and besides the first, have left output.
WITH_OUTPUT = 8

# Runs a command, and says at the end how much memory it had at most, in KiB.
_MEASURE = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)


def exception(rank: int, at: int, *, first: bool) -> ExceptionRaised:
    """What the rank that fails first raises, or one that loses it."""
    frames: list[Any] = [["/work/train.py", 100 + step, f"call_{step}", "return self.inner(x)"] for step in range(6)]
    kind, message = ("ValueError", "bad batch in shard 7") if first else ("RuntimeError", "Connection closed by peer")
    said = {"type": kind, "message": message, "frames": frames}
    return ExceptionRaised(at, rank, 1000 + rank, "", said)


def attempt(number: int, ranks: int, began: int, ended: int) -> Iterator[Any]:
    """The events of an attempt but for the Restarted that begins it."""
    for node in range(ranks // PER_NODE):
        yield ModulesImported(began + node, 4.5, ["torch"], node)
    for rank in range(ranks):
        yield RankStarted(began + SECOND + rank, rank, 1000 + rank)
    failed = number * 37 % ranks
    raise_too = [rank for rank in range(0, ranks, 8) if rank != failed]
    for rank in (failed, *raise_too):
        at = ended - (SECOND if rank == failed else SECOND // 2)
        yield exception(rank, at, first=rank == failed)
        yield RankExited(at + 1000, rank, 1, 900 << 20, None)
    left = sorted({*range(ranks)} - {failed, *raise_too})
    yield PhaseChanged(ended - SECOND // 4, "stopping", "failure", 15, 5.0, left)
    for rank in left:
        yield RankExited(ended - SECOND // 8, rank, -15, 900 << 20, None)
    yield PhaseChanged(ended, "over", "failure", 0, 0.0, [])


def events(ranks: int, restarts: int) -> Iterator[Any]:
    """All events of the job."""
    nodes: Any = [(f"node{at}", list(range(at * PER_NODE, (at + 1) * PER_NODE))) for at in range(ranks // PER_NODE)]
    words = ["train.py", "--epochs", "90"]
    yield JobPlanned(SECOND, 1.7e9, "week", 1, "id", words, "/work", nodes, {}, 0.0, "")
    step = WEEK * SECOND // (restarts + 1)
    for number in range(restarts + 1):
        began, ended = SECOND + number * step, SECOND + (number + 1) * step
        if number:
            failed = (number - 1) * 37 % ranks
            yield Restarted(began, number, restarts, failed, 1, -1, number)
        yield from attempt(number, ranks, began, ended - SECOND)
    yield JobOver(SECOND + WEEK * SECOND, 1)


def write_samples(path: Path, ranks: int) -> None:
    """What the ranks used, as head/samples.py spaces it."""
    at, figures = 0.0, 0
    with path.open("w") as file:
        while at < WEEK:
            for node in range(ranks // PER_NODE):
                rows = [
                    [rank, "R", round(0.9 * at, 2), 3 << 30, 12, 4096, 4096]
                    for rank in range(node * PER_NODE, (node + 1) * PER_NODE)
                ]
                said = {"time": SECOND + int(at * SECOND), "ranks": rows, "gpus": []}
                file.write(json.dumps(said, separators=(",", ":")) + "\n")
            figures += ranks
            at += PERIOD * 2 ** (figures // MOST_FIGURES)


def write_record(folder: Path, ranks: int, restarts: int) -> None:
    """Write the record of the job."""
    folder.mkdir(parents=True)
    with (folder / "events.jsonl").open("w") as file:
        for event in events(ranks, restarts):
            file.write(f"{line_of(event)}\n")
    write_samples(folder / "samples.jsonl", ranks)
    for number in {0, *range(max(0, restarts + 1 - WITH_OUTPUT), restarts + 1)}:
        for rank in range(ranks):
            place = folder / f"attempt_{number}" / str(rank)
            place.mkdir(parents=True)
            lines = "".join(f"epoch {epoch}: loss {1 / (epoch + 1):.4f}\n" for epoch in range(20))
            (place / "stdout.log").write_text(lines)
            if rank % 8 == 0:
                (place / "stderr.log").write_text("RuntimeError: Connection closed by peer\n" * 3)


def measure(words: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Run launchpad with these words: seconds, and MiB at most."""
    argv = [sys.executable, "-c", _MEASURE, sys.executable, "-m", "launchpad", *words]
    began = time.monotonic()
    done = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return time.monotonic() - began, int(done.stdout.split()[-1]) / 1024


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--restarts", type=int, default=2000)
    parser.add_argument("--within", type=float, default=0.0, help="exit with 1 if a command takes longer; in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        environ = os.environ | {"XDG_STATE_HOME": scratch, "PYTHONPATH": str(ROOT)}
        folder = Path(scratch) / "launchpad" / "jobs" / "week"
        write_record(folder, options.ranks, options.restarts)
        sizes = {name: (folder / name).stat().st_size / 1e6 for name in ("events.jsonl", "samples.jsonl")}
        print(f"{options.ranks} ranks, {options.restarts} restarts: {sizes}", flush=True)
        page = os.path.join(scratch, "job.html")
        slow = False
        for words in (["why"], ["logs", "--rank", "7"], ["report", "-o", page], ["jobs"]):
            seconds, memory = measure(words, environ)
            slow = slow or 0 < options.within < seconds
            print(f"launchpad {' '.join(words[:3])}: {seconds:.2f} s, {memory:.0f} MiB", flush=True)
        print(f"the page has {os.path.getsize(page) / 1e6:.1f} MB")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
