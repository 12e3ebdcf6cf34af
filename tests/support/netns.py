"""Any number of hosts for tests on one machine, each with its own network, PID, mount, UTS and IPC namespaces and sshd.

    with Network(folder, 3) as network:
        ... network.argv("ssh", "-F", network.ssh_config, "h1") ...
        network.power_off("h3")

All processes of a host share its PID namespace, so they can be listed completely and killed at once. The hosts are on
two bridges: `ssh` (eth0, IPv4), where this machine has an address too, and `data` (eth1), which has no addresses until
`open_data_network`. All of this is inside another pair of network and PID namespaces, "the lab": no interface, address
or name of this machine is touched. The lab's first process ends when we do, however we end, and then the kernel removes
everything. A host shares this machine's files, but has its own /dev/shm and TMPDIR.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.sshd import SSHD, Running, keygen, no_penalties, public, store_agent

DEADLINE = 30.0
NET = "10.77.0"
HEAD = f"{NET}.254"
DATA_NET = "fd77::"

_TOOLS = ("ip", "bridge", "unshare", "nsenter", "mount", "ssh-keygen")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_BRIDGES = ("ssh", "data")
_DROPS, _FORWARDS = 0, 3  # states of a bridge's port: disabled, forwarding
_NOBODY = "02:de:ad:de:ad:01"

# The init process of a PID namespace: prints its pid as seen from outside, then mounts the namespace's own /proc. It
# reaps orphans, and exits at end-of-file on its standard input, which kills everything in the namespace.
_INIT = """
import os, signal, subprocess, sys, threading
outside = os.readlink("/proc/self")
name, *mounts = sys.argv[1:]
for mount in mounts:
    subprocess.run(mount.split(), check=True)
if name != "lab":
    import socket
    socket.sethostname(name)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
def leave():
    while os.read(0, 1):
        pass
    os._exit(0)
threading.Thread(target=leave).start()
print(outside, flush=True)
while True:
    signal.sigwait({signal.SIGCHLD})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def _missing() -> str:
    """Why namespaces can't be created here; "" if they can."""
    if os.getuid() != 0:
        return "namespaces and bridges need root"
    if SSHD is None:
        return "sshd is not installed (openssh-server)"
    for tool in _TOOLS:
        if shutil.which(tool, path=_PATH) is None:
            return f"{tool} is not installed (iproute2, util-linux, openssh-client)"
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():
        return "this kernel has no /proc/*/children"
    script = "ip link add name br0 type bridge && ip link add name ve0 type veth peer name ve1 && "
    script += "ip link set ve0 master br0 && bridge link set dev ve0 isolated on"
    argv = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-c", script]
    tried = subprocess.run(argv, capture_output=True, text=True, env={"PATH": _PATH}, timeout=DEADLINE)
    return f"no namespaces or bridges here: {tried.stderr.strip()}" if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(_why := _missing()), reason=_why or "never")


class Process(NamedTuple):
    """A live process on a host; `pid` and `parent` are as seen from outside, so they can be signalled."""

    pid: int
    parent: int
    name: str
    words: str
    environ: list[str]
    leads: bool  # whether it leads a session
    stopped: bool


