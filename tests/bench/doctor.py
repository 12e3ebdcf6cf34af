"""How long `launchpad doctor` takes for hosts that are network namespaces of this machine, quick and whole.

python -m tests.bench.doctor [--hosts 2,8,16] [--rounds 3]: needs root. All hosts share the cores of this machine, so
that the imports of torch for the all_reduce take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.netns import Network

# Without torch, so without the all_reduce.
PLAIN = sys._base_executable


def seconds(network: Network, folder: str, python: str) -> float:
    """The whole command, from its start to its exit."""
    words = [sys.executable, "-m", "launchpad", "doctor", "--json", "--ssh-config", str(network.ssh_config)]
    argv = network.argv(*words, "-H", ",".join(network.hosts), "--python", python)
    began = time.monotonic()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    took = time.monotonic() - began
    failures = [host["failure"] for host in json.loads(done.stdout)["hosts"] if host["failure"]]
    if failures:
        raise SystemExit("\n".join(failures))
    return took


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for count in map(int, options.hosts.split(",")):
        with tempfile.TemporaryDirectory() as folder, Network(Path(folder) / "hosts", count) as network:
            for name, python in (("without torch", PLAIN), ("with the all_reduce", sys.executable)):
                times = sorted(seconds(network, folder, python) for _ in range(options.rounds))
                shown = f"{median(times):.2f} s ({times[0]:.2f} to {times[-1]:.2f})"
                print(f"{count:3} hosts  {name:<20} {shown}  load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
