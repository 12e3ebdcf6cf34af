"""What is left after a fault, beside torchrun and mpirun in one run: python tests/bench/faults.py

For each fault and launcher: the launcher's exit code, the seconds from the fault until it is gone, and how many
processes of the job live a second after that. Those are then killed. A launcher that is not gone after 20 s is
killed too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from launch import RANKS, Peer, installed

MARK = "LAUNCHPAD_BENCH"
PATIENCE = 20.0


class Fault(NamedTuple):
    """What happens to a job of RANKS ranks once they are all there."""

    name: str
    program: str  # what rank 1 does, for programs/faults.py; the other ranks wait
    others: str  # what the other ranks do
    strike: Callable[[subprocess.Popen[bytes]], None] | None = None  # what happens from outside
    options: Mapping[str, Sequence[str]] = MappingProxyType({})  # by launcher


def _send(*signums: int) -> Callable[[subprocess.Popen[bytes]], None]:
    def strike(process: subprocess.Popen[bytes]) -> None:
        for number, signum in enumerate(signums):
            if number:
                time.sleep(0.3)  # a person's second thought
            if signum == signal.SIGINT:  # as a terminal does: to all of the process group
                os.killpg(process.pid, signum)
            else:
                process.send_signal(signum)

    return strike


GRACE = {"launchpad": ["--grace", "2"], "torchrun": ["--shutdown-timeout", "2"]}

FAULTS = (
    Fault("a rank exits with 7", "exit", "wait"),
    Fault("a rank raises", "raise", "wait"),
    Fault("a rank is killed (SIGKILL)", "kill", "wait"),
    Fault("a rank exits with 7, the others ignore TERM (grace 2 s)", "exit", "deaf", None, GRACE),
    Fault("all ranks exit 0, each leaves a daemon", "daemon", "daemon"),
    Fault("a rank exits with 7, each has a daemon", "daemon exit", "daemon wait"),
    Fault("Ctrl-C", "wait", "wait", _send(signal.SIGINT)),
    Fault("Ctrl-C twice, ranks ignore INT and TERM", "deaf", "deaf", _send(signal.SIGINT, signal.SIGINT)),
    Fault("TERM to the launcher", "wait", "wait", _send(signal.SIGTERM)),
    Fault("HUP to the launcher", "wait", "wait", _send(signal.SIGHUP)),
    Fault("KILL to the launcher", "wait", "wait", _send(signal.SIGKILL)),
    Fault("KILL to the launcher, each rank has a daemon", "daemon wait", "daemon wait", _send(signal.SIGKILL)),
)


class Result(NamedTuple):
    """What a launcher made of a fault."""

    code: int | None  # None: it was not gone after PATIENCE
    seconds: float
    left: int

    def __str__(self) -> str:
        gone = f"{self.seconds:.2f} s" if self.code is not None else f"> {PATIENCE:g} s"
        code = "-" if self.code is None else str(self.code if self.code >= 0 else 128 - self.code)
        return f"{code}, {gone}, {self.left} left"


def try_fault(peer: Peer, fault: Fault) -> Result:
    """Start a job, wait until its ranks are there, let the fault happen, and look at what is left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        argv = peer.argv("faults.py", folder, fault.program, fault.others)
        options = list(fault.options.get(peer.name, []))
        argv = (
            [argv[0], *argv[1:2], *options, *argv[2:]] if peer.name == "launchpad" else [argv[0], *options, *argv[1:]]
        )
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, env={**os.environ, MARK: mark}, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        _wait(lambda: len(list(Path(folder).glob("here*"))) == RANKS, 60)
        start = time.monotonic()
        Path(folder, "go").touch()
        if fault.strike:
            fault.strike(process)
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - start
        if code is None:
            process.kill()
            process.wait()
        time.sleep(1)
        left = [pid for pid in _marked(mark) if pid != process.pid]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _wait(lambda: not _marked(mark), 20)
    return Result(code, seconds, len(left))


def _marked(mark: str) -> list[int]:
    """Live processes that inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            marked = entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0")
            if marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def _wait(fact: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError("a job did not come up, or did not go")
        time.sleep(0.01)


def main() -> None:
    """Print the table."""
    peers = installed()
    print("| fault | " + " | ".join(peer.name for peer in peers) + " |")
    print("|---" * (len(peers) + 1) + "|")
    for fault in FAULTS:
        cells = [str(try_fault(peer, fault)) for peer in peers]
        print(f"| {fault.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
