"""`launchpad doctor` on hosts of their own (netns.py) with faults put in by hand: each is named with its host.

What a test can't give a host (cgroups, GPUs, memory, a kernel's log) is in tests/real/one_node/test_doctor.py.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.needs import needs_torch
from tests.support.netns import HEAD, Network, needs_namespaces
from tests.support.sshd import SSHD

pytestmark = needs_namespaces

HOSTS = 8
HAS_MPI = importlib.util.find_spec("mpi4py") is not None

# All hosts share this machine: where it is busy, they may not answer in time, and what is measured may look bad.
TRIES = 5
MEASURED = {"probes", "loss", "latency", "speed", "packets", "all_reduce"}

# What the machine that runs the tests may have of its own.
ITS_OWN = {"load", "memory"}

# Answers with a clock of its own: an hour ahead.
AHEAD = """#!{python} -IS
import sys, time
now = time.time
time.time = lambda: now() + 3600
at = sys.argv.index("-c")
code, sys.argv = sys.argv[at + 1], ["-c", *sys.argv[at + 2 :]]
exec(code)
"""

# What happens to some packets on their way out: ssh's take the first class.
CLASSES = """
qdisc add dev {device} root handle 1: htb default 1
class add dev {device} parent 1: classid 1:1 htb rate 10gbit quantum 60000
class add dev {device} parent 1: classid 1:2 htb rate {rate} quantum 1500
qdisc add dev {device} parent 1:2 {queue}
filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dport 22 0xffff flowid 1:1
filter add dev {device} parent 1: protocol ip prio 2 u32 match ip protocol {match} flowid 1:2
"""
UDP, BEGINNING = "17 0xff", "6 0xff match u8 0x02 0x12 at 33"  # SYN without ACK


class Found(NamedTuple):
    """A finding, without its remedy, which all of them have."""

    hosts: tuple[str, ...]
    level: str
    subject: str


class Doctor(Launchpad):
    """The command, in the hosts' network, with an interpreter that has a path of its own there."""

    def __init__(self, network: Network, folder: Path, scratch: Path, python: Path) -> None:
        super().__init__(folder, scratch)
        self.network = network
        self.python = python

    def argv(self, *args: object) -> list[str]:
        command, *rest = args
        return self.network.argv(*super().argv(command, "--ssh-config", self.network.ssh_config, *rest))

    def caches(self) -> list[str]:
        """The hosts on which there is an agent."""
        return [host.name for host in self.network.hosts.values() if (host.folder / "cache").exists()]

    def findings(
        self, names: str, *words: object, measured: int = 0, of: Collection[str] = MEASURED
    ) -> dict[Found, str]:
        """What is said about hosts, apart from what this machine has of its own.

        `measured`: how many of the faults are seen in what is measured; `of`: what of that matters.
        """
        before = self.caches()
        for _ in range(TRIES):
            done = self.run("doctor", "--json", "-H", names, "--python", self.python, *words)
            assert done.returncode in (0, 3), done.stderr
            assert self.caches() == before
            result = json.loads(done.stdout)
            found = result["findings"]
            if sum(one["subject"] in of or "no answer within" in one["text"] for one in found) <= measured:
                break
        assert (done.returncode == 3) == any(one["level"] == "bad" for one in found)
        kept = [one for one in found if one["subject"] not in ITS_OWN]
        assert [one for one in kept if not one["remedy"] and one["subject"] != "reach"] == []
        return {Found(tuple(one["hosts"]), one["level"], one["subject"]): one["text"] for one in kept}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("hosts"), HOSTS) as network:
        names = "".join(f"{host.address} {host.name}\n" for host in network.hosts.values())
        write_over(network, "/etc/hosts", f"127.0.0.1 localhost\n{names}", *network.hosts)
        yield network


@pytest.fixture
def doctor(network: Network, tmp_path: Path, scratch: Path) -> Iterator[Doctor]:
    (tmp_path / "work").mkdir()
    for python in (network.folder / "python", tmp_path / "python"):
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    command = Doctor(network, tmp_path / "work", scratch, python)
    yield command
    network.restore()
    command.close()


def write_over(network: Network, path: object, text: str, *names: str, mode: int = 0o644) -> None:
    """Give hosts another file at this path."""
    for name in names:
        folder = network.hosts[name].folder
        file = folder / f"over-{len(list(folder.iterdir()))}"
        file.write_text(text)
        file.chmod(mode)
        network.exec(name, "mount", "--bind", file, path)


def tc(enter: list[str], lines: str) -> None:
    """Run tc there. It warns about rates that are far from those that it expects."""
    done = subprocess.run([*enter, "tc", "-batch", "-"], input=lines.strip() + "\n", text=True, timeout=DEADLINE)
    assert done.returncode == 0


def set_mtu(network: Network, name: str, mtu: int) -> None:
    network._ip(network.hosts[name].pid, f"link set dev eth0 mtu {mtu}")


