"""Real OpenSSH servers for tests, each on its own loopback address, run by the user who runs the tests.

    with Cluster(tmp_path, 2) as cluster:
        ... launchpad run --ssh-config {cluster.ssh_config} --hosts n1,n2 ...

All of them are this one machine; they differ in address, port and host key. Only the user who started them can log in,
with `cluster.identity`, and only if the account is not locked. Sessions get their environment from sshd, not from the
test; `environ` is added to it. At the end the servers are killed with all their descendants, even those that have left
their process tree.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from launchpad.transport.ssh.bundle import archive, digest
from tests.support.ports import free_port
from tests.support.processes import with_variable

DEADLINE = 30.0
MARK = "LAUNCHPAD_TEST_SSHD"
USER = pwd.getpwuid(os.getuid()).pw_name

# The user's PATH may not include it, and sshd insists on being called by its absolute path.
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None, reason="sshd is not installed (openssh-server)"
)


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "", comment: str = "") -> Path:
    """Write a key pair; returns the path of the private key. There is one for each name of a file and its folder."""
    private, own = _key(kind, passphrase, comment or path.name, path.parent.name)
    for place, key in ((path, private), (Path(f"{path}.pub"), own)):
        place.touch(0o600)
        place.write_bytes(key)
    return path


@functools.cache
def _key(kind: str, passphrase: str, comment: str, _: str) -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", comment, "-f", str(path)]
        subprocess.run(argv, check=True, timeout=DEADLINE)
        return path.read_bytes(), path.with_suffix(".pub").read_bytes()


def public(path: Path) -> str:
    """The type and base64 data of a public key."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


class Sshd:
    """One server. Its `folder` holds its host keys (host_ed25519, …), its log and authorized_keys."""

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.2",
        settings: str = "",
        key_types: tuple[str, ...] = ("ed25519",),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: lines for sshd_config; they override the ones of this class."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = address
        self.port = free_port()
        self.settings = settings
        # With this SHLVL, bash takes no session for a login by ssh, and leaves ~/.bashrc alone: what that starts takes
        # time, and may say something.
        self.environ = {"SHLVL": "2", **(environ or {}), MARK: str(folder)}
        self.host_keys = [keygen(folder / f"host_{kind}", kind) for kind in key_types]
        self.authorized_keys = folder / "authorized_keys"
        self.authorized_keys.touch()
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def known_as(self) -> str:
        """The server's name in known_hosts."""
        return f"[{self.address}]:{self.port}"

    def known_hosts(self) -> str:
        """The server's lines for known_hosts."""
        return "".join(f"{self.known_as} {public(key)}\n" for key in self.host_keys)

    def authorize(self, key: Path, options: str = "") -> None:
        """Let the owner of this key log in."""
        with self.authorized_keys.open("a") as file:
            file.write(f"{options} {public(key)}\n".lstrip())

    def start(self) -> None:
        """Start the server; returns once it listens."""
        assert SSHD is not None
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # root's sshd needs it for privilege separation
        config = self.folder / "sshd_config"
        config.write_text(self._config())
        self.log.write_bytes(b"")
        self._process = subprocess.Popen(
            [SSHD, "-D", "-f", str(config), "-E", str(self.log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + DEADLINE
        while "Server listening" not in self.log.read_text():
            assert self._process.poll() is None, f"sshd ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"sshd does not listen: {self.log.read_text()}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it and all its descendants, like a power cut; returns once all are gone."""
        if self._process is None:
            return
        process, self._process = self._process, None
        # Stop each process first, so that it neither loses children to init nor gains any while we collect them.
        doomed: set[int] = set()
        waiting = [process.pid]
        while waiting:
            pid = waiting.pop()
            try:
                os.kill(pid, signal.SIGSTOP)
                children = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]
                waiting += [int(child) for path in children for child in path.read_text().split()]
            except OSError:
                continue
            doomed.add(pid)
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while left := {pid for pid in doomed if _lives(pid)} | {*self._marked()}:
            assert time.monotonic() < deadline, f"processes of sshd are left: {left}"
            doomed |= left  # one that is exiting has no environment any more
            for pid in self._marked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _marked(self) -> list[int]:
        """Live processes with the environment of our sessions."""
        return [pid for pid in with_variable(MARK, self.folder) if _lives(pid)]

    def _config(self) -> str:
        keys = "".join(f"HostKey {key}\n" for key in self.host_keys)
        return f"""{self.settings}
Port {self.port}
ListenAddress {self.address}
{keys}{no_penalties()}
AuthorizedKeysFile {self.authorized_keys}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
SetEnv {" ".join(f'"{name}={value}"' for name, value in self.environ.items())}
Subsystem sftp internal-sftp
"""


class Running:
    """A context manager: starts on entry, and stops on exit or if the start fails."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Cluster(Running):
    """`count` servers, and what ssh needs to reach them as n1 … nN: `ssh_config`, `known_hosts`, `identity`.

    `ssh_config` refers to nothing of the user's own.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        settings: str = "",
        config: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` go into each sshd_config; `config` are lines for ssh_config that override the ones made here."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.identity = keygen(folder / "id_test")
        self.hosts = [
            Sshd(folder / f"n{n}", f"127.0.0.{n + 1}", settings, environ=environ) for n in range(1, count + 1)
        ]
        for host in self.hosts:
            host.authorize(self.identity)
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text("".join(host.known_hosts() for host in self.hosts))
        self.ssh_config = folder / "ssh_config"
        self.configure(config)

    def configure(self, config: str) -> None:
        """Rewrite ssh_config, with these lines first."""
        aliases = "".join(
            f"Host n{n}\n  HostName {host.address}\n  Port {host.port}\n" for n, host in enumerate(self.hosts, 1)
        )
        self.ssh_config.write_text(f"""{config}
{aliases}
Host *
  User {USER}
  IdentityFile {self.identity}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {self.known_hosts}
  GlobalKnownHostsFile /dev/null
  BatchMode yes
""")

    def start(self) -> None:
        """Start all servers; returns once they listen."""
        for host in self.hosts:
            host.start()

    def stop(self) -> None:
        """Kill all servers and all their descendants."""
        for host in self.hosts:
            host.stop()


def store_agent(cache: Path) -> None:
    """Put the agent into the cache of a host, as an earlier job has: there is one for all tests, compiled once."""
    (cache / "launchpad").mkdir(mode=0o700, parents=True)
    (cache / "launchpad" / f"agent-{digest()}").symlink_to(_unpacked_agent().name)


@functools.cache
def _unpacked_agent() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="lp-agent-")
    zipfile.ZipFile(io.BytesIO(archive())).extractall(folder.name)
    return folder


@functools.cache
def no_penalties() -> str:
    """sshd 9.8 and later lock out an address for a while after failed logins; older ones don't know the setting."""
    assert SSHD is not None
    argv = [SSHD, "-f", "/dev/null", "-T", "-o", "PerSourcePenalties=no"]
    errors = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE).stderr
    return "" if "onfiguration option" in errors else "PerSourcePenalties no"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
