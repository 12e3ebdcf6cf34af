"""What a fault costs, beside torchrun and mpirun: python tests/bench/faults.py [--fault WORDS]

For each fault and launcher: the launcher's exit code, the seconds from the fault until the launcher is gone, and how
many of the job's processes are still alive a second later. Four ranks; "they wait" means that they sleep and obey.

Processes of a job are told by a variable that they inherit. A launcher that is not gone in time is killed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from launch import RANKS, Peer, installed

MARK = "LAUNCHPAD_FAULTS"
READY_SECONDS = 60.0
GONE_SECONDS = 20.0
GRACE = {"launchpad": ["--grace", "2"], "torchrun": ["--shutdown-timeout", "2"]}

# Rank 1 plays the fault's part once all are there, and the file "go"; it notes the moment.
PROGRAM = """
import os, pathlib, signal, sys, time

part, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]

def on(signum, frame):
    (folder / f"told{signum}-{rank}").touch()

if part == "deaf":
    signal.signal(signal.SIGINT, on)
    signal.signal(signal.SIGTERM, on)
if part == "daemon" and os.fork() == 0:
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    time.sleep(600)
    os._exit(0)
if part == "daemon":
    os.wait()
(folder / f"here{rank}").touch()
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    time.sleep(0.005)
    if not (folder / "go").exists() or not (rank == "1" or part == "daemon"):
        continue
    (folder / f"fault{rank}").write_text(str(time.monotonic()))
    if part == "daemon":
        sys.exit(0)
    if part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "raises":
        raise ValueError("the learning rate is negative")
    os._exit(7)
"""


class Job(NamedTuple):
    """A launcher at work, in a process group of its own."""

    process: subprocess.Popen[bytes]
    folder: Path

    def let_the_rank(self) -> float:
        """Have the ranks play their part; the moment in which the last of them did."""
        (self.folder / "go").touch()
        wait_until(lambda: list(self.folder.glob("fault*")))
        self._wait()
        return max(float(file.read_text()) for file in self.folder.glob("fault*"))

    def signal(self, signum: signal.Signals, group: bool = False) -> float:
        """Signal the launcher, or its process group as a terminal does; the moment in which it was done."""
        now = time.monotonic()
        if group:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)
        return now

    def ctrl_c_twice(self) -> float:
        """The second one when ranks have been told of the first, or two seconds pass without."""
        self.signal(signal.SIGINT, group=True)
        wait_until(lambda: list(self.folder.glob("told*")) or self.process.poll() is not None, 2.0)
        return self.signal(signal.SIGINT, group=True)

    def _wait(self) -> None:
        wait_until(lambda: self.process.poll() is not None, GONE_SECONDS)


# Words for it; the ranks' part; the ranks' grace, where the default is not the point; what happens.
FAULTS: list[tuple[str, str, bool, Callable[[Job], float]]] = [
    ("a rank exits with 7, the others wait", "exits", False, Job.let_the_rank),
    ("a rank is killed by SIGKILL", "killed", False, Job.let_the_rank),
    ("a rank raises", "raises", False, Job.let_the_rank),
    ("each rank leaves a daemon behind and exits with 0", "daemon", False, Job.let_the_rank),
    ("a rank exits with 7, the others ignore TERM (grace 2 s)", "deaf", True, Job.let_the_rank),
    ("Ctrl-C", "waits", False, lambda job: job.signal(signal.SIGINT, group=True)),
    ("SIGTERM to the launcher", "waits", False, lambda job: job.signal(signal.SIGTERM)),
    ("SIGHUP to the launcher", "waits", False, lambda job: job.signal(signal.SIGHUP)),
    ("SIGKILL of the launcher", "waits", False, lambda job: job.signal(signal.SIGKILL)),
    ("Ctrl-C twice, the ranks ignore INT and TERM", "deaf", False, Job.ctrl_c_twice),
]


def wait_until(fact: Callable[[], object], seconds: float = READY_SECONDS) -> bool:
    """Wait for a fact; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def alive(mark: str) -> list[int]:
    """The live processes that have inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
        except (OSError, IndexError):  # gone meanwhile
            continue
    return found


def measure(peer: Peer, part: str, grace: bool, happen: Callable[[Job], float]) -> str:
    """One fault under one launcher: "code, seconds, left"."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        options = GRACE.get(peer.name, []) if grace else []
        argv = [*peer.command, *options, *peer.interpreter, str(folder / "program.py"), part, name]
        process = subprocess.Popen(
            argv,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if not wait_until(lambda: len(list(folder.glob("here*"))) == RANKS):
                return "did not start"
            assert len(alive(mark)) > RANKS, "ranks that don't inherit the mark can't be counted"
            at = happen(Job(process, folder))
            in_time = wait_until(lambda: process.poll() is not None, max(0.0, at + GONE_SECONDS - time.monotonic()))
            how = f"{process.returncode}, {time.monotonic() - at:.2f} s" if in_time else f"none, > {GONE_SECONDS:g} s"
            process.kill()
            process.wait()
            time.sleep(1.0)  # not to wait for anything: so long what is left may take to end by itself
            return f"{how}, {len(alive(mark))}"
        finally:
            while left_over := alive(mark):
                for pid in left_over:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                process.poll()
                time.sleep(0.01)


def main() -> None:
    """Run the faults and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", metavar="WORDS", default="", help="only the faults with these words in their name")
    wanted = parser.parse_args().fault
    peers = [peer for peer in installed() if "Hydra" not in peer.name]
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, {sys.executable}\n")
    print("| fault | " + " | ".join(f"{peer.name}: code, s, left" for peer in peers) + " |")
    print("|---" * (len(peers) + 1) + "|")
    for words, part, grace, happen in FAULTS:
        if wanted in words:
            cells = [measure(peer, part, grace, happen) for peer in peers]
            print(f"| {words} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