def restart_sshd(network: Network, name: str, *limits: str, settings: str = "") -> None:
    host = network.hosts[name]
    network.kill_sshd(name)
    config = host.folder / "sshd_config_2"
    config.write_text(settings + host.config.read_text())
    host.log.write_bytes(b"")
    network.exec(name, *limits, SSHD, "-f", config, "-E", host.log)
    network._await_sshd(host)


@needs_torch
def test_healthy_hosts(doctor: Doctor) -> None:
    (doctor.folder / "train.py").touch()
    done = doctor.run("doctor", "--json", "-H", "h1,h2,h3", "--python", doctor.python)
    result = json.loads(done.stdout)
    assert [one for one in result["findings"] if one["subject"] not in ITS_OWN] == []
    assert (done.returncode, done.stderr) == (0, "")
    assert result["all_reduce"]["seconds"].keys() == ({"gloo", "mpi"} if HAS_MPI else {"gloo"})
    assert len(result["paths"]) == 6
    assert all(path["interface"] == "eth0" and path["rate"] > 0 for path in result["paths"])


def test_hosts_that_meet_over_their_second_interface_by_ipv6(doctor: Doctor) -> None:
    """Only ssh uses the first one."""
    network = doctor.network
    network.open_data_network()
    for name in ("h1", "h2", "h3"):
        network.isolate(name)
    done = doctor.run("doctor", "--json", "-H", "h1,h2,h3", "--python", sys._base_executable)
    result = json.loads(done.stdout)
    assert [one for one in result["findings"] if one["subject"] not in ITS_OWN] == []
    assert {(path["address"], path["interface"]) for path in result["paths"]} == {
        (network.hosts[name].data_address, "eth1") for name in ("h1", "h2", "h3")
    }


def test_faults_of_the_network(doctor: Doctor) -> None:
    network = doctor.network
    lab = network.argv()
    tc(network._in_network_of("h2"), CLASSES.format(device="eth0", rate="500kbit", queue="pfifo limit 3", match=UDP))
    tc(lab, CLASSES.format(device="ssh3", rate="1mbit", queue="blackhole", match=BEGINNING))
    network._ip(network._lab_pid, "link set dev ssh4 mtu 1400")
    tc(network._in_network_of("h6"), "qdisc add dev eth0 root tbf rate 40mbit burst 32k latency 200ms")
    network.cut("h7", "h8")
    try:
        found = doctor.findings(",".join(network.hosts), "--python", sys._base_executable, measured=3)
    finally:
        tc(lab, "qdisc del dev ssh3 root")
        network._ip(network._lab_pid, "link set dev ssh4 mtu 1500")
    assert found.keys() == {
        Found(("h2",), "bad", "loss"),
        Found(("h3",), "bad", "paths"),
        Found(("h4",), "bad", "packets"),
        Found(("h6",), "warn", "speed"),
        Found(("h7", "h8"), "bad", "paths"),
    }
    assert "that it sends" in found[Found(("h2",), "bad", "loss")]
    assert "can't reach it, though it reaches them: no answer" in found[Found(("h3",), "bad", "paths")]


def test_a_router_that_says_how_much_the_path_takes_is_no_fault(doctor: Doctor) -> None:
    network = doctor.network
    ends = {"h1": network.hosts["h2"].address, "h2": network.hosts["h1"].address}
    settings = "cd /proc/sys/net/ipv4; echo 1 > ip_forward; echo 0 > conf/all/send_redirects; "
    settings += "echo 0 > conf/ssh/send_redirects"
    subprocess.run(network.argv("sh", "-c", settings), check=True, timeout=DEADLINE)
    network._ip(network._lab_pid, *(f"route add {address} dev ssh mtu lock 1400" for address in ends.values()))
    for name, address in ends.items():
        network._ip(network.hosts[name].pid, f"route add {address} via {HEAD}")
    try:
        found = doctor.findings("h1,h2", "--python", sys._base_executable)
        learnt = network.exec("h1", "ip", "route", "get", ends["h1"])
    finally:
        network._ip(network._lab_pid, *(f"route del {address}" for address in ends.values()))
        for name, address in ends.items():
            network._ip(network.hosts[name].pid, f"route del {address}")
    assert "mtu 1400" in learnt
    assert found == {}


