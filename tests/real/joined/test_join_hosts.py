"""Launchpads typed on hosts of their own: where they meet, and what a lost host means."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, PROGRAMS, Launchpad, wait_until
from tests.support.joined import said_until
from tests.support.needs import needs_torch
from tests.support.netns import Network, needs_namespaces

pytestmark = needs_namespaces

HOSTS = ("h1", "h2", "h3")
SILENCE = 5.0  # --heartbeat-timeout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), len(HOSTS)) as network:
        yield network


@pytest.fixture
def network(whole: Network) -> Iterator[Network]:
    """The hosts, as they were at the beginning."""
    yield whole
    whole.restore()


class OnHosts(Launchpad):
    """The command, on the hosts."""

    def __init__(self, network: Network, folder: Path, scratch: Path) -> None:
        super().__init__(folder, scratch)
        self.network = network
        self.host = HOSTS[0]

    def argv(self, *args: object) -> list[str]:
        """As in Launchpad, but on the host of the moment."""
        pid = self.network.hosts[self.host].pid
        spaces = ("--net", "--pid", "--mount", "--uts", "--ipc")
        return ["nsenter", "-t", str(pid), *spaces, f"--wd={self.folder}", "--", *super().argv(*args)]

    def start_all(self, *args: object) -> dict[str, subprocess.Popen[bytes]]:
        """The same line on every host."""
        started = {}
        for self.host in HOSTS:
            started[self.host] = self.start(*args)
        return started


@pytest.fixture
def launchpad(network: Network, tmp_path: Path, scratch: Path) -> Iterator[OnHosts]:
    folder = tmp_path / "work"
    folder.mkdir()
    command = OnHosts(network, folder, scratch)
    yield command
    command.close()


def line(head: str, *more: object, nnodes: object = len(HOSTS)) -> tuple[object, ...]:
    return ("run", "--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", head, "--rdzv-id", "j", *more)


@needs_torch
def test_hosts_meet_at_an_address_that_all_reach(launchpad: OnHosts, network: Network) -> None:
    """The second one leads; its address is MASTER_ADDR."""
    example = Path(__file__).parents[3] / "examples" / "all_reduce.py"
    (launchpad.folder / "where.py").write_text(
        f"import os, runpy, torch\nprint('at', os.environ['MASTER_ADDR'], os.environ['GROUP_RANK'])\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    head = network.hosts["h2"].address
    jobs = launchpad.start_all(*line(head, "-n", 2, "where.py"))
    groups = set()
    for name, job in jobs.items():
        out, err = (text.decode() for text in job.communicate(timeout=2 * DEADLINE))
        assert job.returncode == 0, err
        assert out.count("of 6: the sum of all ranks is [15.0, 15.0, 15.0]") == 2
        (at,) = set(re.findall(r"at (\S+ \d)$", out, re.M))
        assert at.startswith(f"{head} ")
        groups.add((at[-1], name == "h2"))
    assert groups == {("0", True), ("1", False), ("2", False)}


@pytest.mark.parametrize("how", ["power_off", "partition"])
@pytest.mark.parametrize("lost", ["h1", "h2"], ids=["head", "node"])
def test_a_lost_host_ends_the_job_everywhere(launchpad: OnHosts, network: Network, lost: str, how: str) -> None:
    words = line(network.hosts["h1"].address, "--heartbeat-timeout", SILENCE, PROGRAMS / "exits.py", *["wait"] * 3)
    jobs = launchpad.start_all(*words)
    for job in jobs.values():
        assert job.stdout is not None
        assert b"waiting" in job.stdout.readline()
    getattr(network, how)(lost)
    for name, job in jobs.items():
        if name == lost and how == "power_off":
            job.communicate(timeout=DEADLINE)
            continue
        _, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 4, err
        if name != lost and lost == "h1":
            assert b"the head of the job at 10.77.0.1:29400 is gone; the ranks here were stopped" in err
        elif lost != "h1" and name != lost:
            assert b"h2 was lost: no heartbeat for 5 s" in err
    for name in HOSTS:
        wait_until(lambda name=name: not network.processes(name), f"{name} to be empty")  # type: ignore[misc]
    if how == "power_off":  # a host that lost its power removes nothing
        for folder in launchpad.scratch.glob("launchpad-*"):
            shutil.rmtree(folder)


STAYS = """\
import os, time
print("node", os.environ["GROUP_RANK"], flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"""


def node_of(job: subprocess.Popen[bytes]) -> str:
    """The number that a host's next attempt has."""
    assert job.stdout is not None
    return job.stdout.readline().decode().split()[-1]


def test_a_head_that_is_cut_off_joins_the_one_that_leads_after_it(launchpad: OnHosts, network: Network) -> None:
    (launchpad.folder / "stays.py").write_text(STAYS)
    conf = ("--rdzv-conf", f"last_call_timeout={DEADLINE}", "--heartbeat-timeout", 2, "stays.py")
    jobs = launchpad.start_all(*line(network.hosts["h1"].address, *conf, nnodes="1:3"))
    before = {name: node_of(job) for name, job in jobs.items()}
    assert before["h1"] == "0"
    network.partition("h1")
    others = sorted(HOSTS[1:], key=before.__getitem__)
    assert [node_of(jobs[name]) for name in others] == ["0", "1"]
    said_until(jobs["h1"], "more than half of the job's 3 nodes were lost, and may go on together")
    network.heal("h1")
    assert [node_of(jobs[name]) for name in others] == ["0", "1"]
    while node_of(jobs["h1"]) != "2":  # it may have begun again with one of the others, if it lost that one later
        pass
    (launchpad.folder / "go").touch()
    for job in jobs.values():
        _, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err


def test_it_is_told_at_the_start_who_cannot_lead(launchpad: OnHosts, network: Network) -> None:
    (launchpad.folder / "stays.py").write_text(STAYS)
    network.cut("h2", "h3")
    conf = ("--rdzv-conf", f"last_call_timeout={DEADLINE}", "stays.py")
    jobs = launchpad.start_all(*line(network.hosts["h1"].address, *conf, nnodes="1:3"))
    said = said_until(jobs["h1"], "if h1 is lost, h")
    assert re.search(
        r"if h1 is lost, h([23]) can't lead the job: h[23] doesn't reach it at 10\.77\.0\.\1:\d+ \(no answer;", said
    )
    (launchpad.folder / "go").touch()
    for job in jobs.values():
        _, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err


def test_the_job_goes_on_when_the_host_of_its_head_is_back(launchpad: OnHosts, network: Network) -> None:
    """It can't go on without that one."""
    (launchpad.folder / "stays.py").write_text(STAYS)
    conf = ("--rdzv-conf", "last_call_timeout=0.2", "--heartbeat-timeout", 2, "--max-restarts", 1, "stays.py")
    words = line(network.hosts["h1"].address, *conf, nnodes=3)
    jobs = launchpad.start_all(*words)
    numbers = {name: node_of(job) for name, job in jobs.items()}
    network.power_off("h1")
    jobs["h1"].communicate(timeout=DEADLINE)
    for name in HOSTS[1:]:
        said_until(jobs[name], "is gone; the ranks here were stopped; waiting for")
    network.power_on("h1")
    launchpad.host = "h1"
    jobs["h1"] = launchpad.start(*words)
    assert {name: node_of(job) for name, job in jobs.items()} == numbers
    (launchpad.folder / "go").touch()
    for job in jobs.values():
        _, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err
    for folder in launchpad.scratch.glob("launchpad-*"):
        shutil.rmtree(folder)


def test_roles_run_where_their_hosts_say_and_find_each_other(launchpad: OnHosts, network: Network) -> None:
    """The service is on the third one; each of the others has two ranks of its clients, which are in two worlds."""
    folder = launchpad.folder
    (folder / "serve.py").write_text(
        "import os, socket\nport = int(os.environ['LAUNCHPAD_PORT_P'])\n"
        "listener = socket.create_server(('', port), reuse_port=True)\n"
        "while True:\n    taken, peer = listener.accept()\n    taken.sendall(peer[0].encode())\n    taken.close()\n"
    )
    (folder / "ask.py").write_text(
        "import os, socket\nhost, _, port = os.environ['LAUNCHPAD_SERVE_P'].rpartition(':')\n"
        "said = socket.create_connection((host, int(port))).makefile().read()\n"
        "print(socket.gethostname(), 'is', said, 'for', host)\n"
    )
    (folder / "job.toml").write_text(
        '[jobs.j.roles.serve]\ntarget = "serve.py"\nhosts = "h3"\nservice = true\nports = ["p"]\nready = "tcp:p"\n'
        '[jobs.j.roles.ask]\ntarget = "ask.py"\nreplicas = 2\nnproc = 2\nhosts = ["h1:2", "h2:2"]\nafter = "serve"\n'
    )
    jobs = launchpad.start_all(*line(network.hosts["h1"].address, "--config", "job.toml", "--job", "j"))
    outs = {}
    for name, job in jobs.items():
        outs[name], err = (text.decode() for text in job.communicate(timeout=2 * DEADLINE))
        assert job.returncode == 0, err
    h1, h2, h3 = (network.hosts[name].address for name in HOSTS)
    assert sorted(re.sub(r"^\S+ +\d\] ", "", text) for text in outs.pop("h1").splitlines()) == [
        *[f"h1 is {h1} for {h3}"] * 2,
        *[f"h2 is {h2} for {h3}"] * 2,
    ]
    assert set(outs.values()) == {""}
