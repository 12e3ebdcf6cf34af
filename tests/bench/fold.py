"""What folding costs: two million lines from 4 ranks into a file, with and without --fold, in turns.

    python tests/bench/fold.py [--runs N] [--ranks 4]

flood: as fast as the ranks can, different lines or the same ones on all ranks. calm: 400 lines a second from each of 64
ranks for ten seconds, the same on all; the figure is the launcher's processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
LINES = 2_000_000
DEADLINE = 300.0

CHOICES = ("never", "equal", "numbers")

CALM = """
import time
begin = time.monotonic()
for number in range(4000):
    time.sleep(max(0.0, begin + number / 400 - time.monotonic()))
    print(f"epoch 3 step {number:07d} of a program that prints a lot", flush=True)
"""


def launch(ranks: int, fold: str, *program: str) -> tuple[float, float, int]:
    """Seconds, the launcher's processor seconds (the head's, not the ranks'), and how many lines came out."""
    argv = [str(Path(sys.executable).parent / "launchpad"), "run", "-n", str(ranks), "--fold", fold, *program]
    with tempfile.TemporaryFile() as out:
        start = time.monotonic()
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.DEVNULL)
        used = 0.0
        while process.poll() is None:
            used = processor_seconds(process.pid) or used
            assert time.monotonic() - start < DEADLINE
            time.sleep(0.01)
        seconds = time.monotonic() - start
        assert process.returncode == 0
        out.seek(0)
        return seconds, used, sum(block.count(b"\n") for block in iter(lambda: out.read(1 << 20), b""))


def processor_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (after one more)")
    parser.add_argument("--ranks", type=int, default=4, help="that flood")
    options = parser.parse_args()
    each = str(LINES // options.ranks)
    lines = str(PROGRAMS / "lines.py")
    same = ("--no-python", "env", "RANK=0", sys.executable, "-u", lines, each)
    parts = {
        "flood, different lines": (options.ranks, (lines, each), 0),
        "flood, the same lines": (options.ranks, same, 0),
        "calm, the same lines": (64, ("--no-python", sys.executable, "-c", CALM), 1),
    }
    print(f"{os.cpu_count()} cores, {options.runs} runs each\n")
    print("| what | --fold | seconds | ratio | lines |\n|---|---|---|---|---|")
    for what, (ranks, program, which) in parts.items():
        found: dict[str, list[tuple[float, float, int]]] = {choice: [] for choice in CHOICES}
        for run in range(options.runs + 1):
            for choice in CHOICES:
                result = launch(ranks, choice, *program)
                if run:
                    found[choice].append(result)
        medians = {choice: statistics.median(one[which] for one in results) for choice, results in found.items()}
        for choice, seconds in medians.items():
            count = statistics.median(one[2] for one in found[choice])
            print(f"| {what} | {choice} | {seconds:.3f} | {seconds / medians['never']:.2f} | {count:.0f} |", flush=True)


if __name__ == "__main__":
    main()
