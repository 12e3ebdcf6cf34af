"""Jobs on hosts that are real SSH servers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import MARK, Launchpad
from tests.support.sshd import Cluster, store_agent

SHOW = "import os\nprint(*(os.environ.get(name, '-') for name in os.sys.argv[1:]))\n"


class Hosts(Cluster):
    """n1, n2, n3, whose sessions belong to the test: its mark, a cache of their own, a temporary folder each.

    The agent is in the cache, as after an earlier job.
    """

    def __init__(self, launchpad: Launchpad, folder: Path, settings: str = "") -> None:
        self.cache = folder / "cache"
        super().__init__(folder, 3, settings, environ={MARK: launchpad.mark, "XDG_CACHE_HOME": str(self.cache)})
        store_agent(self.cache)
        self.way: tuple[str, ...] = ()  # options
        self.scratch = {host: host.folder / "tmp" for host in self.hosts}
        for host, scratch in self.scratch.items():
            scratch.mkdir()
            host.environ["TMPDIR"] = str(scratch)

    def run(self, launchpad: Launchpad, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return launchpad.run("run", "--ssh-config", self.ssh_config, *self.way, *args, **options)

    def begin(self, launchpad: Launchpad, *args: object, **options: object) -> subprocess.Popen[bytes]:
        return launchpad.start("run", "--ssh-config", self.ssh_config, *self.way, *args, **options)

    def forget_agent(self) -> None:
        """Have it sent again."""
        shutil.rmtree(self.cache)

    def cut_power(self, number: int) -> None:
        """Kill n1, n2 or n3 with all that runs there: nobody is left who could remove its temporary files."""
        host = self.hosts[number - 1]
        host.stop()
        del self.scratch[host]

    def stop(self) -> None:
        """Fail if an agent has left something behind."""
        super().stop()
        left = [path.name for scratch in self.scratch.values() for path in scratch.iterdir()]
        assert not left, f"temporary files are left: {left}"


@pytest.fixture
def hosts(request: pytest.FixtureRequest, launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts, which are reached the way that the test is run for, or else as launchpad chooses."""
    (launchpad.folder / "show.py").write_text(SHOW)
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        if hasattr(request, "param"):
            cluster.way = ("--ssh", request.param)
        yield cluster


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())
