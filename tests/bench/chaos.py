"""Random faults on several hosts: python tests/bench/chaos.py [--rounds N] [--hosts N] [--seed N] [--restarts N] …

The hosts are those of netns.py; it needs root. Each round runs a job with two ranks on each host, lets one or two
faults happen, at any moment from the first second on, and checks that

- the launcher's exit code is one that the faults allow, and it exits in time;
- it says of no other host that it was lost, and which hosts can't reach each other;
- each line that it prints is whole, but for the last one of a rank that was lost with its host;
- afterwards there is no process of the job on any host or here, and no file, at the latest after the next visit.

With --heads the nodes have joined, and faults happen to whoever leads (head_faults.py).

On a busy machine a host may be silent for two seconds though it is well: give the hosts more time with
--heartbeat-timeout. Prints a row for each round. A round is repeated by its seed: --seed SEED --rounds 1 and the same
other options.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from head_faults import HeadRound

from tests.support.netns import Network, Process
from tests.support.node_faults import RANKS, SILENCE, Head, Job

PROGRAMS = Path(__file__).parent / "programs"
RUN_SECONDS = 6.0  # how long the ranks run
STALL = 8.0  # --stall-timeout
EXIT_SECONDS = 90.0  # the launcher has this long, besides what a restart takes
CLEAN_SECONDS = 60.0
BACK_SECONDS = 6.0  # when a host that was cut off or had a power cut is back; with --restarts

LOST, NOTHING_STARTED, STALLED = 4, 3, 124


class Fault(NamedTuple):
    """What can happen to a host. `codes`: the launcher's exit codes without restarts, and with them."""

    name: str
    strike: Callable[[Round, str], None]
    codes: tuple[set[int], set[int]]
    leaves: bool = False  # files and processes, which the next visit removes
    heals: Callable[[Network, str], None] | None = None  # makes it possible to come back
    kind: str = ""  # of the ranks' program: lines, torch, or either


