"""How much of the time is useful when ranks keep dying: python tests/bench/goodput.py [--seconds S] [--every S]

The same training loop (programs/trains.py: 4 ranks, gloo, a checkpoint a second) runs under each launcher, first
undisturbed, then with a rank killed (SIGKILL) once in each interval. Rank and moment are random, and the same for all
launchers. Goodput: the steps that the last checkpoint holds at the end, over those of the undisturbed run. Both runs
count from their first step, so what it takes to start the first time is left out, and what recovery takes is not.

torchrun 2.13 keeps one store for all attempts, with the same keys: gloo's ranks find the addresses of dead ones there
and dial them, so that the next attempt fails, or stands still in init_process_group. (Attempts that don't get beyond
that are not counted as restarts.) In its second turn, a variable has rank 0 of each attempt make a store of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from faults import MARK
from launch import RANKS
from warm import PROGRAMS, end, environ

BESIDE = Path(sys.executable).parent

# As many restarts as there may be.
RESTARTS = ["--max-restarts", "1000"]
TORCHRUN = [str(BESIDE / "torchrun"), "--nproc-per-node", str(RANKS), *RESTARTS]
COMMANDS = {  # the first word of the name is the program
    "launchpad": [str(BESIDE / "launchpad"), "run", "-q", "--nproc", str(RANKS), *RESTARTS, "--restart", "always"],
    "torchrun": TORCHRUN,
    "torchrun, stores not shared": ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN],
}

# For the first step, and for a launcher that has not come back when its time is up.
START_SECONDS = 120.0
END_SECONDS = 60.0


class Kill(NamedTuple):
    """A rank's death, this many seconds after the first step."""

    at: float
    rank: int


class Result(NamedTuple):
    """What a launcher made of its time."""

    steps: int
    kills: int  # those that found their rank
    attempts: int
    ended: bool  # by itself


def plan_kills(seconds: float, every: float, seed: int) -> list[Kill]:
    """One in each interval, not at its very beginning or end."""
    chance = random.Random(seed)
    return [
        Kill((number + chance.uniform(0.2, 0.8)) * every, chance.randrange(RANKS))
        for number in range(int(seconds / every))
    ]


def train(command: Sequence[str], seconds: float, kills: Sequence[Kill]) -> Result:
    """Run the loop, and kill ranks meanwhile."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            [*command, str(PROGRAMS / "trains.py"), name, str(seconds)],
            env={**environ(), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            began = _wait_for_start(process, folder)
            done = 0
            for kill in kills:
                time.sleep(max(0.0, began + kill.at - time.monotonic()))
                pid = _wait_for_rank(process, folder / f"pid{kill.rank}", mark, began + seconds)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    done += 1
            try:
                process.wait(max(0.0, began + seconds + END_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            ended = process.poll() == 0
        finally:
            if process.poll() is None:
                end(process)
        steps = folder / "steps"
        attempts = len((folder / "attempts").read_text().splitlines())
        return Result(int(steps.read_text()) if steps.exists() else 0, done, attempts, ended)


def _wait_for_start(process: subprocess.Popen[bytes], folder: Path) -> float:
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "began").exists():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError("the job did not come to its first step")
        time.sleep(0.01)
    return float((folder / "began").read_text())


def _wait_for_rank(process: subprocess.Popen[bytes], file: Path, mark: str, until: float) -> int | None:
    """The process of a rank once it trains; None if it doesn't before then."""
    while process.poll() is None and time.monotonic() < until:
        if file.exists():
            pid = int(file.read_text())
            try:
                if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
            except OSError:  # it is of an earlier attempt
                pass
        time.sleep(0.01)
    return None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run (300)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds for each kill (30)")
    parser.add_argument("--seed", type=int, default=1, help="of the kills (1)")
    options = parser.parse_args()
    kills = plan_kills(options.seconds, options.every, options.seed)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    print(f"{platform.platform()}, {machine}; {options.seconds:g} s each, seed {options.seed}\n")
    print("| launcher | possible steps | useful steps | goodput | kills | restarts | at the end |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, command in COMMANDS.items():
        if not (BESIDE / name.split(",")[0]).exists():
            continue
        possible = train(command, options.seconds, [])
        useful = train(command, options.seconds, kills)
        cells = [
            *(name, str(possible.steps), str(useful.steps), f"{useful.steps / possible.steps:.1%}"),
            *(str(useful.kills), str(useful.attempts - 1), "exited with 0" if useful.ended else "had to be killed"),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
