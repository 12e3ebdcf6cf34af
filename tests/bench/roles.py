"""What several worlds in one job cost: python tests/bench/roles.py [--runs 5]

- start: as many roles of one rank beside one role of as many ranks, from the command until the last rank runs, and
  until the command has ended, in turns: a program that imports torch, the same from a kept image, plain Python, and
  `date`, which no other process of the job resembles;
- restart: four replicas of two ranks that all_reduce in a loop, with a pause of --step seconds between; a rank of
  one is killed again and again. Until its own next all_reduce, and the longest step of the others over their median,
  before and meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """\
import os, sys, time
import torch, torch.distributed as dist
own = os.environ
dist.init_process_group("gloo")
ones = torch.ones(1)
with open(f"steps-{own['LAUNCHPAD_REPLICA']}-{own['RANK']}", "a", buffering=1) as file:
    while not os.path.exists("over"):
        dist.all_reduce(ones)
        print(time.monotonic(), os.getpid(), file=file)
        time.sleep(float(sys.argv[1]))
        stop = torch.tensor([float(os.path.exists("over"))])
        dist.all_reduce(stop)
        if stop.item():
            break
dist.destroy_process_group()
"""

PROGRAMS = {
    "plain.py": "import time\nprint(time.time(), flush=True)\n",
    "torches.py": "import time, torch\nprint(time.time(), flush=True)\n",
}

PATIENCE = 60.0


def launchpad(folder: Path, text: str) -> list[str]:
    """The command for a job file of this text."""
    (folder / "job.toml").write_text(text)
    return [sys.executable, "-m", "launchpad", "run", "--no-advice", "--config", "job.toml", "--job", "j"]


def seconds(folder: Path, text: str, runtime: str) -> tuple[float, float]:
    """Until the last rank of the job says that it runs, and until it has ended. `runtime`: where images are sought."""
    argv, begun = launchpad(folder, text), time.time()
    own = {**environ(), "XDG_RUNTIME_DIR": runtime}
    done = subprocess.run(argv, cwd=folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    return max(float(line.split()[-1]) for line in done.stdout.splitlines()) - begun, ended - begun


def environ() -> dict[str, str]:
    """Ours, with the checkout's launchpad."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start(runs: int, ranks: int) -> None:
    """The first part."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kept:
        for name, source in PROGRAMS.items():
            (Path(folder) / name).write_text(source)
        warm = [sys.executable, "-m", "launchpad", "warm"]
        own = {**environ(), "XDG_RUNTIME_DIR": kept}
        subprocess.run(warm, cwd=folder, env=own, check=True, stdout=subprocess.DEVNULL)
        try:
            compare("torch", 'target = "torches.py"\n', Path(folder), folder, runs, ranks)
            compare("torch, kept", 'target = "torches.py"\n', Path(folder), kept, runs, ranks)
            compare("plain Python", 'target = "plain.py"\n', Path(folder), folder, runs, ranks)
            compare("date", 'target = ["date", "+%s.%N"]\n', Path(folder), folder, runs, ranks)
        finally:
            subprocess.run([*warm, "--stop"], env=own, check=True, stdout=subprocess.DEVNULL)


def compare(name: str, target: str, folder: Path, runtime: str, runs: int, ranks: int) -> None:
    """One program."""
    one = f"[jobs.j.roles.a]\n{target}nproc = {ranks}\n"
    many = "".join(f"[jobs.j.roles.a{number}]\n{target}" for number in range(ranks))
    times: dict[str, list[tuple[float, float]]] = {one: [], many: []}
    for _ in range(runs):
        for text, found in times.items():
            found.append(seconds(folder, text, runtime))
    for part, what in enumerate(("until all run", "to the end")):
        alone, several = (min(one[part] for one in found) for found in times.values())
        print(
            f"{name}, {what}: one role of {ranks} ranks {alone:.3f} s, {ranks} of one {several:.3f} s: "
            f"{several / alone:.2f} times, at best"
        )


def steps(folder: Path, replica: int, rank: int = 0) -> list[tuple[float, int]]:
    """When a rank has made its steps, with its pid."""
    path = folder / f"steps-{replica}-{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(at), int(pid)) for at, pid, *_ in (line for line in lines if len(line) == 2)]


def wait(folder: Path, replica: int, after: float) -> float:
    """When a replica made its first step after that."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = [at for at, _ in steps(folder, replica) if at > after]
        if found:
            return found[0]
        time.sleep(0.002)
    raise SystemExit(f"replica {replica} made no step in {PATIENCE:g} s")


def restart(runs: int, replicas: int, step: float) -> None:
    """The second part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps.py").write_text(PROGRAM)
        target = f'target = ["steps.py", "{step}"]\nnproc = 2\nreplicas = {replicas}\n'
        text = f"[jobs.j.roles.r]\n{target}max-restarts = {runs}\n"
        job = subprocess.Popen(launchpad(folder, text), cwd=folder, env=environ(), stderr=subprocess.DEVNULL)
        for replica in range(replicas):
            wait(folder, replica, 0.0)
        back = []
        begun = time.monotonic() + 1
        time.sleep(1 + 1.3 * runs)  # as long as what follows
        first = time.monotonic()
        for _ in range(runs):
            killed = time.monotonic()
            os.kill(steps(folder, 0, 1)[-1][1], signal.SIGKILL)
            # The other rank may have got through one more step.
            back.append(wait(folder, 0, killed + 0.03) - killed)
            time.sleep(1)
        ended = time.monotonic()
        (folder / "over").touch()
        job.wait(PATIENCE)
        spans = (begun, first), (first, ended)
        before, meanwhile = ([longest(folder, replica, *span) for replica in range(1, replicas)] for span in spans)
    print(f"killed {runs} times: its next all_reduce after {statistics.median(back):.3f} s (up to {max(back):.3f} s)")
    print(
        f"the others' longest step: {max(meanwhile):.2f} times their median, before that {max(before):.2f} times",
    )


def longest(folder: Path, replica: int, begun: float, ended: float) -> float:
    """The longest step of a replica in this time, over the median."""
    times = [at for at, _ in steps(folder, replica) if begun < at < ended]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return max(gaps) / statistics.median(gaps)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=32, help="of the first part")
    parser.add_argument("--replicas", type=int, default=4, help="of the second part")
    parser.add_argument("--step", type=float, default=0.2, help="seconds between their all_reduces")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    start(options.runs, options.ranks)
    restart(options.runs, options.replicas, options.step)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
