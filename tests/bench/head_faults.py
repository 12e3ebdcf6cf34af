"""Rounds of chaos.py in which the nodes have joined: something happens to the head, or between the nodes.

The head is killed, stopped, cut off or told to leave, or the network is halved. Faults happen one after the other, to
whoever leads then. In the end all is mended, who was killed is started again, and all nodes must come together, unless
half of them were killed: the others may then wait for those in vain. At no time may two worlds be at work for longer
than --heartbeat-timeout.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.netns import Network

PROGRAM = Path(__file__).parent / "programs" / "chaos_worlds.py"
PORT = 29418
RANKS = 2  # on each host
TOGETHER_SECONDS = 90.0
VAIN_SECONDS = 30.0
CLEAN_SECONDS = 60.0

# How much longer than the heartbeat timeout two worlds may be at work: a busy machine takes this to end the first one.
SLACK_SECONDS = 1.5


class Note(NamedTuple):
    """A rank was at work."""

    at: float
    world: str
    size: int
    rank: int
    host: str


def overlaps(notes: list[Note]) -> list[tuple[str, str, float]]:
    """Pairs of worlds that were at work at the same time, and for how many seconds."""
    spans: dict[str, tuple[float, float]] = {}
    for note in notes:
        first, last = spans.get(note.world, (note.at, note.at))
        spans[note.world] = min(first, note.at), max(last, note.at)
    order = sorted(spans, key=lambda world: spans[world][0])
    pairs = [(one, other) for place, one in enumerate(order) for other in order[place + 1 :]]
    found = [(one, other, min(spans[one][1], spans[other][1]) - spans[other][0]) for one, other in pairs]
    return [one for one in found if one[2] > 0]


class HeadFault(NamedTuple):
    """What can happen to a head."""

    name: str
    strike: Callable[[HeadRound, str], None]
    kills: bool = False


class HeadRound:
    """One job and its faults, all of which follow from the seed."""

    def __init__(self, seed: int, network: Network, silence: float, only: str, folder: Path) -> None:
        """`silence`: --heartbeat-timeout. `only`: what the names of faults contain."""
        self.random = random.Random(seed)
        self.network = network
        self.silence = silence
        self.folder = folder
        self.names = list(network.hosts)
        faults = [fault for fault in HEAD_FAULTS if only in fault.name]
        self.faults = [self.random.choice(faults) for _ in range(self.random.randint(1, 3))]
        self.delays = [self.random.random() * 3.0 for _ in self.faults]
        self.wrong: list[str] = []
        self.struck: list[str] = []
        self.seconds = 0.0
        self.code: int | None = None
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._later: list[threading.Timer] = []
        self._leaving: list[str] = []  # those that were told to
        self._may_end = False  # the job need not outlive what was done to it

    def describe(self) -> str:
        """The faults in words."""
        return ", ".join(
            f"{fault.name} after {delay:.1f} s" for fault, delay in zip(self.faults, self.delays, strict=True)
        )

    def run(self) -> None:
        """Run the job; what is wrong is in `wrong` then."""
        begun = time.monotonic()
        (self.folder / "worlds").touch()
        for name in self.names:
            self.start(name)
        if not self._come_together(TOGETHER_SECONDS):
            self.wrong.append("the nodes are not together at first")
        for fault, delay in zip(self.faults, self.delays, strict=True):
            time.sleep(delay)
            self._strike(fault)
        time.sleep(self.random.random() * 3 * self.silence)
        for timer in self._later:
            timer.join()
        self._mend()
        must = sum(fault.kills for fault in self.faults) < len(self.names) / 2 and not self._may_end
        together = self._come_together(TOGETHER_SECONDS if must else VAIN_SECONDS)
        (self.folder / "go").touch()
        for name in () if together or must else self.names:
            with contextlib.suppress(ValueError, ProcessLookupError):  # it has ended
                os.kill(self.launcher(name), signal.SIGTERM)
        codes = {name: self._ended(name) for name in self.names}
        self.code = max((code for code in codes.values() if code is not None), default=None)
        if must and not together:
            self.wrong.append("the nodes are not together in the end")
        if None in codes.values() or (must and any(codes.values())):
            self.wrong.append(f"exit codes {codes}")
        self.wrong += [
            f"{one} and {other} were both at work for {seconds:.1f} s"
            for one, other, seconds in overlaps(self.notes())
            if seconds > self.silence + SLACK_SECONDS
        ]
        self._look_at_hosts()
        self.seconds = time.monotonic() - begun

    def start(self, name: str) -> None:
        """Start the launcher of a host."""
        words = [sys.executable, "-m", "launchpad", "run", "--nnodes", f"2:{len(self.names)}", "--nproc", str(RANKS)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.network.hosts['h1'].address}:{PORT}"]
        words += ["--rdzv-id", "chaos", "--rdzv-conf", "last_call_timeout=10,join_timeout=120"]
        words += ["--heartbeat-timeout", str(self.silence), str(PROGRAM), str(self.folder)]
        host = self.network.hosts[name]
        environ = {"TMPDIR": str(host.scratch), "XDG_STATE_HOME": str(self.folder / name)}
        with open(self.folder / f"{name}.out", "ab") as output:
            self._running[name] = subprocess.Popen(
                self.network.inside(name, *words),
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )

    def notes(self) -> list[Note]:
        """Who was at work, and when."""
        rows = [line.split() for line in (self.folder / "worlds").read_text().splitlines()]
        return [Note(float(row[0]), row[1], int(row[2]), int(row[3]), row[4]) for row in rows if len(row) == 5]

    def _last(self) -> Note:
        """The last note of a rank 0."""
        return max((note for note in self.notes() if note.rank == 0), key=lambda note: note.at)

    def launcher(self, name: str) -> int:
        """The pid of a host's launcher, from outside."""
        return min(one.pid for one in self.network.processes(name) if f" run --nnodes 2:{len(self.names)}" in one.words)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do this after a while."""
        self._later.append(threading.Timer(seconds, what))
        self._later[-1].start()

    def resume(self, name: str) -> None:
        """Continue a host's launcher: `nsenter` stops when its child does, and continues it when it is continued."""
        self._running[name].send_signal(signal.SIGCONT)

    def leaves(self, name: str) -> None:
        """A host's launcher was told to leave: when it does, if it is stopped now, is not known."""
        self._leaving.append(name)

    def heal(self, *names: str) -> None:
        """Undo what was done to the network of these hosts, if they have power."""
        for name in names:
            if self.network.hosts[name].init is not None:
                self.network.heal(name)

    def _strike(self, fault: HeadFault) -> None:
        for _ in range(200):
            last = self._last()
            name = last.host
            try:
                fault.strike(self, name)
            except (ValueError, ProcessLookupError):  # nobody leads at the moment
                time.sleep(0.05)
            else:
                self.struck.append(name)
                # One of two nodes is no more than half, and nothing stands for a head that was not at the endpoint.
                self._may_end = self._may_end or (fault.kills and last.size <= 2 * RANKS and name != self.names[0])
                return

    def _mend(self) -> None:
        for name, host in self.network.hosts.items():
            if host.init is None:
                self.network.power_on(name)
        self.network.mend()
        for name in self._leaving:
            if self._ended(name) is None:
                self.wrong.append(f"{name} was told to leave, and is still there")
        for name in self.names:
            if self._running[name].poll() is not None:
                self.start(name)

    def _come_together(self, seconds: float) -> bool:
        """Whether all nodes come into one world, and no other is at work then."""
        begun = time.monotonic()
        whole = {(host, rank) for rank in range(RANKS * len(self.names)) for host in self.names}
        while time.monotonic() < begun + seconds:
            recent = [note for note in self.notes() if note.at > max(begun, time.monotonic() - 0.5)]
            full = {(note.host, note.rank) for note in recent if note.size == len(self.names)}
            if len({note.world for note in recent}) == 1 and len(full & whole) == RANKS * len(self.names):
                return True
            time.sleep(0.1)
        return False

    def _ended(self, name: str) -> int | None:
        try:
            return self._running[name].wait(CLEAN_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _look_at_hosts(self) -> None:
        deadline = time.monotonic() + CLEAN_SECONDS
        while left := [one.words[:60] for name in self.names for one in self.network.processes(name)]:
            if time.monotonic() > deadline:
                self.wrong.append(f"left: {left}")
                return
            time.sleep(0.1)

    def output(self) -> str:
        """What the launchers have said."""
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("h*.out")))

    def close(self) -> None:
        """End what is left."""
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def _kill(this: HeadRound, name: str) -> None:
    os.kill(this.launcher(name), signal.SIGKILL)


