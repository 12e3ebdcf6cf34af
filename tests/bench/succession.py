"""From the loss of the leading node to the others' next all_reduce, beside torchrun: python tests/bench/succession.py

Four hosts in network namespaces (root only), two ranks with gloo on each, a launcher on every host: --nnodes 3:4
--max-restarts. Each fault is made `--rounds` times, in one job, to whoever leads it then:

- its launcher's process is killed;
- its host loses its power, of which the others get no sign; --heartbeat-timeout is 2.

The other three go on, and the host is there again before the next round. torchrun's store is on the host of the
endpoint, so that one is struck, in a job for each round. Seconds: median (least to most), and how many of the rounds
came back within 60 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from recovery import HEARTBEAT, PORT, PROGRAM, Marks, begin, end, show, torchrun

from tests.support.netns import Network

ENDPOINT = "h1"
RANKS = 2  # on each host


class Nodes:
    """The launchers of one job, one on each host."""

    def __init__(self, network: Network, line: list[str]) -> None:
        """`line`: the launcher's, without the program."""
        self.network = network
        self._line = line
        self._folder = tempfile.TemporaryDirectory()
        self.marks = Marks(Path(self._folder.name))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in network.hosts:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a host's launcher."""
        folder = self.marks.folder / name
        folder.mkdir(exist_ok=True)
        words = self.network.inside(name, *self._line, PROGRAM, self.marks.folder)
        self.running[name] = begin(words, folder)

    def wait(self, hosts: int, after: float) -> float | None:
        """When the ranks of an attempt on so many hosts had their first result; None if they had none in time."""
        return self.marks.wait(hosts * RANKS, after, [])

    def kill(self, name: str) -> None:
        """Kill the launcher of a host, which is the parent of all else."""
        inside = self.network.processes(name)
        launcher = min(one.pid for one in inside if one.words.endswith(str(self.marks.folder)) and "run" in one.words)
        os.kill(launcher, signal.SIGKILL)

    def said(self) -> str:
        """The end of what each launcher has said."""
        return "\n".join(
            f"{path.parent.name}: {path.read_text()[-600:]}" for path in self.marks.folder.glob("*/output")
        )

    def close(self) -> None:
        """Let the ranks end, or else end them."""
        end(list(self.running.values()), self.marks)
        self.network.restore()
        self._folder.cleanup()


Strike = Callable[[Nodes, str], None]


def kill_launcher(nodes: Nodes, name: str) -> None:
    """Only the process: its host says that it is gone."""
    nodes.kill(name)


def cut_power(nodes: Nodes, name: str) -> None:
    """Nobody says anything."""
    nodes.network.power_off(name)


def launchpad(network: Network) -> list[str]:
    """launchpad's line, the same on all hosts."""
    endpoint = f"{network.hosts[ENDPOINT].address}:{PORT}"
    words = [sys.executable, "-m", "launchpad", "run", "--nnodes", "3:4", "--nproc-per-node", str(RANKS)]
    words += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "r", "--rdzv-endpoint", endpoint]
    words += ["--rdzv-conf", "last_call_timeout=10", "--heartbeat-timeout", str(HEARTBEAT)]
    return ["env", "TMPDIR=/dev/shm", *words]


def lose_heads(network: Network, rounds: int, strike: Strike) -> list[float]:
    """Strike whoever leads, and let it come back, again and again."""
    nodes = Nodes(network, launchpad(network))
    times: list[float] = []
    last = nodes.wait(4, 0.0)
    while last is not None and len(times) < rounds:
        name = nodes.marks.hosts()[0]
        struck = time.monotonic()
        strike(nodes, name)
        last = nodes.wait(3, struck)
        if last is None:
            break
        times.append(last - struck)
        nodes.running[name].wait(10)
        network.power_on(name)
        nodes.start(name)
        last = nodes.wait(4, last)
    if last is None:
        print(nodes.said(), file=sys.stderr)
    nodes.close()
    return times


def lose_stores(network: Network, rounds: int, strike: Strike) -> list[float]:
    """The same for torchrun, with a job for each round."""
    times: list[float] = []
    for _ in range(rounds):
        nodes = Nodes(network, torchrun(network, "3:4"))
        last = nodes.wait(4, 0.0)
        struck = time.monotonic()
        if last is not None:
            strike(nodes, ENDPOINT)
            last = nodes.wait(3, struck)
        nodes.close()
        if last is not None:
            times.append(last - struck)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--torchrun-rounds", type=int, default=3, help="each takes the 60 s")
    options = parser.parse_args()
    rounds, few = options.rounds, options.torchrun_rounds
    print(f"from the loss of the leading node to the others' next all_reduce, {os.cpu_count()} cores:", flush=True)
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 4) as network:
        for what, strike in (
            ("its launcher is killed", kill_launcher),
            (f"its power is cut, heartbeat timeout {HEARTBEAT} s", cut_power),
        ):
            show(f"{what}: launchpad", lose_heads(network, rounds, strike), rounds)
            show("  torchrun --nnodes 3:4", lose_stores(network, few, strike), few)


if __name__ == "__main__":
    main()