class Round:
    """One job and its faults, all of which follow from the seed."""

    def __init__(
        self, seed: int, network: Network, restarts: int, silence: float, faults: Sequence[Fault], folder: Path
    ) -> None:
        """`restarts`, `silence`: --max-restarts and --heartbeat-timeout of the job."""
        self.random = random.Random(seed)
        self.network = network
        self.restarts = restarts
        self.silence = silence
        self.folder = folder
        names = list(network.hosts)
        both = self.random.random() < 0.25
        self.faults = [(self.random.choice(faults), name) for name in self.random.sample(names, 2 if both else 1)]
        kinds = [fault.kind for fault, _ in self.faults if fault.kind]
        self.kind = kinds[0] if kinds else self.random.choice(("lines", "lines", "torch"))
        self.early = self.random.random() < 0.25  # in the first second
        self.delay = self.random.random() * (1.0 if self.early else 3.0)
        self.cut_off: set[str] = set()  # from a host that was struck
        self.wrong: list[str] = []
        self.spoiling: list[threading.Thread] = []
        self.seconds = 0.0
        self.code: int | None = None
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._up: set[bytes] = set()
        self._all_up = threading.Event()

    def describe(self) -> str:
        """The faults in words."""
        when = f"{self.delay:.2f} s after {'its start' if self.early else 'the ranks are up'}"
        return f"{self.kind}: {' and '.join(f'{fault.name} on {name}' for fault, name in self.faults)}, {when}"

    def run(self) -> None:
        """Run the job; what is wrong is in `wrong` then."""
        head = Head(self.network, self.folder, self.folder / "tmp")
        limits = ("--stall-timeout", STALL, "--max-restarts", self.restarts, "--heartbeat-timeout", self.silence)
        program = (PROGRAMS / f"chaos_{self.kind}.py", RUN_SECONDS)
        start = time.monotonic()
        self.job = Job(head, list(self.network.hosts), *limits, *program)
        readers = [
            threading.Thread(target=self._read_lines),
            threading.Thread(target=lambda: self._err.append(self.job.process.stderr.read())),  # type: ignore[union-attr]
        ]
        for reader in readers:
            reader.start()
        if not self.early and not self._all_up.wait(EXIT_SECONDS):
            self.wrong.append("the ranks did not come up")
        time.sleep(self.delay)
        for fault, name in self.faults:
            self._strike(fault, name)
        healing = [threading.Thread(target=self._heal, args=one) for one in self.faults if self.restarts]
        for one in healing:
            one.start()
        try:
            self.code = self.job.process.wait(EXIT_SECONDS * (1 + self.restarts))
        except subprocess.TimeoutExpired:
            self.wrong.append("the launcher did not exit")
            self.job.process.kill()
        self.seconds = time.monotonic() - start
        for thread in (*readers, *healing, *self.spoiling):
            thread.join()
        self._check_code()
        self._check_words()
        self._check_lines()
        self._check_hosts(head)

    def _read_lines(self) -> None:
        assert self.job.process.stdout is not None
        for line in self.job.process.stdout:
            self._out.append(line)
            if up := re.search(rb" up (\d+)$", line.rstrip()):
                self._up.add(up[1])
                if len(self._up) == RANKS * len(self.network.hosts):
                    self._all_up.set()

    def _strike(self, fault: Fault, name: str) -> None:
        deadline = time.monotonic() + EXIT_SECONDS
        while self.job.process.poll() is None and time.monotonic() < deadline:
            try:
                fault.strike(self, name)
                return
            except (ValueError, IndexError, ProcessLookupError):  # who is to be hit is not there yet
                time.sleep(0.01)

    def _heal(self, fault: Fault, name: str) -> None:
        if fault.heals is not None:
            time.sleep(BACK_SECONDS)
            fault.heals(self.network, name)

    def _check_code(self) -> None:
        allowed: set[int] = set()
        for fault, _ in self.faults:
            allowed |= fault.codes[bool(self.restarts)]
        if len(self.faults) > 1 and not all(0 in fault.codes[bool(self.restarts)] for fault, _ in self.faults):
            allowed.discard(0)
        if self.restarts and any(0 in fault.codes[True] - fault.codes[False] for fault, _ in self.faults):
            # The other one's restart ends a rank that stands still, and finds that two hosts can't reach each other.
            names = {fault.name for fault, _ in self.faults}
            allowed |= ({0} if "rank stopped" in names else set()) | ({LOST} if "pair cut" in names else set())
        if self.early:
            allowed |= {0, NOTHING_STARTED}
        if self.code not in allowed:
            self.wrong.append(f"exit code {self.code} instead of {' or '.join(map(str, sorted(allowed)))}")

    def _check_words(self) -> None:
        said, struck = self.output(), {name for _, name in self.faults} | self.cut_off
        if others := set(re.findall(r"(h\d+) was lost", said)) - struck:
            self.wrong.append(f"it says that {' and '.join(sorted(others))} was lost")
        if self.code == STALLED and {fault.name for fault, _ in self.faults} == {"pair cut"} and not self.early:
            names = re.findall(r"(h\d+) and (h\d+) can't reach each other", said)
            if not any(struck & set(pair) for pair in names):
                self.wrong.append("it doesn't say which hosts can't reach each other")

    def _check_lines(self) -> None:
        cut: dict[bytes, int] = {}
        for line in self._out:
            rank, _, text = line.rstrip(b"\n").partition(b"] ")
            whole = re.fullmatch(rb"up \d+|rank (\d+) line (\d+) (x*) end", text)
            if not whole or (whole[3] is not None and len(whole[3]) != int(whole[2]) % 300):
                cut[rank.lstrip(b"[")] = cut.get(rank.lstrip(b"["), 0) + 1
        struck = {name for _, name in self.faults}
        for rank, count in cut.items():
            name = list(self.network.hosts)[int(rank) // RANKS] if rank.isdigit() else ""
            if name not in struck or count > 1 + self.restarts:
                self.wrong.append(f"{count} cut lines of rank {rank.decode(errors='replace')} on {name or '?'}")
        if b"Traceback" in b"".join(self._err) and b"chaos_" not in b"".join(self._err):
            self.wrong.append("a traceback of launchpad's")

    def _check_hosts(self, head: Head) -> None:
        for fault, name in self.faults:
            if fault.heals is not None:
                fault.heals(self.network, name)
        self.network.mend()
        if any(fault.leaves for fault, _ in self.faults):
            words = ("--hosts", ",".join(self.network.hosts), "--no-python", "true")
            visited = head.run("run", *words, timeout=EXIT_SECONDS)
            if visited.returncode:
                self.wrong.append(f"the next visit: {visited.stderr[-200:]}")
        if not _soon(lambda: not any(self._left().values())):
            self.wrong += [f"left on {name}: {one.words[:60]}" for name, left in self._left().items() for one in left]
        for name, host in self.network.hosts.items():
            cache = host.folder / "cache" / "launchpad"
            files = [one.name for one in (*host.scratch.iterdir(), *cache.glob("unpacking-*"))]
            if files or (shared := self.network.exec(name, "ls", "/dev/shm").split()):
                self.wrong.append(f"files on {name}: {' '.join(files or shared)}")
        head.close()

    def _left(self) -> dict[str, list[Process]]:
        return {name: self.network.processes(name) for name in self.network.hosts}

    def close(self) -> None:
        """All has ended."""

    def output(self) -> str:
        """What the launcher said, without the ranks' lines."""
        return b"".join(self._err).decode(errors="replace")


def _soon(fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + CLEAN_SECONDS
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# The faults.


def _rank(this: Round, name: str) -> int:
    return this.job.rank(this.job.names.index(name) * RANKS + this.random.randrange(RANKS)).pid


def _to_rank(signum: int) -> Callable[[Round, str], None]:
    return lambda this, name: os.kill(_rank(this, name), signum)


def _to_agent(signum: int) -> Callable[[Round, str], None]:
    return lambda this, name: os.kill(this.job.agent(name).pid, signum)


def _kill_guard(this: Round, name: str) -> None:
    os.kill(this.job.guard(name).pid, signal.SIGKILL)


def _kill_guard_and_agent(this: Round, name: str) -> None:
    both = this.job.guard(name).pid, this.job.agent(name).pid
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # neither sees the other die
        for pid in both:
            os.kill(pid, signum)


def _kill_forkserver(this: Round, name: str) -> None:
    agent = this.job.agent(name).pid
    children = [one for one in this.network.processes(name) if one.parent == agent and one.leads]
    os.kill(min(one.pid for one in children), signal.SIGKILL)


def _cut_pair(this: Round, name: str) -> None:
    other = this.random.choice([other for other in this.network.hosts if other != name])
    this.network.cut(name, other)
    this.cut_off.add(other)  # a restart finds that the two can't reach each other, and may name either


def _spoil(this: Round, name: str) -> None:
    """Delay and lose packets; where the kernel has no netem, cut the host off for moments, again and again."""
    try:
        this.network.spoil(name, "delay", "30ms", "20ms", "loss", "2%")
    except AssertionError:
        this.spoiling.append(threading.Thread(target=_flap, args=(this, name)))
        this.spoiling[-1].start()


def _flap(this: Round, name: str) -> None:
    while this.job.process.poll() is None:
        this.network.partition(name)
        time.sleep(0.05)
        this.network.heal(name)
        time.sleep(0.2)


FAILED = ({137}, {0})
GONE = ({LOST}, {0})
FAULTS = (
    Fault("rank killed", _to_rank(signal.SIGKILL), FAILED),
    Fault("rank stopped", _to_rank(signal.SIGSTOP), ({STALLED}, {STALLED})),
    Fault("agent killed", _to_agent(signal.SIGKILL), GONE),
    Fault("agent stopped", _to_agent(signal.SIGSTOP), GONE),
    Fault("guard killed", _kill_guard, GONE),
    Fault("guard and agent killed", _kill_guard_and_agent, GONE, leaves=True),
    Fault("forkserver killed", _kill_forkserver, ({0}, {0}), kind="torch"),
    Fault("sshd killed", lambda this, name: this.network.kill_sshd(name), GONE, heals=Network.serve),
    Fault("power cut", lambda this, name: this.network.power_off(name), GONE, leaves=True, heals=Network.power_on),
    Fault("cut from the head", lambda this, name: this.network.partition(name), GONE, heals=Network.heal),
    Fault("pair cut", _cut_pair, ({STALLED}, {STALLED}), kind="torch"),
    Fault("delay and loss", _spoil, ({0}, {0})),
)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="lp-"))
    (folder / "work" / "tmp").mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Print the table; 1 if a round was bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next number")
    parser.add_argument("--restarts", type=int, default=0, help="--max-restarts of the jobs")
    parser.add_argument("--heartbeat-timeout", type=float, default=SILENCE, help="of the jobs, in seconds")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--heads", action="store_true", help="of jobs whose nodes have joined")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    bad = []
    print("| seed | faults | exit code | s | |\n|---|---|---|---|---|")
    with _folder() as folder, Network(folder / "network", options.hosts) as network:
        for seed in range(options.seed, options.seed + options.rounds):
            with _folder() as own:
                silence, work = options.heartbeat_timeout, own / "work"
                one: Round | HeadRound = (
                    HeadRound(seed, network, silence, options.only, work)
                    if options.heads
                    else Round(seed, network, options.restarts, silence, faults, work)
                )
                try:
                    one.run()
                except Exception as error:
                    one.wrong.append(f"{type(error).__name__}: {error}"[:300])
                one.close()
                said = one.output() if one.wrong else ""
            what = "; ".join(one.wrong) or "ok"
            print(f"| {seed} | {one.describe()} | {one.code} | {one.seconds:.1f} | {what} |", flush=True)
            if one.wrong:
                bad.append(seed)
                print(said, file=sys.stderr, flush=True)
            network.restore()
            for host in network.hosts.values():
                shutil.rmtree(host.scratch)
                host.scratch.mkdir()
    print(f"{len(bad)} of {options.rounds} rounds were bad{': seeds ' if bad else ''}{', '.join(map(str, bad))}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
