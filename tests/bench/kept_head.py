"""What the kept head gives beside an agent forked from a kept image: python tests/bench/kept_head.py [--runs N]

From the command to its end, all after `launchpad warm`: with the kept head; the same run without it, whose guard, agent
and ranks are forked from the same images; without anything kept; and a Python that does nothing, which none of them can
do without. They take turns. Figures are medians in ms (the middle half of the runs), and the kept head's gain is the
median of what each run without it took more than the run with it before. An editable install of launchpad has every
Python import `pathlib` at its start, and so hides a part of the gain.

Then what the command without the kept head imports, with the time that each top-level package takes by itself
(`python -X importtime`, which makes all of it slower).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from warm import DEADLINE, PROGRAMS, environ

LAUNCHPAD = str(Path(sys.executable).parent / "launchpad")
NOT_HANDED_OVER = (sys.executable, "-X", "here")  # options of Python's are nothing to a kept head
SUM = Path(__file__).parents[2] / "examples" / "all_reduce.py"
IMPORT_TIME = re.compile(r"import time: +(\d+) \| +\d+ \| +([^.\s]+)")


def _environ(images: str) -> dict[str, str]:
    """With it, each run without the kept head would compile all modules again."""
    where = environ() | {"XDG_RUNTIME_DIR": images}
    where.pop("PYTHONDONTWRITEBYTECODE", None)
    return where


def seconds(argv: Sequence[str], images: str) -> float:
    """Seconds from a command to its end."""
    where = _environ(images)
    start = time.monotonic()
    subprocess.run(argv, env=where, capture_output=True, timeout=DEADLINE, check=True)
    return time.monotonic() - start


def measure(program: Path, images: str, runs: int) -> None:
    """Print one row of the table."""
    run = [LAUNCHPAD, "run", "-n", "4", str(program)]
    ways = [
        (run, images),
        ([*NOT_HANDED_OVER, *run], images),
        (run, os.devnull),
        ([sys.executable, "-c", "pass"], images),
    ]
    figures: list[list[float]] = [[] for _ in ways]
    for number in range(runs + 1):
        for (argv, where), results in zip(ways, figures, strict=True):
            figure = seconds(argv, where) * 1000
            if number > 0:
                results.append(figure)
    cells = []
    for results in figures:
        low, median, high = statistics.quantiles(results, n=4)
        cells.append(f"{median:.0f} ({low:.0f} to {high:.0f})")
    low, gain, high = statistics.quantiles([without - kept for kept, without in zip(*figures[:2], strict=True)], n=4)
    row = f"{' | '.join(cells)} | {gain:.0f} ({low:.0f} to {high:.0f})"
    print(f"| 4 ranks: {program.stem} | {row} | {os.getloadavg()[0]:.1f} |", flush=True)


def imports(images: str, runs: int) -> None:
    """Print what is imported without the kept head."""
    argv = [sys.executable, "-X", "importtime", LAUNCHPAD, "run", "-n", "4", str(PROGRAMS / "noop.py")]
    where = _environ(images)
    seen: dict[str, list[float]] = {}
    for _ in range(runs):
        done = subprocess.run(argv, env=where, capture_output=True, text=True, timeout=DEADLINE, check=True)
        sums: Counter[str] = Counter()
        for own, package in IMPORT_TIME.findall(done.stderr):
            sums[package if package in ("launchpad", "click") else "the standard library, site"] += int(own)
        for package, microseconds in sums.items():
            seen.setdefault(package, []).append(microseconds / 1000)
    parts = [f"{package} {statistics.median(results):.0f} ms" for package, results in seen.items()]
    print(f"\nImports without the kept head: {', '.join(parts)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="counted runs of each (after one more)")
    options = parser.parse_args()
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{platform.platform()}, {machine}; {options.runs} runs each, load {os.getloadavg()[0]:.1f}\n")
    ways = "kept head | kept image, no kept head | nothing kept | python -c pass"
    print(f"| what | {ways} | the kept head's gain | load |")
    print("|---" * 7 + "|", flush=True)
    with tempfile.TemporaryDirectory() as images:
        warm = [LAUNCHPAD, "warm"]
        seconds([*warm, "--for", "1h"], images)
        try:
            measure(PROGRAMS / "noop.py", images, options.runs)
            measure(SUM, images, options.runs)
            imports(images, 5)
        finally:
            seconds([*warm, "--stop"], images)


if __name__ == "__main__":
    main()
