"""A job on hosts whose ranks print numbered lines: whether one is missing, there twice, or cut, can be seen."""

from __future__ import annotations

import os
import subprocess
from itertools import count

from tests.support.command import DEADLINE, Launchpad
from tests.support.joined import said_until
from tests.support.node_faults import Head, Job, Start

# Counts until the test says so, in lines that are whole or not there; a rank fails then if the test wants it.
COUNTS = """\
import os, sys, time
number, rank = 0, os.environ["RANK"]
while not os.path.exists(f"go-{rank}") and not os.path.exists("go"):
    os.write(1, f"line {number} {os.getpid()}\\n".encode())
    number += 1
    time.sleep(0.005)
os.write(1, f"line {number} {os.getpid()}\\n".encode())
if os.path.exists(f"go-{rank}"):
    os.remove(f"go-{rank}")  # the next attempt goes on
    sys.exit(7)
"""


class Counting:
    """A job of four ranks on two hosts, whose lines are numbered."""

    def __init__(self, head: Head, start: Start, *options: object) -> None:
        (head.folder / "counts.py").write_text(COUNTS)
        self.head = head
        self.job: Job = start(2, *options, "counts.py", bufsize=0)  # so that communicate misses nothing
        self.out = b""
        self.err = ""
        self.says("line 5 ")

    def says(self, text: str) -> None:
        """Wait until each rank has printed this."""
        assert self.job.process.stdout is not None
        while not all(f" {rank}] {text}".encode() in self.out for rank in range(4)):
            line = self.job.process.stdout.readline()
            assert line, self.job.process.communicate()[1].decode()
            self.out += line

    def told(self, text: str) -> None:
        """Wait until launchpad has said this."""
        self.err += said_until(self.job.process, text)

    def ranks(self, name: str) -> dict[int, int]:
        """The ranks on a host, with their pids as we see them."""
        found = [one for one in self.job.network.processes(name) if "counts.py" in one.words]
        return {int(word[5:]): one.pid for one in found for word in one.environ if word.startswith("RANK=")}

    def go(self, rank: int | None = None) -> None:
        """Let all end, or have one rank fail, once."""
        (self.head.folder / ("go" if rank is None else f"go-{rank}")).touch()

    def end(self) -> int:
        """The exit code. Each rank has counted in one process, and no line is missing, twice or cut."""
        out, err = self.job.process.communicate(timeout=DEADLINE)
        self.out += out
        self.err += err.decode()
        assert self.job.process.returncode is not None
        check(self.out, self.err)
        return self.job.process.returncode


def check(out: bytes, err: str = "") -> dict[str, int]:
    """Each of four ranks has counted in one process, and no line is missing, twice or cut. Returns their numbers."""
    lines: dict[str, list[list[str]]] = {}
    for line in out.decode().splitlines():
        prefix, _, text = line.partition("] ")
        lines.setdefault(prefix.split()[-1].strip("["), []).append(text.split())
    assert sorted(lines) == ["0", "1", "2", "3"], err
    for rank, said in lines.items():
        assert [words[:2] for words in said] == [["line", str(number)] for number, _ in zip(count(), said)], rank
        assert len({words[2] for words in said}) == 1, rank
    return {rank: len(said) for rank, said in lines.items()}


def asks(head: Head, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command that is not about hosts."""
    argv = head.network.argv(*Launchpad.argv(head, *words))
    return subprocess.run(
        argv, env=head.environ, cwd=head.folder, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def jobs_folder(head: Head) -> str:
    """Where the jobs' records are."""
    return os.path.join(head.environ["XDG_STATE_HOME"], "launchpad", "jobs")
