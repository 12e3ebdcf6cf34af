"""How long `launchpad doctor` takes for hosts that are network namespaces of this machine, with and without torch.

python -m tests.bench.doctor [--hosts 2,8,16] [--rounds 3]: needs root. All hosts share the cores of this machine, so
that the imports of torch for the all_reduce take turns, unless the hosts keep images (`launchpad warm`).
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

from tests.support.netns import Network

# Without torch, so without the all_reduce.
PLAIN = sys._base_executable
CASES = (
    ("without torch", PLAIN, False),
    ("with the all_reduce", sys.executable, False),
    ("with kept images", sys.executable, True),
)


def launchpad(network: Network, folder: str, *words: str) -> str:
    """What a command about all hosts prints."""
    options = ("--ssh-config", str(network.ssh_config), "-H", ",".join(network.hosts))
    argv = network.argv(sys.executable, "-m", "launchpad", *words, *options)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False).stdout


def seconds(network: Network, folder: str, python: str, *, kept: bool) -> float:
    """The whole command, from its start to its exit."""
    began = time.monotonic()
    hosts = json.loads(launchpad(network, folder, "doctor", "--json", "--python", python))["hosts"]
    took = time.monotonic() - began
    if failures := [host["failure"] for host in hosts if host["failure"]]:
        raise SystemExit("\n".join(failures))
    if any(host["facts"].get("import", {}).get("kept", False) != kept for host in hosts):
        raise SystemExit("not all hosts have used their kept images")
    return took


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for count in map(int, options.hosts.split(",")):
        with tempfile.TemporaryDirectory() as folder, Network(Path(folder) / "hosts", count) as network:
            for name, python, kept in CASES:
                if kept:
                    launchpad(network, folder, "warm", "--python", python)
                times = sorted(seconds(network, folder, python, kept=kept) for _ in range(options.rounds))
                shown = f"{median(times):.2f} s ({times[0]:.2f} to {times[-1]:.2f})"
                print(f"{count:3} hosts  {name:<20} {shown}  load {os.getloadavg()[0]:.1f}", flush=True)
            launchpad(network, folder, "warm", "--stop")


if __name__ == "__main__":
    main()
