"""Connecting over SSH to real servers: what works, what fails, and with which message."""

from __future__ import annotations

import contextlib
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest

from launchpad.errors import ConnectError, NodeError, UsageError
from launchpad.transport.ssh.config import Destination, SshConfig
from launchpad.transport.ssh.connection_pool import ConnectionPool
from launchpad.transport.ssh.keys import Keyring
from tests.support.command import DEADLINE, descriptors, wait_until
from tests.support.ports import free_port
from tests.support.sshd import USER, Cluster, Sshd, keygen, needs_sshd, public

pytestmark = needs_sshd

MakeCluster = Callable[..., Cluster]
MakePool = Callable[..., ConnectionPool]


def children() -> list[int]:
    """Our child processes, including zombies."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found


def sockets() -> set[str]:
    return {name for name in descriptors().values() if name.startswith("socket:")}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private home, no ssh agent, and nothing left behind: no thread, socket or process."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=USER, pw_dir=str(folder)))  # where ssh looks
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    threads, open_sockets, processes = set(threading.enumerate()), sockets(), set(children())
    yield folder
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads to end", show=threading.enumerate)
    wait_until(lambda: sockets() <= open_sockets, "sockets to be closed", show=sockets)
    wait_until(lambda: set(children()) <= processes, "processes to be gone", show=children)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start Clusters, which are stopped after the test."""
    made: list[Cluster] = []

    def start(count: int = 1, settings: str = "", environ: dict[str, str] | None = None) -> Cluster:
        cluster = Cluster(tmp_path / f"cluster{len(made)}", count, settings, environ=environ)
        made.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in made:
        cluster.stop()


@pytest.fixture
def connections() -> Iterator[Callable[..., ConnectionPool]]:
    """Create ConnectionPools, which are closed after the test."""
    made: list[ConnectionPool] = []

    def create(cluster: Cluster | Path, **options: object) -> ConnectionPool:
        file = cluster.ssh_config if isinstance(cluster, Cluster) else cluster
        made.append(ConnectionPool(SshConfig(str(file)), **options))
        return made[-1]

    yield create
    for one in made:
        one.close()


def output(transport: paramiko.Transport, command: str) -> str:
    """The output of a remote command."""
    with transport.open_session(timeout=DEADLINE) as channel:
        channel.settimeout(DEADLINE)
        channel.exec_command(command)
        return channel.makefile().read().decode().strip()


def failure(call: Callable[[], object]) -> ConnectError:
    """The error that a call raises."""
    with pytest.raises(ConnectError) as caught:
        call()
    assert isinstance(caught.value, NodeError)
    assert caught.value.exit_code == 3
    assert str(caught.value) == f"{caught.value.host}: {caught.value.kind}: {caught.value.text}"
    assert "\n" not in str(caught.value)
    return caught.value


def everyone(connections: ConnectionPool, hosts: list[str]) -> list[paramiko.Transport]:
    """Connect to all hosts at once, in a thread each."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(connections.connect, hosts, timeout=DEADLINE))


class Mute:
    """A TCP server that calls a function with each connection."""

    def __init__(self, serve: Callable[[socket.socket], object]) -> None:
        self.address = "127.0.0.2"
        self._listener = socket.create_server((self.address, 0))
        self.port: int = self._listener.getsockname()[1]
        self.taken = 0
        self._serve = serve
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.taken += 1
            self._open.append(stream)
            self._serve(stream)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)
        for stream in self._open:
            stream.close()


class MakeMute:
    """Starts a Mute and returns an ssh_config in which it is n1."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "mute_config"
        self.made: list[Mute] = []

    def __call__(self, action: Callable[[socket.socket], object], connect_timeout: int = 1) -> Path:
        mute = Mute(action)
        self.made.append(mute)
        self._file.write_text(
            f"Host n1\n HostName {mute.address}\n Port {mute.port}\n ConnectTimeout {connect_timeout}\n"
        )
        return self._file


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[MakeMute]:
    """Servers that are not sshd."""
    maker = MakeMute(tmp_path)
    yield maker
    for one in maker.made:
        one.close()


