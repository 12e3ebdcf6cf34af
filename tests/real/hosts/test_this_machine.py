"""Which hosts are this machine: real runs in a network of its own, where no sshd listens at any address."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.netns import needs_namespaces

pytestmark = needs_namespaces

ADDRESSES = ("10.99.0.1/24", "fd99::1/64")

HOSTS_FILE = """127.0.0.1 localhost
127.0.1.1 node1.cluster.local node1
10.99.0.1 node1.data.local alias
127.0.0.2 node1.two.local
10.99.0.9 node1.elsewhere.local
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(launchpad: Launchpad) -> Run:
    """`launchpad run ARGS` on a machine called node1, whose addresses are ADDRESSES."""
    (launchpad.folder / "hosts").write_text(HOSTS_FILE)
    (launchpad.folder / "config").write_text("Host *\n ConnectTimeout 1\n")
    commands = [
        "set -e",
        "echo node1 > /proc/sys/kernel/hostname",
        "mount --bind hosts /etc/hosts",
        "ip link set lo up",
        "ip link add own type veth peer name other",
        *(f"ip addr add {address} dev own {'nodad' if ':' in address else ''}" for address in ADDRESSES),
        "ip link set other up",
        "ip link set own up",
    ]

    def start(hosts: str, config: str = "", name: str = "node1") -> subprocess.CompletedProcess[str]:
        if config:
            (launchpad.folder / "config").write_text(config)
        command = launchpad.argv("run", "--ssh-config", "config", "-H", hosts, "sh", "-c", "echo up")
        script = "\n".join([*commands, f"echo {name} > /proc/sys/kernel/hostname", f"exec {shlex.join(command)}"])
        return subprocess.run(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
            cwd=launchpad.folder,
            env={**launchpad.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    return start


@pytest.mark.parametrize(
    "host",
    ["10.99.0.1", "[fd99::1]", "[FD99:0::1]", "node1", "node1.cluster.local", "NODE1.data.local", "localhost"],
)
def test_its_names_and_addresses_need_no_ssh(run: Run, host: str) -> None:
    done = run(f"{host}:2")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] up", "[1] up"]


def test_a_name_without_the_domain_that_the_machine_has(run: Run) -> None:
    assert run("node1:1", name="node1.cluster.local").stdout == "[0] up\n"


@pytest.mark.parametrize(
    ("host", "config"),
    [
        ("127.0.0.2", ""),
        ("127.0.1.1", ""),
        ("node1.two.local", ""),
        ("node1.elsewhere.local", ""),
        ("node1.nowhere.local", ""),
        ("node2.cluster.local", ""),
        ("10.99.0.2", ""),
        ("alias", ""),  # it would have to be looked up, as any other host
        ("10.99.0.1", "Host 10.99.0.1\n Port 2222\n"),  # a container's sshd, for one
        ("10.99.0.1", "Host *\n User another\n"),
        ("10.99.0.1", "Host 10.99.0.1\n HostName 10.99.0.2\n"),
        ("10.99.0.1", "Host 10.99.0.1\n ProxyCommand false\n"),
        ("another@10.99.0.1", ""),
        ("node1.cluster.local", "Host node1.*\n HostName 127.0.0.2\n"),
    ],
)
def test_others_are_reached_by_ssh(run: Run, host: str, config: str) -> None:
    done = run(f"{host}:2", f"{config}Host *\n ConnectTimeout 1\n")
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "the only host can't take part" in done.stderr


def test_two_of_them_are_one_host(run: Run) -> None:
    done = run("10.99.0.1:1,node1.cluster.local:1")
    assert done.returncode == 2
    expected = "10.99.0.1 and node1.cluster.local are both this machine; name it once, with all its ranks: 10.99.0.1:N"
    assert done.stderr == f"launchpad: error: {expected}\n"
