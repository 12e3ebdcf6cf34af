"""A launchpad that was killed, and the next one: python tests/bench/resume.py

Eight hosts in network namespaces (root only) with two ranks each, which print a million lines in all. launchpad is
killed when they have begun, and `launchpad resume` is started after `--away` seconds: how long it takes to its first
line, and how many lines are missing or doubled in the files of --log-dir at the end. torchrun, mpirun and Ray's driver
have no such thing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.netns import Network

RANKS = 2  # on each host

PROGRAM = """\
import os, sys, time
lines, seconds = int(sys.argv[1]), float(sys.argv[2])
begun, said = time.monotonic(), 0
while said < lines:
    due = min(lines, 100 + int(lines * (time.monotonic() - begun) / seconds))
    os.write(1, b"".join(b"%d of rank %s\\n" % (number, os.environb[b"RANK"]) for number in range(said, due)))
    said = due
    time.sleep(0.05)
"""


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--away", type=float, default=60.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder) / "network", asked.hosts) as network:
        measure(network, Path(folder), asked.lines // (asked.hosts * RANKS), asked.away)


def measure(network: Network, folder: Path, lines: int, away: float) -> None:
    """`lines`: of each rank."""
    (folder / "prints.py").write_text(PROGRAM)
    command = network.argv(sys.executable, "-m", "launchpad")
    environ = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    hosts = ",".join(f"{name}:{RANKS}" for name in network.hosts)
    words = ["run", "--ssh-config", network.ssh_config, "-H", hosts, "--keep-running", "1h"]
    words += ["--log-dir", folder / "logs", "--tee", "3", folder / "prints.py", lines, away + 20]
    begun = time.monotonic()
    first = subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, env=environ, cwd=folder)
    assert first.stdout is not None
    first.stdout.readline()
    started = time.monotonic() - begun
    for _ in range(99 * RANKS * len(network.hosts)):
        first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    time.sleep(away)
    begun = time.monotonic()
    following = subprocess.Popen([*command, "resume"], stdout=subprocess.PIPE, env=environ, cwd=folder)
    assert following.stdout is not None
    following.stdout.readline()
    shown = time.monotonic() - begun
    following.communicate()
    missing = doubled = 0
    for path in folder.glob("logs/*/attempt_0/*/stdout.log"):
        numbers = [int(line.split()[0]) for line in path.read_bytes().splitlines()]
        missing += len(set(range(lines)) - set(numbers))
        doubled += len(numbers) - len(set(numbers))
    files = len(list(folder.glob("logs/*/attempt_0/*/stdout.log")))
    print(f"{len(network.hosts)} hosts, {files} ranks, {files * lines} lines, {away:g} s without launchpad")
    print(
        f"first line after {shown:.2f} s, beside {started:.2f} s at the job's start; exit code {following.returncode}"
    )
    print(f"{missing} lines missing, {doubled} doubled")


if __name__ == "__main__":
    main()
