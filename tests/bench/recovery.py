"""From a fault to the next attempt's first all_reduce, beside torchrun in one run: python tests/bench/recovery.py

Ranks with gloo, on one host and on four hosts in network namespaces (root only). Each fault is made `--rounds` times:

- a rank is killed: the ranks of all hosts start again;
- a launcher's process on a host is killed (our agent there, or torchrun): with us a spare host takes its place, with
  torchrun (--nnodes 3:4) the other three go on;
- a host loses its power, of which the others get no sign. We notice by --heartbeat-timeout 2, torchrun's ranks don't:
  gloo waits for its timeout, so torchrun is not timed.

After each fault the host is there again before the next one. Seconds: median (least to most), and how many of the
rounds came back within 60 s.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from tests.support.netns import Network  # noqa: E402

PROGRAM = Path(__file__).parent / "programs" / "recovers.py"
PATIENCE = 60.0
HEARTBEAT = 2
PORT = 29417
# One restart after the other is what this is about.
RESTARTS = ["--max-restarts", "100000", "--restart", "always"]


class Marks:
    """What the ranks have noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "marks"
        self._path.touch()

    def of(self, what: str) -> list[float]:
        """The times of these notes."""
        return [float(line.split()[2]) for line in self._path.read_text().splitlines() if line.startswith(what)]

    def reduced(self, ranks: int, after: float) -> float | None:
        """When the last of an attempt's ranks had its first result, if all have."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        found: dict[str, float] = {}
        for what, rank, at, _ in lines:
            if what == f"reduced-{ranks}" and float(at) > after:
                found.setdefault(rank, float(at))
        return max(found.values()) if len(found) >= ranks else None

    def hosts(self) -> dict[int, str]:
        """Where each rank ran last."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        return {int(rank): host for what, rank, _, host in lines if what.startswith("reduced")}

    def wait(self, ranks: int, after: float, process: list[subprocess.Popen[bytes]]) -> float | None:
        """Wait for that. None if it takes too long, or a launcher that should live has ended."""
        deadline = time.monotonic() + PATIENCE
        while (at := self.reduced(ranks, after)) is None:
            if time.monotonic() > deadline or any(one.poll() is not None for one in process):
                return None
            time.sleep(0.002)
        return at

    def ask(self, what: str, rank: int) -> float | None:
        """Have a rank do this; when it did."""
        before = len(self.of(what))
        (self.folder / f"{what}-{rank}").touch()
        deadline = time.monotonic() + PATIENCE
        while len(times := self.of(what)) == before:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
        return times[-1]


def show(name: str, times: list[float], rounds: int) -> None:
    """A line of the table."""
    if times:
        spread = f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
    print(f"  {name:<46} {spread if times else '-':<28} {len(times)} of {rounds}", flush=True)


