"""Jobs on hosts that are network namespaces, which are cut off, stopped and killed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchpad.job.outcome import ranks_in_words
from tests.support.command import PROGRAMS, Launchpad, wait_until
from tests.support.netns import Network, Process

HOSTS = 3
RANKS = 2  # on each host
SILENCE = 2.0  # --heartbeat-timeout
GRACE = 1.0

# From a fault to the head's exit: ten times what it takes to notice the fault and to kill deaf ranks.
LATEST = 40.0


class Head(Launchpad):
    """The command, on a machine in the hosts' network."""

    def __init__(self, network: Network, folder: Path, scratch: Path) -> None:
        super().__init__(folder, scratch)
        self.network = network

    def argv(self, *args: object) -> list[str]:
        """As in Launchpad, but in the hosts' network, and with the options that all of these jobs need."""
        command, *rest = args
        settings = ("--ssh-config", self.network.ssh_config, "--heartbeat-timeout", SILENCE, "--grace", GRACE)
        return self.network.argv(*super().argv(command, *settings, *rest))


class Job:
    """`launchpad run` on some of the hosts, with RANKS ranks on each."""

    def __init__(self, head: Head, names: list[str], *words: object, **options: object) -> None:
        self.head = head
        self.names = names
        self.network = head.network
        hosts = ",".join(f"{name}:{RANKS}" for name in names)
        self.process = head.start("run", "--hosts", hosts, *words, **options)
        self.began = 0.0

    def wait_for_ranks(self) -> None:
        """Read until every rank has reported that it and its children are up."""
        up: set[bytes] = set()
        while len(up) < RANKS * len(self.names):
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1].decode()
            up |= set(re.findall(rb" up (\d+)$", line.rstrip()))

    def guard(self, name: str) -> Process:
        """The guard of a host."""
        return self._guard_and_agent(name)[0]

    def agent(self, name: str) -> Process:
        """The agent of a host."""
        return self._guard_and_agent(name)[1]

    def _guard_and_agent(self, name: str) -> tuple[Process, Process]:
        one, other = (one for one in self.network.processes(name) if one.words.endswith(" launchpad-agent"))
        return (one, other) if other.parent == one.pid else (other, one)

    def rank(self, number: int) -> Process:
        """The process of a rank: the agent's child that leads its session."""
        name = self.names[number // RANKS]
        agent = self.agent(name)
        (found,) = [
            one
            for one in self.network.processes(name)
            if one.parent == agent.pid and one.leads and f"RANK={number}" in one.environ
        ]
        return found

    def ranks_on(self, name: str) -> list[Process]:
        """The ranks on a host, and their children."""
        return [one for one in self.network.processes(name) if "family.py" in one.words]

    def ranks_of(self, name: str) -> str:
        """The ranks on a host, as the summary prints them."""
        first = self.names.index(name) * RANKS
        return ranks_in_words([first, first + 1])

    def ranks_but(self, lost: str) -> str:
        """All ranks except those on one host, as the summary prints them."""
        return ranks_in_words([rank for rank in range(RANKS * len(self.names)) if self.names[rank // RANKS] != lost])

    def send(self, signum: int) -> None:
        """Signal the head."""
        self.process.send_signal(signum)

    def leave(self, rank: int, code: int) -> None:
        """Have a rank exit with this code."""
        new = self.head.folder / "new"
        new.write_text(str(code))
        new.rename(self.head.folder / f"leave-{rank}")

    def end(self) -> tuple[int, str]:
        """The head's exit code and its stderr."""
        _, err = self.process.communicate(timeout=LATEST)
        return self.process.returncode, err.decode()

    def wait_for_clean_hosts(self) -> None:
        """Wait until nothing of the job is left on any host."""
        for name in self.network.hosts:
            wait_until(
                lambda name=name: not self.network.processes(name),
                f"nothing to be left on {name}",
                show=lambda name=name: self.network.processes(name),
            )


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The hosts, which `head` restores after each test."""
    with Network(tmp_path_factory.mktemp("network"), HOSTS) as network:
        yield network


@pytest.fixture
def head(network: Network, tmp_path: Path, scratch: Path) -> Iterator[Head]:
    """The command; checks after the test that nothing of it is left, here or on the hosts."""
    folder = tmp_path / "work"
    folder.mkdir()
    head = Head(network, folder, scratch)
    try:
        yield head
        head.close()
        for name, host in network.hosts.items():
            wait_until(
                lambda name=name: not network.processes(name), name, show=lambda name=name: network.processes(name)
            )
            if host.init is not None:
                assert network.exec(name, "ls", "/dev/shm") == ""
                assert os.listdir(host.scratch) == []
    finally:
        network.restore()
        for host in network.hosts.values():  # a power cut leaves files
            shutil.rmtree(host.scratch)
            host.scratch.mkdir()


@pytest.fixture
def start(head: Head) -> Callable[..., Job]:
    """Start a job on the first `hosts` hosts."""
    return lambda hosts, *words, **options: Job(head, [f"h{n}" for n in range(1, hosts + 1)], *words, **options)


Start = Callable[..., Job]
FAMILY = PROGRAMS / "family.py"

REDUCES = PROGRAMS / "reduces.py"