def _leave(this: HeadRound, name: str) -> None:
    os.kill(this.launcher(name), signal.SIGTERM)
    this.leaves(name)


def _stop(this: HeadRound, name: str) -> None:
    os.kill(this.launcher(name), signal.SIGSTOP)
    this.later(this.silence * (1 + 2 * this.random.random()), lambda: this.resume(name))


def _cut(this: HeadRound, name: str) -> None:
    this.launcher(name)  # it has power
    this.network.partition(name)
    this.later(this.silence * 3 * this.random.random(), lambda: this.heal(name))


def _halve(this: HeadRound, name: str) -> None:  # noqa: ARG001
    here = this.random.sample(this.names, len(this.names) // 2)
    up = [one for one in this.names if this.network.hosts[one].init is not None]
    for one in here:
        for other in set(up) - set(here) if one in up else ():
            this.network.cut(one, other)
    this.later(this.silence * 3 * this.random.random(), lambda: this.heal(*this.names))


def _cut_power(this: HeadRound, name: str) -> None:
    this.launcher(name)
    this.resume(name)
    this.network.power_off(name)


HEAD_FAULTS = (
    HeadFault("head killed", _kill, kills=True),
    HeadFault("head told to leave", _leave),
    HeadFault("head stopped", _stop),
    HeadFault("head cut off", _cut),
    HeadFault("power cut", _cut_power, kills=True),
    HeadFault("network halved", _halve),
)
