"""Nodes that join by command lines of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.offer import NodeOffer
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec, Target
from launchpad.job.world import Meeting
from launchpad.runner.joining import Joining
from launchpad.transport.join.client import HeadConnection
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.ports import free_port

Job = subprocess.Popen[bytes]


def static(rank: int, port: int, nodes: int = 2, **more: str) -> list[str]:
    """The options of one node of several that all have their rank."""
    given = {"nnodes": str(nodes), "node_rank": str(rank), "master-addr": "127.0.0.1", "master_port": str(port), **more}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def c10d(port: int, nodes: int = 2, **more: str) -> list[str]:
    """The options that are the same on each node."""
    given = {"nnodes": str(nodes), "rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "j", **more}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def started(launchpad: Launchpad, count: int) -> None:
    """Wait until so many ranks have started, over all attempts."""
    wait_until(lambda: len(list(launchpad.folder.glob("[0-9]*-*"))) >= count, f"{count} starts of ranks")


def said_until(job: Job, words: str) -> str:
    """What the launcher says, up to the line with these words."""
    assert job.stderr is not None
    said = ""
    while words not in said:
        line = job.stderr.readline().decode()
        assert line, said
        said += line
    return said


def ends(job: Job) -> tuple[int, str, str]:
    """A launchpad's exit code and output, without what it says when others are slow to start."""
    out, err = job.communicate(timeout=DEADLINE)
    reminder = r"^launchpad: (waiting for the head of the job at|\d+ of \S+ nodes have joined \().*\n"
    return job.returncode, out.decode(), re.sub(reminder, "", err.decode(), flags=re.M)


def at_work(pid: int) -> int:
    """The process that runs this command: itself, or a kept head of which it has a pidfd."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is closed, or has ended
            known = re.search(r"^Pid:\t(\d+)$", path.read_text(), re.MULTILINE)
            if known and Path(f"/proc/{known[1]}/cmdline").read_bytes() == command:
                return int(known[1])
    return pid


def leads(job: Job, port: int) -> bool:
    """Whether this launchpad leads the job: it listens where the others look for it."""
    inodes = set()
    for path in Path(f"/proc/{at_work(job.pid)}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            inodes.add(os.readlink(path))
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in list(table)[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    return bool(inodes & listening)


SPEC = JobSpec(Target("program", "true"), limits=Limits(max_restarts=RestartLimit(3, 3600.0), progress=("ckpt/*",)))
OFFER = NodeOffer("b", "python3", "2", spec=SPEC)


def _member(offer: NodeOffer) -> Member:
    return Member(offer.name, 1, "")


class Door:
    """A head that waits, in this process."""

    def __init__(self, nodes: int = 2, *, static: bool = False) -> None:
        self.port = free_port()
        self.said: list[str] = []
        meeting = Meeting("127.0.0.1", self.port, nodes, static=static)
        self.joining = Joining(meeting, SPEC, b"s", self.said.append, _member)
        self.address = ("127.0.0.1", self.port)

    def join(self, offer: NodeOffer = OFFER, secret: bytes = b"s") -> HeadConnection:
        return HeadConnection(self.address, secret, offer.as_json())
