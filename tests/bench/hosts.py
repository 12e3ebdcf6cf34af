"""Pretend hosts for benches: each has a network, processes, a name and /dev/shm of its own, and an sshd on port 22.

Only root can make them, with iproute2, util-linux and OpenSSH. Files and cores are this machine's. Whatever is made
here ends with the context: the hosts' processes are killed, and their interfaces go with their namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

DEADLINE = 30.0
# All of it is made up, and on a bridge that leads nowhere else.
NET = "10.213.77"
HEAD = f"{NET}.254"

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_NEEDED = ("ip", "unshare", "sshd", "ssh", "ssh-keygen")

# Process 1 of a host is its sshd, which reaps whoever is left behind. bash reads ~/.bashrc for a command of ssh's too,
# and what the one here does (pyenv takes 0.1 s) is no launcher's work.
_BOOT = """
hostname "$1" && mount -t tmpfs -o mode=1777 none /dev/shm && mount --bind "$2/hosts" /etc/hosts &&
{ [ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc; } &&
{ [ -z "$4" ] || mount -t tmpfs none "$4"; } && ip link set lo up && exec "$3" -D -f "$2/$1/sshd_config" -E "$2/$1/log"
"""


def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    missing = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux, openssh-server)"
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


class Hosts:
    """n1 … nN, and what ssh needs to reach them: `ssh_config` names nothing of the user's own."""

    def __init__(self, folder: Path, count: int, *, apart: bool = False, without: Path | None = None) -> None:
        """`apart`: each has a folder of its own for what launchpad keeps; otherwise they share one.

        `without`: a folder of this machine that is empty there.
        """
        self.folder = folder
        self._apart = apart
        self._without = str(without or "")
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.ssh_config = folder / "ssh_config"
        self._bridge = f"lpb{os.getpid()}"
        self._booted: list[subprocess.Popen[bytes]] = []
        self._keygen(folder / "identity")
        shutil.copy(folder / "identity.pub", folder / "authorized_keys")
        known, config = "", ""
        for name in self.names:
            (folder / name / "tmp").mkdir(parents=True)
            self._keygen(folder / name / "host_key")
            public = " ".join((folder / name / "host_key.pub").read_text().split()[:2])
            known += f"{self.address(name)} {public}\n"
            config += f"Host {name}\n  HostName {self.address(name)}\n"
            (folder / name / "sshd_config").write_text(self._sshd_config(name))
        (folder / "known_hosts").write_text(known)
        self.ssh_config.write_text(f"""{config}
Host *
  User root
  IdentityFile {folder}/identity
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
""")
        names = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}{HEAD} {socket.gethostname()}\n")

    def address(self, name: str) -> str:
        """A host's address."""
        return f"{NET}.{name[1:]}"

    def cache(self, name: str) -> Path:
        """XDG_CACHE_HOME of a host."""
        return self.folder / (name if self._apart else "") / "cache"

    def _sshd_config(self, name: str) -> str:
        return f"""HostKey {self.folder}/{name}/host_key
AuthorizedKeysFile {self.folder}/authorized_keys
SetEnv XDG_CACHE_HOME={self.cache(name)} TMPDIR={self.folder}/{name}/tmp
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
"""

    @staticmethod
    def _keygen(path: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)

    def __enter__(self) -> Hosts:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd's folder for privilege separation
        _ip(f"link add {self._bridge} type bridge stp_state 0 forward_delay 0")
        _ip(f"addr add {HEAD}/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        for name in self.names:
            self._booted.append(self._boot(name))
        deadline = time.monotonic() + DEADLINE
        for name in self.names:
            while not self._answers(name):
                assert time.monotonic() < deadline, f"sshd of {name} does not answer"
                time.sleep(0.01)

    def _boot(self, name: str) -> subprocess.Popen[bytes]:
        sshd = shutil.which("sshd", path=_PATH)
        argv = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["sh", "-c", _BOOT, f"host-{name}", name, str(self.folder), str(sshd), self._without]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        ours, theirs = f"{self._bridge}v{name[1:]}", Path(f"/proc/{process.pid}/ns/net")
        deadline = time.monotonic() + DEADLINE
        while theirs.readlink() == Path("/proc/self/ns/net").readlink():
            assert process.poll() is None, f"{name} does not boot"
            assert time.monotonic() < deadline, f"{name} does not boot"
            time.sleep(0.001)
        _ip(f"link add {ours} type veth peer name eth0 netns {process.pid}")
        _ip(f"link set {ours} master {self._bridge} up")
        inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
        _ip(f"addr add {self.address(name)}/24 dev eth0", inside)
        _ip("link set eth0 up", inside)
        return process

    def _answers(self, name: str) -> bool:
        try:
            with socket.create_connection((self.address(name), 22), timeout=1.0) as stream:
                return stream.recv(4) == b"SSH-"
        except OSError:
            return False

    def _stop(self) -> None:
        for process in self._booted:
            os.killpg(process.pid, signal.SIGKILL)  # with unshare dies its child, process 1, and so all of the host
            process.wait(DEADLINE)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True, env=_environ())


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _ip(command: str, inside: list[str] | None = None) -> None:
    subprocess.run([*(inside or []), "ip", *command.split()], check=True, env=_environ(), timeout=DEADLINE)