class Host:
    """A host of a Network, which creates and controls it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.name = f"h{number}"
        self.address = f"{NET}.{number}"
        self.data_address = f"{DATA_NET}{number}"
        self.folder = folder
        self.scratch = folder / "tmp"
        self.scratch.mkdir(parents=True)
        self.log = folder / "sshd.log"
        self.config = folder / "sshd_config"
        self.init: subprocess.Popen[bytes] | None = None
        self.pid = 0  # of its init process, from outside
        self.namespace = ""


class Network(Running):
    """The lab and its hosts, h1 … hN. Commands of this machine enter its network with `argv`."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.identity = keygen(folder / "id_test")
        self.ssh_config, self.known_hosts = folder / "ssh_config", folder / "known_hosts"
        self.hosts = {host.name: host for host in (Host(n, folder / f"h{n}") for n in range(1, count + 1))}
        self._lab: subprocess.Popen[bytes] | None = None
        self._lab_pid = 0
        for host in self.hosts.values():
            store_agent(host.folder / "cache")
            host.config.write_text(self._sshd_config(host, keygen(host.folder / "host_key")))
        self.known_hosts.write_text(
            "".join(f"{host.address} {public(host.folder / 'host_key')}\n" for host in self.hosts.values())
        )
        self.ssh_config.write_text(
            "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts.values())
            + f"""Host *
  User root
  IdentityFile {self.identity}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {self.known_hosts}
  GlobalKnownHostsFile /dev/null
  BatchMode yes
"""
        )

    def _sshd_config(self, host: Host, key: Path) -> str:
        return f"""Port 22
ListenAddress {host.address}
HostKey {key}
AuthorizedKeysFile {self.identity}.pub
# With this SHLVL, bash takes none of its sessions for a login by ssh, and leaves ~/.bashrc alone: what that starts may
# hold locks that all hosts share, and would keep them if it is killed.
SetEnv TMPDIR={host.scratch} XDG_CACHE_HOME={host.folder / "cache"} SHLVL=2
{no_penalties()}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
"""

    # The lab.

    def start(self) -> None:
        """Create the lab; returns once the sshds of all hosts listen."""
        os.makedirs("/run/sshd", exist_ok=True)  # root's sshd needs it for privilege separation
        argv = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child"]
        self._lab, self._lab_pid = _start_init(argv, "lab")
        self._ip(
            self._lab_pid,
            "link set lo up",
            *(f"link add name {bridge} type bridge stp_state 0 forward_delay 0" for bridge in _BRIDGES),
            f"addr add {HEAD}/24 dev ssh",
            *(f"link set {bridge} up" for bridge in _BRIDGES),
        )
        for host in self.hosts.values():
            self._boot(host)
        for host in self.hosts.values():
            self._await_sshd(host)

    def stop(self) -> None:
        """Tear everything down; returns once the last process is gone."""
        started = [self._lab, *(host.init for host in self.hosts.values())]
        for init in started:
            if init is not None:
                assert init.stdin is not None
                init.stdin.close()
        for init in started:
            if init is not None:
                init.wait(DEADLINE)
                assert init.stdout is not None
                init.stdout.close()
        self._lab = None

    def argv(self, *words: object) -> list[str]:
        """The command line that runs a command of this machine in the hosts' network, under the same pid."""
        return ["nsenter", f"--net=/proc/{self._lab_pid}/ns/net", "--", *map(str, words)]

    def restore(self) -> None:
        """Undo a test's changes: every host is up and reachable, and runs nothing but sshd."""
        self.mend()
        for host in self.hosts.values():
            if host.init is None:
                self.power_on(host.name)
                continue
            listens = self._listens(host)
            self._kill(host, lambda one, kept=listens: one.pid != kept)
            if listens:
                host.log.write_bytes(b"")
            else:
                self._start_sshd(host)
                self._await_sshd(host)

    def mend(self) -> None:
        """Undo all changes to the network; the hosts that are up keep what they run."""
        self._heal([host for host in self.hosts.values() if host.init is not None])
        # A pending ARP lookup of a host that was unreachable may be about to fail.
        self._ip(self._lab_pid, "neigh flush all")

    # A host.

    def inside(self, name: str, *words: object) -> list[str]:
        """The command line that runs a command on the host."""
        pid = self.hosts[name].pid
        return ["nsenter", "-t", str(pid), "--net", "--pid", "--mount", "--uts", "--ipc", "--", *map(str, words)]

    def exec(self, name: str, *words: object) -> str:
        """Run a command on the host; returns its output."""
        argv = self.inside(name, *words)
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": _PATH}, timeout=DEADLINE)
        assert done.returncode == 0, f"{name}: {argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self, name: str) -> list[Process]:
        """The live processes on the host, except its init process and sshd with its sessions."""
        return [one for one in self.all_processes(name) if not one.name.startswith("sshd")]

    def all_processes(self, name: str) -> list[Process]:
        """All processes on the host, sshd's too."""
        return self._inside(self.hosts[name])

    def _inside(self, host: Host) -> list[Process]:
        if host.init is None:
            return []
        found = []
        for name in os.listdir("/proc"):  # often: tests wait for what is here
            if not name.isdigit() or int(name) == host.pid:
                continue
            try:
                if os.readlink(f"/proc/{name}/ns/pid") != host.namespace:
                    continue
                entry = Path("/proc", name)
                status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has just gone
                continue
            state = status["State"].split()[0]
            if state not in "ZX":
                pid, session = (int(status[field].split()[-1]) for field in ("NSpid", "NSsid"))
                parent, called = int(status["PPid"]), status["Name"].strip()
                found.append(Process(int(name), parent, called, words, environ, pid == session, state == "T"))
        return found

    def _kill(self, host: Host, these: Callable[[Process], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while doomed := [one for one in self._inside(host) if these(one)]:
            assert time.monotonic() < deadline, f"{host.name}: still there: {doomed}"
            for one in doomed:
                _signal(one, signal.SIGKILL)
            time.sleep(0.01)

    def power_off(self, name: str) -> None:
        """A power cut: everything on the host is gone at once, and the others get no sign of it."""
        host = self.hosts[name]
        self.partition(name)
        assert host.init is not None
        os.kill(host.pid, signal.SIGKILL)
        host.init.wait(DEADLINE)
        for stream in (host.init.stdin, host.init.stdout):
            assert stream is not None
            stream.close()
        host.init = None
        for bridge in _BRIDGES:  # the kernel would remove them too, but later
            subprocess.run(
                self.argv("ip", "link", "del", f"{bridge}{host.number}"), env={"PATH": _PATH}, stderr=subprocess.DEVNULL
            )

    def power_on(self, name: str) -> None:
        """Undo `power_off`: the host boots, and its sshd listens."""
        if self.hosts[name].init is None:
            self._boot(self.hosts[name])
            self._await_sshd(self.hosts[name])

    def serve(self, name: str) -> None:
        """Undo `kill_sshd`."""
        host = self.hosts[name]
        if not self._listens(host):
            self._start_sshd(host)
            self._await_sshd(host)

    def _listens(self, host: Host) -> int:
        """The pid of the host's sshd; 0 if it is stopped, or not there."""
        for one in self._inside(host):
            if one.name.startswith("sshd") and "listener" in one.words and not one.stopped:
                return one.pid
        return 0

    def partition(self, name: str) -> None:
        """Silently drop all traffic to and from the host from now on."""
        self._set_ports(*self._ports(self.hosts[name], _DROPS))

    def heal(self, name: str) -> None:
        """Undo `partition`, `isolate`, `cut`, `spoil` and `open_data_network` for the host."""
        self._heal([self.hosts[name]])

    def _heal(self, hosts: list[Host]) -> None:
        ports = [line for host in hosts for line in (*self._ports(host, _FORWARDS), _isolated(host, "off"))]
        self._set_ports(*ports)
        for host in hosts:
            self._ip(host.pid, "addr flush dev eth1", "neigh flush dev eth0 nud permanent", "neigh flush all")
            argv = [*self._in_network_of(host.name), "tc", "qdisc", "del", "dev", "eth0", "root"]
            # It complains where nothing was spoilt.
            subprocess.run(argv, env={"PATH": _PATH}, stderr=subprocess.DEVNULL, timeout=DEADLINE)

    def isolate(self, name: str) -> None:
        """From now on isolated hosts can't reach each other on the ssh network; the head still reaches them."""
        self._set_ports(_isolated(self.hosts[name], "on"))

    def cut(self, one: str, other: str) -> None:
        """From now on these two hosts can't reach each other on the ssh network, and get no sign of it."""
        for name, peer in ((one, other), (other, one)):
            # A hardware address that nobody has: ARP is not asked, so nothing fails.
            address = self.hosts[peer].address
            self._ip(self.hosts[name].pid, f"neigh replace {address} lladdr {_NOBODY} dev eth0 nud permanent")

    def spoil(self, name: str, *how: str) -> None:
        """Delay, lose or reorder what the host sends on the ssh network (`how` as for tc's netem), until `heal`."""
        argv = [*self._in_network_of(name), "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", *how]
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": _PATH}, timeout=DEADLINE)
        assert done.returncode == 0, f"tc: {how}: {done.stderr}"

    def _in_network_of(self, name: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.hosts[name].pid}/ns/net", "--"]

    def open_data_network(self) -> None:
        """Connect the hosts by a second network, IPv6 only, until `heal` or `restore`."""
        for host in self.hosts.values():
            self._ip(host.pid, f"addr replace {host.data_address}/64 dev eth1 nodad")

    def kill_sshd(self, name: str) -> None:
        """Send SIGKILL to the host's sshd and all of its sessions, as the OOM killer might."""
        self._kill(self.hosts[name], lambda one: one.name.startswith("sshd"))

    def stall_sshd(self, name: str) -> None:
        """From now on the host accepts connections, and its sshd says nothing on new ones, until `go_on`."""
        self._signal_sshd(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Undo `stall_sshd`."""
        self._signal_sshd(name, signal.SIGCONT)

    def _signal_sshd(self, name: str, signum: int) -> None:
        for one in self.all_processes(name):
            if one.name.startswith("sshd"):
                _signal(one, signum)

    @staticmethod
    def _ports(host: Host, state: int) -> list[str]:
        return [f"link set dev {bridge}{host.number} state {state}" for bridge in _BRIDGES]

    def _boot(self, host: Host) -> None:
        argv = ["nsenter", "-t", str(self._lab_pid), "--net", "--pid", "--"]
        argv += ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
        mounts = ("mount -t proc proc /proc", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        host.init, host.pid = _start_init(argv, host.name, *mounts)
        host.namespace = os.readlink(f"/proc/{host.pid}/ns/pid")
        links = [(f"eth{at}", bridge, f"{bridge}{host.number}") for at, bridge in enumerate(_BRIDGES)]
        # Fixed, as the other hosts remember its hardware address across a power cut.
        hardware = f"02:00:00:00:{host.number:02x}"
        self._ip(
            self._lab_pid,
            *(
                f"link add name {port} type veth peer name {own} address {hardware}:{own[-1]:0>2} netns {host.pid}"
                for own, _, port in links
            ),
            *(f"link set {port} master {bridge} up" for _, bridge, port in links),
        )
        self._ip(
            host.pid,
            "link set lo up",
            f"addr add {host.address}/24 dev eth0",
            *(f"link set {own} addrgenmode none up" for own, _, _ in links),
        )
        self._start_sshd(host)

    def _start_sshd(self, host: Host) -> None:
        host.log.write_bytes(b"")
        assert SSHD is not None
        self.exec(host.name, SSHD, "-f", host.config, "-E", host.log)

    def _await_sshd(self, host: Host) -> None:
        deadline = time.monotonic() + DEADLINE
        while "Server listening" not in host.log.read_text():
            assert time.monotonic() < deadline, f"sshd does not listen: {host.log.read_text()}"
            time.sleep(0.01)

    def _set_ports(self, *commands: str) -> None:
        """Run `bridge` commands in the lab."""
        _batch(self._lab_pid, "bridge", commands)

    def _ip(self, pid: int, *commands: str) -> None:
        """Run `ip` commands in the network of that process."""
        _batch(pid, "ip", commands)


def _signal(process: Process, signum: int) -> None:
    try:
        os.kill(process.pid, signum)
    except ProcessLookupError:  # it has just ended
        pass


def _batch(pid: int, tool: str, commands: Sequence[str]) -> None:
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", tool, "-batch", "-"]
    done = subprocess.run(
        argv, input="\n".join(commands), capture_output=True, text=True, env={"PATH": _PATH}, timeout=DEADLINE
    )
    assert done.returncode == 0, f"{tool}: {commands}: {done.stdout}{done.stderr}"


def _isolated(host: Host, state: str) -> str:
    return f"link set dev ssh{host.number} isolated {state}"


def _start_init(argv: list[str], *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start _INIT through `unshare`; returns the process that we started, and init's pid from outside."""
    init = subprocess.Popen(
        [*argv, sys.executable, "-I", "-S", "-c", _INIT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # unshare complains when its child is killed
        env={"PATH": _PATH},
        start_new_session=True,
    )
    assert init.stdout is not None
    line = init.stdout.readline()
    assert line, f"no namespaces: {argv}"
    return init, int(line)