@needs_torch
def test_faults_of_hosts(doctor: Doctor) -> None:
    network = doctor.network
    (doctor.folder / "train.py").write_text("print(1)")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    version = Path(spec.origin).parent / "version.py"
    names = [f"{host.address} {host.name}\n" for host in network.hosts.values()]
    tmps = {host.name: host.scratch for host in network.hosts.values()}
    mounted = []

    def over(path: object, text: str, name: str, mode: int = 0o644) -> None:
        write_over(network, path, text, name, mode=mode)
        mounted.append((name, path))

    def tmpfs(path: object, options: str, name: str) -> None:
        network.exec(name, "mount", "-t", "tmpfs", "-o", options, "tmpfs", path)
        mounted.append((name, path))

    others = "".join(names)
    over("/etc/hosts", others.replace("10.77.0.2 ", "127.0.1.1 "), "h2")
    without = f'#!/bin/sh\nexport MPI4PY_LIBMPI=/nonexistent\nexec {sys.executable} "$@"\n'
    over(doctor.python, without, "h2", 0o755)
    network.exec("h2", "mount", "-o", "remount,size=16m", "/dev/shm")
    over("/etc/hosts", others.replace("10.77.0.3 ", "10.77.0.99 ").replace("10.77.0.1 ", "10.77.0.98 "), "h3")
    tmpfs(tmps["h3"], "size=1m", "h3")
    network.exec("h3", "sh", "-c", f"head -c 2m /dev/zero > {tmps['h3']}/full || true")
    over("/etc/hosts", others.replace("10.77.0.4 h4\n", ""), "h4")
    tmpfs(tmps["h4"], "noexec", "h4")
    over(version, version.read_text().replace("__version__ = '2", "__version__ = '1"), "h5")
    restart_sshd(network, "h5", "prlimit", "--nofile=200:200")
    over(doctor.python, AHEAD.format(python=sys.executable), "h6", 0o755)
    restart_sshd(network, "h6", settings="MaxStartups 3:50:9\n")
    over(doctor.folder / "train.py", "print(2)", "h7")
    tmpfs(tmps["h7"], "nr_inodes=5", "h7")
    tmpfs(doctor.folder.parent, "size=1m", "h8")  # the working folder is not there
    network.exec("h8", "cp", network.folder / "python", doctor.python)
    tmpfs(tmps["h8"], "ro", "h8")
    set_mtu(network, "h8", 1400)
    try:
        # Eight hosts share the cores of this machine: how fast they are says nothing.
        found = doctor.findings(",".join(network.hosts), measured=1, of={"packets"})
    finally:
        set_mtu(network, "h8", 1500)
        for name, path in reversed(mounted):
            network.exec(name, "umount", path)
        network.exec("h2", "mount", "-o", "remount,size=50%", "/dev/shm")
    assert {one for one in found if one.subject not in MEASURED - {"packets"}} == {
        Found(("h2",), "warn", "names"),
        Found(("h2",), "bad", "shm"),
        *([Found(("h2",), "warn", "mpi")] if HAS_MPI else []),
        Found(("h3",), "warn", "names"),
        Found(("h3",), "bad", "tmp"),
        Found(("h4",), "warn", "names"),
        Found(("h4",), "warn", "tmp"),
        Found(("h5",), "bad", "software"),
        Found(("h5",), "bad", "limits"),
        Found(("h6",), "warn", "clock"),
        Found(("h6",), "warn", "sshd"),
        Found(("h7",), "warn", "code"),
        Found(("h7",), "bad", "tmp"),
        Found(("h8",), "warn", "code"),
        Found(("h8",), "bad", "tmp"),
        Found(("h8",), "warn", "packets"),
    }


def test_hosts_that_can_not_be_checked_are_rows_and_no_job_is_started(doctor: Doctor) -> None:
    """h2 has no Python, h3 is cut off, h4 has no sshd, and h5 is another name of h1."""
    network = doctor.network
    (doctor.folder / "p.py").write_text("print('started')")
    write_over(network, doctor.python, "", "h2")
    network.partition("h3")
    network.kill_sshd("h4")
    config = doctor.folder.parent / "ssh_config"
    config.write_text(f"Host h5\n  HostName {network.hosts['h1'].address}\n{network.ssh_config.read_text()}")
    doctor.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    try:
        done = doctor.run(
            *("run", "--check", "-H", "h1,h2,h3,h4,h5", "--ssh-config", config, "--python", doctor.python, "p.py"),
        )
    finally:
        network.exec("h2", "umount", doctor.python)
    assert (done.returncode, done.stdout) == (3, "")
    found = [line.strip() for line in done.stderr.splitlines()]
    assert found[0] == "launchpad: error: no job can run on h1, h2, h3 and 2 more, so nothing was started:"
    beginnings = (
        "h2: no Python: ",
        "h3: ",  # unreachable, or timed out, whichever the kernel finds sooner
        "h4: refused: ",
        "h5: it is the same machine as h1",
        "h1: GLOO_SOCKET_IFNAME=eth7 is set, and it has no eth7",
        "h5: GLOO_SOCKET_IFNAME=eth7 is set",
    )
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in found), (beginning, found)
    assert len([line for line in found if not any(f": {word}" in line for word in ITS_OWN)]) <= len(beginnings) + 1


def test_a_job_starts_where_nothing_is_bad(doctor: Doctor) -> None:
    network = doctor.network
    (doctor.folder / "p.py").write_text("import os; print('started', os.environ['RANK'])")
    network.exec("h2", "mount", "-o", "remount,size=100m", "/dev/shm")
    done = doctor.run("run", "--check", "-H", "h1,h2", "--python", doctor.python, "p.py")
    network.exec("h2", "mount", "-o", "remount,size=50%", "/dev/shm")
    assert done.returncode == 0, done.stderr
    assert sorted(line[-9:] for line in done.stdout.splitlines()) == ["started 0", "started 1"]
    assert "launchpad: h2: /dev/shm has 105 MB in all" in done.stderr