def begin(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a launcher, whose output goes to a file."""
    with open(folder / "output", "ab") as output:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )


def end(processes: list[subprocess.Popen[bytes]], marks: Marks) -> None:
    """Let the ranks end, or else end them."""
    (marks.folder / "over").touch()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill_ranks(argv: list[list[str]], ranks: int, rounds: int, pick: random.Random) -> list[float]:
    """Kill a rank again and again."""
    with tempfile.TemporaryDirectory() as name:
        marks = Marks(Path(name))
        running = [begin([*words, str(PROGRAM), name], Path(name)) for words in argv]
        times: list[float] = []
        last = marks.wait(ranks, 0.0, running)
        while last is not None and len(times) < rounds:
            struck = marks.ask("kill", pick.randrange(ranks))
            last = marks.wait(ranks, struck, running) if struck is not None else None
            if struck is not None and last is not None:
                times.append(last - struck)
        if last is None:
            print(Path(name, "output").read_text()[-1500:], file=sys.stderr)
        end(running, marks)
    return times


def lose_hosts(network: Network, rounds: int, pick: random.Random, *, silently: bool) -> list[float]:
    """Kill the agent of a host, or cut its power, again and again; a spare takes its place."""
    with tempfile.TemporaryDirectory() as name:
        marks = Marks(Path(name))
        words = [sys.executable, "-m", "launchpad", "run", "--ssh-config", str(network.ssh_config)]
        words += ["-H", "h1:2,h2:2,h3:2,h4:2", "--spares", "1", "--heartbeat-timeout", str(HEARTBEAT)]
        running = [begin(network.argv(*words, str(PROGRAM), name), Path(name))]
        times: list[float] = []
        last = marks.wait(6, 0.0, running)
        while last is not None and len(times) < rounds:
            backs = _said(name, " is back")
            rank = pick.randrange(6)
            struck: float | None
            host = marks.hosts()[rank]
            if silently:
                struck = time.monotonic()
                network.power_off(host)
            else:
                struck = marks.ask("agent", rank)
            last = marks.wait(6, struck, running) if struck is not None else None
            if struck is None or last is None:
                break
            times.append(last - struck)
            if silently:
                network.power_on(host)
            deadline = time.monotonic() + PATIENCE
            while _said(name, " is back") == backs and time.monotonic() < deadline:
                time.sleep(0.02)
        if last is None:
            print(Path(name, "output").read_text()[-1500:], file=sys.stderr)
        end(running, marks)
    return times


def _said(folder: str, words: str) -> int:
    return Path(folder, "output").read_text().count(words)


def lose_torchruns(network: Network, rounds: int, pick: random.Random) -> list[float]:
    """Kill torchrun on a host, but not where its store is; three of four go on. One round a job."""
    times: list[float] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            marks = Marks(Path(name))
            running = [begin([*words, str(PROGRAM), name], Path(name)) for words in torchruns(network, "3:4")]
            if marks.wait(8, 0.0, running) is None:
                end(running, marks)
                break
            victim = pick.choice([rank for rank, host in marks.hosts().items() if host != "h1"])
            struck = marks.ask("agent", victim)
            last = marks.wait(6, struck, []) if struck is not None else None
            end(running, marks)
        if struck is None or last is None:
            break
        times.append(last - struck)
    return times


def torchruns(network: Network, nodes: str) -> list[list[str]]:
    """torchrun on each of the four hosts."""
    return [network.inside(host, *torchrun(network, nodes)) for host in network.hosts]


def torchrun(network: Network, nodes: str) -> list[str]:
    """torchrun's line, the same on all hosts."""
    words = ["-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2", "--max-restarts", "100000"]
    words += ["--rdzv-backend", "c10d", "--rdzv-id", "r", "--rdzv-endpoint", f"{network.hosts['h1'].address}:{PORT}"]
    words += ["--rdzv-conf", "last_call_timeout=1"]
    # torchrun looks up its own host's name, and gloo needs to be told the interface; launchpad does without both.
    names = "".join(f"{host.address} {name}\n" for name, host in network.hosts.items())
    named = f'printf "{names}" > "$TMPDIR/hosts" && mount --bind "$TMPDIR/hosts" /etc/hosts && exec "$@"'
    scratch = ["env", "GLOO_SOCKET_IFNAME=eth0", "TMPDIR=/dev/shm", "unshare", "--mount", "sh", "-c", named, "sh"]
    return [*scratch, sys.executable, *words]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--torchrun-rounds", type=int, default=3, help="torchrun takes long")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rounds, few = options.rounds, options.torchrun_rounds
    pick = random.Random(options.seed)
    launchpad = [sys.executable, "-m", "launchpad", "run", *RESTARTS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    print(f"from the fault to the next attempt's first all_reduce, {os.cpu_count()} cores:", flush=True)
    show("rank killed, 1 host x 2: launchpad", kill_ranks([[*launchpad, "-n", "2"]], 2, rounds, pick), rounds)
    show("  torchrun", kill_ranks([[*torchrun, "--max-restarts", "1000"]], 2, few, pick), few)
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 4) as network:
        hosts = [*launchpad, "--ssh-config", str(network.ssh_config), "-H", "h1:2,h2:2,h3:2,h4:2"]
        show("rank killed, 4 hosts x 2: launchpad", kill_ranks([network.argv(*hosts)], 8, rounds, pick), rounds)
        show("  torchrun", kill_ranks(torchruns(network, "4"), 8, few, pick), few)
        times = lose_hosts(network, rounds, pick, silently=False)
        show("agent killed, 3 hosts x 2 and a spare: launchpad", times, rounds)
        show("  torchrun --nnodes 3:4", lose_torchruns(network, few, pick), few)
        times = lose_hosts(network, rounds, pick, silently=True)
        show(f"power cut, heartbeat timeout {HEARTBEAT} s: launchpad", times, rounds)


if __name__ == "__main__":
    main()