def test_a_connection_is_authenticated_and_runs_commands(make: MakeCluster, connections: MakePool) -> None:
    transport = connections(make()).connect("n1")
    assert transport.is_authenticated()
    assert output(transport, "echo $((6 * 7))") == "42"
    assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_processes_of_a_session_end_with_the_test_server(make: MakeCluster, connections: MakePool) -> None:
    """Even those that have left its process tree."""
    cluster = make(environ={"WHERE": "over there"})
    transport = connections(cluster).connect("n1")
    pid = int(output(transport, "setsid sleep 600 >/dev/null 2>&1 & echo $!"))
    assert output(transport, "echo $WHERE") == "over there"
    assert Path(f"/proc/{pid}").exists()
    cluster.stop()
    with contextlib.suppress(OSError):
        assert "(sleep) Z" in Path(f"/proc/{pid}/stat").read_text()


def test_user_and_port_of_the_caller_win(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(2)
    cluster.configure("Host n1\n User nobody-at-all\n Port 1\n")
    transport = connections(cluster).connect("n1", user=USER, port=cluster.hosts[0].port)
    assert output(transport, "whoami") == USER


def test_many_connections_at_once_to_one_server_with_default_maxstartups(
    make: MakeCluster, connections: MakePool
) -> None:
    cluster = make()
    transports = everyone(connections(cluster), ["n1"] * 30)
    assert len(set(transports)) == 30
    assert all(transport.is_authenticated() for transport in transports)


def test_a_jump_host_gets_a_single_connection(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(2, settings="LogLevel VERBOSE")
    cluster.configure(
        f"Host inner\n HostName {cluster.hosts[1].address}\n Port {cluster.hosts[1].port}\n ProxyJump n1\n"
    )
    transports = everyone(connections(cluster), ["inner"] * 20)
    assert [output(transport, "echo here") for transport in transports] == ["here"] * 20
    assert cluster.hosts[0].log.read_text().count("Accepted publickey") == 1
    assert cluster.hosts[1].log.read_text().count("Accepted publickey") == 20


def test_two_jump_hosts_in_a_row(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(3, settings="LogLevel VERBOSE")
    port = cluster.hosts[1].port
    cluster.configure(f"Host n3\n ProxyJump n1,{USER}@127.0.0.3:{port}\n")
    transport = connections(cluster).connect("n3")
    # sshd's view: where the connection came from.
    assert output(transport, "echo $SSH_CONNECTION").split()[2] == "127.0.0.4"
    logs = [host.log.read_text() for host in cluster.hosts]
    assert all(log.count("Accepted publickey") == 1 for log in logs)


def test_a_jump_host_with_a_jump_host_in_its_own_configuration(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(3, settings="LogLevel VERBOSE")
    cluster.configure("Host n3\n ProxyJump n2\nHost n2\n ProxyJump n1\n")
    everyone(connections(cluster), ["n3", "n2", "n3"])
    wait_until(  # sshd may write this a little after the client knows it
        lambda: [host.log.read_text().count("Accepted publickey") for host in cluster.hosts] == [1, 2, 2],
        "the logins to be logged",
    )


def test_a_jump_host_that_is_its_own_is_a_usage_error(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(2)
    cluster.configure("Host *\n ProxyJump n1\n")
    with pytest.raises(UsageError, match=r"the route to n2 goes through n1 twice; set `ProxyJump none`"):
        connections(cluster).connect("n2")


def test_an_unreachable_jump_host_is_named(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(1)
    port = free_port()
    cluster.configure(f"Host n1\n ProxyJump gate\nHost gate\n HostName 127.0.0.9\n Port {port}\n")
    one = connections(cluster)
    errors = [failure(lambda: one.connect("n1")) for _ in range(2)]
    assert [error.kind for error in errors] == ["refused", "refused"]
    assert f"n1: refused: jump host gate: nothing listens at 127.0.0.9:{port}" in str(errors[0])


def test_a_target_that_the_jump_host_cannot_reach(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(1)
    port = free_port()
    cluster.configure(f"Host n2\n HostName 127.0.0.9\n Port {port}\n ProxyJump n1\n")
    error = failure(lambda: connections(cluster).connect("n2"))
    assert (error.kind, error.host) == ("refused", "n2")
    assert f"the jump host n1 can't connect to 127.0.0.9:{port}" in error.text


def test_a_jump_host_that_forbids_forwarding(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(2, settings="AllowTcpForwarding no")
    cluster.configure("Host n2\n ProxyJump n1\n")
    error = failure(lambda: connections(cluster).connect("n2"))
    assert error.kind == "refused"
    assert "the jump host n1 forbids connections to 127.0.0.3" in error.text
    assert "AllowTcpForwarding" in error.text


def test_a_proxy_command(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(2)
    cluster.configure(f"Host n2\n ProxyCommand ssh -F {cluster.ssh_config} -W %h:%p n1 2>/dev/null\n")
    assert output(connections(cluster).connect("n2"), "echo there") == "there"


def test_a_proxy_command_that_fails_is_quoted(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(1)
    cluster.configure("Host n1\n ProxyCommand echo no gate for %r >&2; exit 1\n")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "protocol"
    assert "ProxyCommand 'echo no gate for" in error.text
    assert f"ended without a connection: 'no gate for {USER}'" in error.text


def test_a_name_without_an_address(make: MakeCluster, connections: MakePool) -> None:
    cluster = make()
    error = failure(lambda: connections(cluster).connect("nowhere.invalid"))
    assert error.kind == "unresolvable"
    assert "can't resolve nowhere.invalid" in error.text


def test_nothing_listens(make: MakeCluster, connections: MakePool) -> None:
    cluster = make()
    cluster.stop()
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "refused"
    assert error.text.startswith(f"nothing listens at 127.0.0.2:{cluster.hosts[0].port}; start sshd there")


def test_no_route_to_the_address(make: MakeCluster, connections: MakePool) -> None:
    """On Linux, TCP has no route to the broadcast address."""
    cluster = make()
    cluster.configure("Host far\n HostName 255.255.255.255\n")
    error = failure(lambda: connections(cluster).connect("far"))
    assert error.kind == "unreachable"
    assert "there is no route to 255.255.255.255:22" in error.text


def test_a_host_that_does_not_answer(make: MakeCluster, connections: MakePool) -> None:
    """When a socket's backlog is full, Linux drops further connections to it."""
    cluster = make()
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        wait_until(lambda: first.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0, "the queue to fill")
        cluster.configure(f"Host n1\n Port {listener.getsockname()[1]}\n ConnectTimeout 1\n")
        error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "timed out"
    assert "did not accept a connection within 1 s" in error.text


def test_a_server_that_sends_nothing(serve: MakeMute, connections: MakePool) -> None:
    error = failure(lambda: connections(serve(lambda _: None)).connect("n1"))
    assert error.kind == "timed out"
    assert re.search(r"127\.0\.0\.2:\d+ accepted the connection but sent nothing for 1 s; is this sshd's", error.text)


def test_a_server_that_hangs_up_at_once_is_retried(serve: MakeMute, connections: MakePool) -> None:
    error = failure(lambda: connections(serve(socket.socket.close)).connect("n1"))
    assert error.kind == "protocol"
    assert "closed the connection without a word; see its sshd's log" in error.text
    assert serve.made[0].taken == 4


def test_a_server_that_is_not_sshd(serve: MakeMute, connections: MakePool) -> None:
    def answer(stream: socket.socket) -> None:
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        stream.shutdown(socket.SHUT_WR)

    error = failure(lambda: connections(serve(answer)).connect("n1"))
    assert error.kind == "protocol"
    assert "is not sshd: it said 'HTTP/1.1 400 Bad Request'; correct the port" in error.text
    assert serve.made[0].taken == 1


def test_a_server_that_stops_after_its_banner(serve: MakeMute, connections: MakePool) -> None:
    error = failure(lambda: connections(serve(lambda stream: stream.sendall(b"SSH-2.0-Stuck\r\n"))).connect("n1"))
    assert error.kind == "timed out"
    assert "(SSH-2.0-Stuck) did not finish the key exchange in 3 s" in error.text


def test_a_server_that_hangs_up_after_its_banner(serve: MakeMute, connections: MakePool) -> None:
    def answer(stream: socket.socket) -> None:
        stream.sendall(b"SSH-2.0-Cross\r\n")
        stream.shutdown(socket.SHUT_WR)

    error = failure(lambda: connections(serve(answer)).connect("n1"))
    assert error.kind == "protocol"
    assert "(SSH-2.0-Cross) closed the connection during the key exchange" in error.text


def test_no_algorithm_in_common(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(settings="KexAlgorithms sntrup761x25519-sha512@openssh.com")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "protocol"
    assert re.search(r"key exchange with .* failed: ", error.text)
    assert "KexAlgorithms" in error.text


def test_close_ends_a_connection_that_is_being_opened(serve: MakeMute, connections: MakePool) -> None:
    arrived = threading.Event()
    one = connections(serve(lambda _: arrived.set(), connect_timeout=2 * int(DEADLINE)))
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(one.connect, "n1")
        assert arrived.wait(DEADLINE)
        one.close()
        with pytest.raises(ConnectError):
            trying.result(DEADLINE)
    assert failure(lambda: one.connect("n1")).text == "given up; the run is ending"


def test_an_unknown_host_key_and_its_acceptance(make: MakeCluster, connections: MakePool) -> None:
    cluster = make()
    cluster.known_hosts.unlink()
    host = cluster.hosts[0]
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "host key"
    printed = subprocess.run(
        ["ssh-keygen", "-lf", f"{host.host_keys[0]}.pub"], capture_output=True, text=True, check=True, timeout=DEADLINE
    )
    assert printed.stdout.split()[1] in error.text
    command = f"ssh-keyscan -t ed25519 -p {host.port} 127.0.0.2 >> {cluster.known_hosts}"
    assert command in error.text
    assert not cluster.known_hosts.exists()
    subprocess.run(command, shell=True, check=True, stderr=subprocess.DEVNULL, timeout=DEADLINE)
    connections(cluster).connect("n1")


def test_new_keys_are_stored_if_allowed(make: MakeCluster, connections: MakePool, home: Path) -> None:
    cluster = make(3)
    file = home / "new" / "known_hosts"
    cluster.configure(f"UserKnownHostsFile {file}")
    everyone(connections(cluster, accept_new=True), ["n1", "n2", "n3", "n1"])
    assert sorted(file.read_text().splitlines()) == sorted("".join(h.known_hosts() for h in cluster.hosts).splitlines())
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    connections(cluster).connect("n1")


def test_a_changed_host_key_is_refused_with_the_command_that_removes_it(
    make: MakeCluster, connections: MakePool, tmp_path: Path
) -> None:
    cluster = make()
    host = cluster.hosts[0]
    other = keygen(tmp_path / "other")
    cluster.known_hosts.write_text(f"# mine\n{host.known_as} {public(other)}\n")
    for accept_new in (False, True):
        error = failure(lambda accept_new=accept_new: connections(cluster, accept_new=accept_new).connect("n1"))
        assert error.kind == "host key"
        assert f"{cluster.known_hosts}:2 has the ed25519 key" in error.text
    command = f"ssh-keygen -f {cluster.known_hosts} -R '{host.known_as}'"
    assert command in error.text
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=DEADLINE)
    connections(cluster, accept_new=True).connect("n1")


def test_the_known_key_type_is_requested(tmp_path: Path, make: MakeCluster, connections: MakePool) -> None:
    """By default paramiko asks for ed25519 first."""
    cluster = make()
    host = Sshd(tmp_path / "many", "127.0.0.8", key_types=("ed25519", "ecdsa", "rsa"))
    host.authorize(cluster.identity)
    host.start()
    try:
        cluster.configure(f"Host many\n HostName {host.address}\n Port {host.port}\n")
        for line in host.known_hosts().splitlines():
            cluster.known_hosts.write_text(f"{line}\n")
            assert connections(cluster).connect("many").get_remote_server_key().get_name() == line.split()[1]
    finally:
        host.stop()


def test_a_refused_key_is_named_with_the_accepted_methods(
    make: MakeCluster, connections: MakePool, tmp_path: Path
) -> None:
    cluster = make()
    other = keygen(tmp_path / "stranger")
    cluster.configure(f"IdentityFile {other}")
    cluster.hosts[0].authorized_keys.write_text("")
    error = failure(lambda: connections(cluster).connect("n1"))
    port = cluster.hosts[0].port
    assert error.kind == "authentication"
    assert error.text == (
        f"127.0.0.2:{port} refused user '{USER}' (it accepts publickey); tried {other}, {cluster.identity}; "
        f"run ssh-copy-id -p {port} {USER}@127.0.0.2, or name the key in ~/.ssh/config"
    )


def test_no_key_at_all(make: MakeCluster, connections: MakePool) -> None:
    cluster = make()
    cluster.configure("Host n1\n IdentityFile none\n")
    cluster.ssh_config.write_text(cluster.ssh_config.read_text().replace(f"IdentityFile {cluster.identity}", ""))
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "authentication"
    assert "found no key in ~/.ssh or in an agent" in error.text


def test_the_default_keys_are_tried(make: MakeCluster, connections: MakePool, home: Path) -> None:
    cluster = make()
    text = cluster.ssh_config.read_text()
    cluster.ssh_config.write_text(text.replace(f"  IdentityFile {cluster.identity}\n", ""))
    keygen(home / ".ssh" / "id_ed25519")
    shutil.copy(cluster.identity, home / ".ssh" / "id_rsa")
    connections(cluster).connect("n1")


@pytest.mark.parametrize(("kind", "option"), [("rsa", ""), ("ecdsa", ""), ("rsa", "PEM"), ("ecdsa", "PEM")])
def test_kinds_and_formats_of_keys(
    make: MakeCluster, connections: MakePool, tmp_path: Path, kind: str, option: str
) -> None:
    cluster = make()
    key = keygen(tmp_path / "key", kind)
    if option:
        argv = ["ssh-keygen", "-q", "-p", "-m", option, "-P", "", "-N", "", "-f", str(key)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
    cluster.hosts[0].authorized_keys.write_text(f"{public(key)}\n")
    cluster.configure(f"IdentityFile {key}")
    connections(cluster).connect("n1")


def test_a_key_in_an_unknown_format(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    cluster = make()
    key = keygen(tmp_path / "key", "rsa")
    argv = ["ssh-keygen", "-q", "-p", "-m", "PKCS8", "-P", "", "-N", "", "-f", str(key)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
    cluster.hosts[0].authorized_keys.write_text("")
    cluster.configure(f"IdentityFile {key}")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert f"{key} has a format that paramiko can't read; rewrite it with ssh-keygen -p -f {key}" in error.text


def test_a_key_readable_by_others_is_not_used(make: MakeCluster, connections: MakePool, home: Path) -> None:
    cluster = make()
    shutil.copy(cluster.identity, home / ".ssh" / "mine")
    (home / ".ssh" / "mine").chmod(0o644)
    text = cluster.ssh_config.read_text()
    cluster.ssh_config.write_text(text.replace(str(cluster.identity), "~/.ssh/mine"))
    error = failure(lambda: connections(cluster).connect("n1"))
    assert "~/.ssh/mine is readable by others (0644), so it is not used; chmod 600 ~/.ssh/mine" in error.text
    assert "tried" not in error.text


def test_a_certificate_beside_the_key(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    authority = keygen(tmp_path / "authority")
    cluster = make(settings=f"TrustedUserCAKeys {authority}.pub")
    key = keygen(tmp_path / "certified")
    argv = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", USER, f"{key}.pub"]
    subprocess.run(argv, check=True, timeout=DEADLINE)
    cluster.hosts[0].authorized_keys.write_text("")
    cluster.configure(f"IdentityFile {key}")
    connections(cluster).connect("n1")


class Asked:
    """Answers prompts, and counts them."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self.answers.pop(0) if self.answers else None


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_passphrase_is_asked_for_once_for_all_hosts(
    make: MakeCluster, connections: MakePool, tmp_path: Path, kind: str
) -> None:
    cluster = make(5)
    key = keygen(tmp_path / "locked", kind, passphrase="open sesame")
    for host in cluster.hosts:
        host.authorized_keys.write_text(f"{public(key)}\n")
    cluster.configure(f"IdentityFile {key}")
    ask = Asked("wrong", "open sesame")
    everyone(connections(cluster, ask=ask), ["n1", "n2", "n3", "n4", "n5"])
    prompt = f"Enter passphrase for key '{key}': "
    assert ask.prompts == [prompt, f"Wrong passphrase. {prompt}"]


def test_a_key_that_another_hosts_thread_has_unlocked(tmp_path: Path) -> None:
    plain, locked = keygen(tmp_path / "plain"), keygen(tmp_path / "locked", passphrase="open sesame")
    ask = Asked("open sesame")
    keys = Keyring(ask)
    host = Destination("n1", "n1", USER, 22, identity_files=(str(plain), str(locked)))
    slow = keys.offers(host, [])
    assert next(slow).label == str(plain)
    assert [offer.label for offer in keys.offers(host, [])] == [str(plain), str(locked)]
    assert [offer.label for offer in slow] == [str(locked)]
    assert len(ask.prompts) == 1


def test_no_passphrase_is_asked_for_if_another_key_works(
    make: MakeCluster, connections: MakePool, tmp_path: Path
) -> None:
    cluster = make()
    cluster.configure(f"IdentityFile {keygen(tmp_path / 'locked', passphrase='open sesame')}")
    ask = Asked()
    connections(cluster, ask=ask).connect("n1")
    assert ask.prompts == []


@pytest.mark.parametrize("ask", [None, Asked(None)])
def test_a_passphrase_that_is_not_given(
    make: MakeCluster, connections: MakePool, tmp_path: Path, ask: Asked | None
) -> None:
    cluster = make(2)
    key = keygen(tmp_path / "locked", passphrase="open sesame")
    cluster.ssh_config.write_text(cluster.ssh_config.read_text().replace(str(cluster.identity), str(key)))
    one = connections(cluster, ask=ask)
    for host in ("n1", "n2"):
        error = failure(lambda host=host: one.connect(host))
        assert error.kind == "authentication"
        assert f"{key} needs a passphrase; add it with ssh-add" in error.text
    assert ask is None or len(ask.prompts) == 1


def test_a_user_who_takes_longer_than_the_server_waits(
    make: MakeCluster, connections: MakePool, tmp_path: Path
) -> None:
    """By then the passphrase is known, so a second connection doesn't need the user."""
    cluster = make(settings="LoginGraceTime 4")
    key = keygen(tmp_path / "locked", passphrase="open sesame")
    cluster.hosts[0].authorized_keys.write_text(f"{public(key)}\n")
    cluster.configure(f"IdentityFile {key}")

    def ask(_: str) -> str:
        wait_until(lambda: not any(isinstance(t, paramiko.Transport) for t in threading.enumerate()), "sshd to hang up")
        return "open sesame"

    connections(cluster, ask=ask).connect("n1")


def test_a_server_that_accepts_no_keys(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(settings="PubkeyAuthentication no\nPasswordAuthentication yes")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "authentication"
    assert "it accepts password, but paramiko is used for keys only" in error.text


def test_a_server_that_requires_more_than_a_key(make: MakeCluster, connections: MakePool) -> None:
    cluster = make(settings="PasswordAuthentication yes\nAuthenticationMethods publickey,password")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "authentication"
    assert f"accepts {cluster.identity}, but also requires password" in error.text


def test_a_server_that_requires_two_keys(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    cluster = make(settings="AuthenticationMethods publickey,publickey")
    error = failure(lambda: connections(cluster).connect("n1"))
    assert f"(it accepts publickey); tried {cluster.identity};" in error.text
    second = keygen(tmp_path / "second")
    cluster.hosts[0].authorize(second)
    cluster.configure(f"IdentityFile {second}")
    connections(cluster).connect("n1")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh agent. Returns the path of its socket."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, "the agent to listen")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE)


def add(key: Path, *options: str) -> None:
    subprocess.run(["ssh-add", "-q", *options, str(key)], check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE)


def with_agent(cluster: Cluster) -> Cluster:
    """Configure the agent's keys: no key file, no IdentitiesOnly."""
    text = cluster.ssh_config.read_text()
    for line in (f"  IdentityFile {cluster.identity}\n", "  IdentitiesOnly yes\n", "  IdentityAgent none\n"):
        text = text.replace(line, "")
    cluster.ssh_config.write_text(text)
    return cluster


@pytest.mark.usefixtures("agent")
def test_keys_of_an_agent_serve_many_threads(make: MakeCluster, connections: MakePool) -> None:
    cluster = with_agent(make(3))
    add(cluster.identity)
    everyone(connections(cluster), ["n1", "n2", "n3"] * 4)


def test_an_agent_named_in_the_configuration(
    make: MakeCluster, connections: MakePool, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = with_agent(make())
    add(cluster.identity)
    monkeypatch.delenv("SSH_AUTH_SOCK")
    cluster.ssh_config.write_text(f"IdentityAgent {agent}\n{cluster.ssh_config.read_text()}")
    connections(cluster).connect("n1")


@pytest.mark.usefixtures("agent")
def test_too_many_keys(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    cluster = with_agent(make())
    for number in range(8):
        add(keygen(tmp_path / f"key{number}"))
    add(cluster.identity)
    error = failure(lambda: connections(cluster).connect("n1"))
    assert error.kind == "authentication"
    assert f"disconnected user '{USER}' after 6 keys (MaxAuthTries): tried agent key key0, " in error.text
    assert "name the right one with IdentityFile and set IdentitiesOnly yes" in error.text


@pytest.mark.usefixtures("agent")
def test_a_named_key_comes_before_an_agents_many_keys(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    cluster = with_agent(make())
    for number in range(8):
        add(keygen(tmp_path / f"key{number}"))
    cluster.ssh_config.write_text(f"IdentityFile {cluster.identity}\n{cluster.ssh_config.read_text()}")
    connections(cluster).connect("n1")


@pytest.mark.usefixtures("agent")
def test_a_public_key_file_selects_the_agents_key(make: MakeCluster, connections: MakePool, tmp_path: Path) -> None:
    cluster = with_agent(make())
    for number in range(8):
        add(keygen(tmp_path / f"key{number}"))
    add(cluster.identity)
    cluster.ssh_config.write_text(
        f"IdentityFile {cluster.identity}.pub\nIdentitiesOnly yes\n{cluster.ssh_config.read_text()}"
    )
    connections(cluster).connect("n1")


@pytest.mark.usefixtures("agent")
def test_a_key_that_the_agent_will_not_sign_with_is_skipped(
    make: MakeCluster, connections: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssh-add -c` requires confirmation, and here nobody gives it."""
    monkeypatch.setenv("SSH_ASKPASS", "/bin/false")
    cluster = with_agent(make())
    add(cluster.identity, "-c")
    second = keygen(tmp_path / "second")
    cluster.hosts[0].authorize(second)
    add(second)
    connections(cluster).connect("n1")


def test_an_agent_that_is_gone(
    make: MakeCluster, connections: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = with_agent(make())
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "gone"))
    error = failure(lambda: connections(cluster).connect("n1"))
    assert f"the agent at {tmp_path / 'gone'} doesn't answer" in error.text


def test_nothing_is_printed(make: MakeCluster) -> None:
    """paramiko logs a traceback for each of these. pytest captures logging, so run a process without it."""
    cluster = make()
    cluster.known_hosts.write_text("")
    code = (
        "import sys\nfrom launchpad.transport.ssh.connection_pool import ConnectionPool, SshConfig\n"
        "from launchpad.errors import ConnectError\n"
        "connections = ConnectionPool(SshConfig(sys.argv[1]))\n"
        "for host in ('n1', 'mute'):\n"
        "    try:\n        connections.connect(host)\n    except ConnectError as error:\n        print(error.kind)\n"
        "connections.close()\n"
    )
    argv = [sys.executable, "-c", code, str(cluster.ssh_config)]
    with socket.create_server(("127.0.0.2", 0)) as listener:
        cluster.configure(f"Host mute\n HostName 127.0.0.2\n Port {listener.getsockname()[1]}\n ConnectTimeout 1\n")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.stderr, done.returncode) == ("host key\ntimed out\n", "", 0)
