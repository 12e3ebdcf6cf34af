"""`--gpus` over several hosts: each leases its own, as its nvidia-smi names them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Launchpad
from tests.support.gpus import FakeGpus
from tests.support.hosts import Hosts
from tests.support.joined import ends, started
from tests.support.sshd import needs_sshd

SHOWS = """\
import os, time
open(f"{os.environ['RANK']}-{time.time_ns()}", "w").close()
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["WORLD_SIZE"], flush=True)
while os.path.exists("stay") and not os.path.exists("go"): time.sleep(0.01)
"""


class GpuHosts(Hosts):
    """n1, n2, n3, with four GPUs each."""

    def __init__(self, launchpad: Launchpad, folder: Path) -> None:
        super().__init__(launchpad, folder)
        self.gpus = []
        for number, host in enumerate(self.hosts, 1):
            place = launchpad.folder / f"smi{number}"
            place.mkdir()
            host.environ["PATH"] = f"{place}:{launchpad.environ['PATH']}"
            self.gpus.append(FakeGpus(place, 4))


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[GpuHosts]:
    (launchpad.folder / "shows.py").write_text(SHOWS)
    cluster = GpuHosts(launchpad, tmp_path / "ssh")
    with contextlib.ExitStack() as closing:
        for gpus in cluster.gpus:
            closing.enter_context(contextlib.closing(gpus))
        with cluster:
            yield cluster


def lines(host: str, first: int, uuids: list[str], size: int) -> list[str]:
    return [f"[{host} {first + number}] {','.join(uuids)} {size}" for number in range(len(uuids))]


@needs_sshd
def test_each_host_leases_its_own(launchpad: Launchpad, hosts: GpuHosts) -> None:
    one, two, _ = hosts.gpus
    one.change(0, processes=[["C", os.getpid()]])
    two.change(3, errors=1)
    done = hosts.run(launchpad, "-H", "n1,n2", "--gpus", "free", "shows.py")
    assert (done.returncode, done.stderr) == (0, "")
    expected = [*lines("n1", 0, one.uuids[1:], 6), *lines("n2", 3, two.uuids[:3], 6)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@needs_sshd
def test_hosts_with_too_few_are_named_and_nothing_stays_leased(launchpad: Launchpad, hosts: GpuHosts) -> None:
    one, two, three = hosts.gpus
    for gpus in (two, three):
        gpus.change(0, errors=2)
    done = hosts.run(launchpad, "-H", "n1,n2,n3", "--gpus", "free:4", "shows.py")
    assert done.returncode == 3
    why = "--gpus free:4: 3 of its 4 GPUs are free and 4 are wanted: GPU 0 has had memory errors"
    assert done.stderr.splitlines() == [
        "launchpad: error: 2 of 3 hosts can't take part, so nothing was started:",
        f"  n2  {why}",
        f"  n3  {why}",
        "launchpad: who has what: launchpad gpus -H HOST,…",
    ]
    done = hosts.run(launchpad, "-H", "n1", "--gpus", "free:4", "shows.py")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {','.join(one.uuids)} 4" for rank in range(4)]


@needs_sshd
def test_two_jobs_share_the_hosts_and_gpus_shows_both(launchpad: Launchpad, hosts: GpuHosts) -> None:
    (launchpad.folder / "stay").touch()
    first = hosts.begin(launchpad, "-H", "n1,n2", "--gpus", "free:2", "shows.py")
    started(launchpad, 4)
    second = hosts.begin(launchpad, "-H", "n2,n3", "--gpus", "2", "shows.py")
    started(launchpad, 8)
    shown = launchpad.run("gpus", "--ssh-config", hosts.ssh_config, "-H", "n1,n2,n3")
    assert shown.returncode == 0, shown.stderr
    assert [shown.stdout.count(f"n{number} ") for number in (1, 2, 3)] == [4, 4, 4]
    third = hosts.run(launchpad, "-H", "n1,n2,n3", "--gpus", "free:2", "shows.py")
    assert third.returncode == 3
    assert "launchpad: error: n2: --gpus free:2: 0 of its 4 GPUs are free and 2 are wanted: " in third.stderr
    (launchpad.folder / "go").touch()
    seen = []
    for job in (first, second):
        code, out, err = ends(job)
        assert code == 0, err
        seen += out.splitlines()
    one, two, three = hosts.gpus
    assert sorted(seen) == sorted(
        [
            *lines("n1", 0, one.uuids[:2], 4),
            *lines("n2", 2, two.uuids[:2], 4),
            *lines("n2", 0, two.uuids[2:], 4),
            *lines("n3", 2, three.uuids[:2], 4),
        ]
    )


@needs_sshd
def test_a_spare_has_gpus_of_its_own(launchpad: Launchpad, hosts: GpuHosts) -> None:
    (launchpad.folder / "stay").touch()
    job = hosts.begin(launchpad, "-H", "n1,n2,n3", "--spares", 1, "--gpus", "1,3", "shows.py")
    started(launchpad, 4)
    hosts.cut_power(2)
    started(launchpad, 8)
    (launchpad.folder / "go").touch()
    code, out, err = ends(job)
    assert code == 0, err
    three = hosts.gpus[2].uuids
    assert set(lines("n3", 2, [three[1], three[3]], 4)) <= set(out.splitlines())
