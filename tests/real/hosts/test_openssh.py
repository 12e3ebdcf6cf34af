"""`--ssh openssh`: links through the ssh program, when it is chosen by itself, and what its errors say."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchpad.errors import ConnectError
from launchpad.runner import connector
from launchpad.runner.options import HostOptions
from launchpad.transport.ssh import choice
from launchpad.transport.ssh.choice import needs_ssh
from launchpad.transport.ssh.config import Destination, SshConfig
from launchpad.transport.ssh.known_hosts import KnownHosts
from launchpad.transport.ssh.openssh import why
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts, lines
from tests.support.ports import free_port
from tests.support.sshd import USER, keygen, needs_sshd, public
from tests.support.terminal import Terminal

pytestmark = needs_sshd

SSH = ("--ssh", "openssh")

Change = Callable[[Hosts], object]


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line about the one host that can't be used."""
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    first, line = done.stderr.splitlines()
    assert first == "launchpad: error: the only host can't take part, so nothing was started:"
    return line.strip()


# Whole jobs; more of them are in test_run_hosts.py, which runs over both kinds of links.


def test_ctrl_c_in_the_whole_process_group_lets_the_ranks_end_in_peace(launchpad: Launchpad, hosts: Hosts) -> None:
    (launchpad.folder / "tidies.py").write_text(
        "import signal, sys\n"
        "def tidy(*_):\n    print('tidied', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, tidy)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    process = hosts.begin(launchpad, *SSH, "-H", "n1,n2", "tidies.py", start_new_session=True)
    assert {process.stdout.readline() for _ in range(2)} == {b"[n1 0] ready\n", b"[n2 1] ready\n"}
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert sorted(output.splitlines()) == [b"[n1 0] tidied", b"[n2 1] tidied"]
    assert not launchpad.survivors()


def test_a_killed_ssh_is_a_lost_host(launchpad: Launchpad, hosts: Hosts) -> None:
    process = hosts.begin(launchpad, *SSH, "-H", "n1:2,n2", "sh", "-c", "echo here; exec sleep 600")
    for _ in range(3):
        assert process.stdout.readline().endswith(b"here\n")
    (ssh,) = (int(one.split()[0]) for one in launchpad.survivors() if re.match(r"\d+ ssh -T .* -- n1 ", one))
    os.kill(ssh, signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 4
    assert b"launchpad: n1 was lost: ssh was killed by SIGKILL; it was running ranks 0-1\n" in errors
    # The head doesn't wait for the agent of a lost host, which tidies up when it has noticed.
    wait_until(lambda: not launchpad.survivors(), "the agent to be gone", show=launchpad.survivors)


def test_a_killed_head_leaves_nothing(launchpad: Launchpad, hosts: Hosts) -> None:
    process = hosts.begin(launchpad, *SSH, "-H", "n1,n2", "sh", "-c", "echo here; exec sleep 600")
    for _ in range(2):
        assert process.stdout.readline().endswith(b"here\n")
    process.kill()
    wait_until(lambda: not launchpad.survivors(), "ssh and the ranks to end", show=launchpad.survivors)


def test_many_connections_at_once_to_one_server_with_default_maxstartups(launchpad: Launchpad, hosts: Hosts) -> None:
    first = hosts.hosts[0]
    aliases = [f"m{number}" for number in range(20)]
    # One machine under several names is refused, but only after all have been reached.
    hosts.configure(f"Host {' '.join(aliases)}\n HostName {first.address}\n Port {first.port}\n")
    done = hosts.run(launchpad, *SSH, "-H", ",".join(aliases), "true")
    assert done.returncode == 2
    assert "are one machine" in done.stderr


def test_settings_that_would_be_in_the_way(launchpad: Launchpad, hosts: Hosts) -> None:
    path = launchpad.scratch / "agent"  # the test's folder may be too long a name for a socket
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hosts.configure(
            f"Host n1\n LocalForward {port} localhost:1\n ExitOnForwardFailure yes\n RemoteCommand echo no\n"
            " RequestTTY force\n PermitLocalCommand yes\n LocalCommand echo no\n ForwardX11 yes\n LogLevel QUIET\n"
            f" ForwardAgent {path}\n"
        )
        with socket.socket(socket.AF_UNIX) as agent:
            agent.bind(str(path))
            agent.listen()
            shown = lines(hosts.run(launchpad, *SSH, "-H", "n1", "sh", "-c", "echo hello ${SSH_AUTH_SOCK-}"))
        path.unlink()
        assert shown == ["[0] hello"], "no agent may be forwarded"


def test_a_jump_host(launchpad: Launchpad, hosts: Hosts) -> None:
    hosts.configure("Host n2 n3\n ProxyJump n1\n")
    assert lines(hosts.run(launchpad, *SSH, "-H", "n2,n3", "echo", "hello")) == ["[n2 0] hello", "[n3 1] hello"]


def test_user_and_port_of_the_command_line_win(launchpad: Launchpad, hosts: Hosts) -> None:
    first = hosts.hosts[0]
    hosts.configure("Host n1\n User nobody-at-all\n Port 1\n")
    (launchpad.folder / "hosts.txt").write_text(f"{USER}@n1 port={first.port}\n")
    assert lines(hosts.run(launchpad, *SSH, "--hostfile", "hosts.txt", "echo", "hello")) == ["[0] hello"]


# Errors.


def forget(hosts: Hosts) -> None:
    hosts.known_hosts.write_text("")


def test_nobody_is_asked_about_a_jump_host_without_a_terminal(launchpad: Launchpad, hosts: Hosts) -> None:
    """Its ssh is started by ssh, which passes on no options."""
    hosts.configure("Host n1\n  ProxyJump n2\nHost *\n  BatchMode no\n")
    hosts.known_hosts.write_text(hosts.hosts[0].known_hosts())
    helper = launchpad.folder / "helper"
    helper.write_text("#!/bin/sh\ntouch asked\n")
    helper.chmod(0o755)
    for required in ({}, {"SSH_ASKPASS_REQUIRE": "force"}):
        environ = launchpad.environ | {"DISPLAY": ":0", "SSH_ASKPASS": str(helper)} | required
        line = refusal(hosts.run(launchpad, *SSH, "-H", "n1", "true", env=environ, start_new_session=True))
        assert line.startswith("n1  host key: 127.0.0.2:"), line
        assert line.endswith("then run ssh n1 once"), line
    assert not (launchpad.folder / "asked").exists()


def change_key(hosts: Hosts) -> None:
    other = keygen(hosts.folder / "other")
    hosts.known_hosts.write_text(f"{hosts.hosts[0].known_as} {public(other)}\n")


def refuse(hosts: Hosts) -> None:
    hosts.hosts[0].authorized_keys.write_text("")


REFUSALS: dict[str, tuple[Change, str]] = {
    "unknown host key": (
        forget,
        r"host key: 127\.0\.0\.2:\d+ presents the ssh-ed25519 key SHA256:\S+, which is in no known_hosts file; compare "
        r"it with the host's own, then run ssh n1 once, or pass --accept-new-host-keys",
    ),
    "changed host key": (
        change_key,
        r"host key: 127\.0\.0\.2:\d+ presents the ssh-ed25519 key SHA256:\S+, but \S+/known_hosts:1 has another; "
        r"someone may be intercepting the connection\. .*",
    ),
    "no key that is taken": (
        refuse,
        rf"authentication: 127\.0\.0\.2:\d+ refused user '{USER}' \(it accepts publickey\); tried \S+/id_test; run "
        rf"ssh-copy-id -p \d+ {USER}@127\.0\.0\.2, or name the key in ~/\.ssh/config",
    ),
    "nothing listens": (
        lambda hosts: hosts.hosts[0].stop(),
        r"refused: nothing listens at 127\.0\.0\.2:\d+; start sshd there, or correct the port \(Connection refused\)",
    ),
    "no such name": (
        lambda hosts: hosts.configure("Host n1\n HostName nowhere.invalid\n"),
        r"unresolvable: can't resolve nowhere\.invalid \(.*\); correct the name, or set a HostName for it in .*",
    ),
    "a jump host that refuses": (
        lambda hosts: hosts.configure("Host n1\n ProxyJump n2\nHost n2\n IdentityFile /none\n User nobody-at-all\n"),
        r"authentication: the jump host 127\.0\.0\.3 refused user 'nobody-at-all' \(it accepts publickey\); tried .*; "
        r"run ssh-copy-id nobody-at-all@127\.0\.0\.3, or name the key in ~/\.ssh/config",
    ),
    "behind a jump host": (
        lambda hosts: hosts.configure(f"Host n1\n ProxyJump n2\n Port {free_port()}\n"),
        r"refused: nothing listens at 127\.0\.0\.2:\d+; .*",
    ),
    "a ProxyCommand that fails": (
        lambda hosts: hosts.configure('Host n1\n ProxyCommand sh -c "echo no way >&2; sleep 0.2; exit 1"\n'),
        r"protocol: ProxyCommand '.*' ended without a connection: .*no way.*; try it by hand",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_one_sentence_says_why_a_host_is_not_reached(launchpad: Launchpad, hosts: Hosts, case: str) -> None:
    change, expected = REFUSALS[case]
    change(hosts)
    line = refusal(hosts.run(launchpad, *SSH, "-H", "n1", "true"))
    assert re.fullmatch(rf"n1  {expected}", line), line


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (b"", r"timed out: n1:\d+ accepted the connection but sent nothing for 5 s; .*"),
        (b"HTTP/1.1 400\r\n", r"protocol: n1:\d+ is not sshd, or an old one \(HTTP/1.1 400\); correct the port, .*"),
        (b"\0\1\2\r\n", r"protocol: n1:\d+ is not sshd, or an old one \(contains invalid characters\); .*"),
        (b"SSH-1.0-old\r\n", r"protocol: n1:\d+ is not sshd, or an old one \(Protocol major versions differ: .*"),
    ],
)
def test_a_port_that_is_not_sshds(launchpad: Launchpad, tmp_path: Path, says: bytes, expected: str) -> None:
    with socket.create_server(("127.0.0.9", 0)) as listener:
        config = tmp_path / "config"
        port = listener.getsockname()[1]
        config.write_text(f"Host n1\n HostName 127.0.0.9\n Port {port}\n ConnectTimeout 5\n")
        process = launchpad.start("run", "--ssh-config", config, *SSH, "-H", "n1", "true")
        listener.settimeout(DEADLINE)
        with listener.accept()[0] as stream:
            stream.sendall(says)
            _, errors = process.communicate(timeout=DEADLINE)
    line = refusal(subprocess.CompletedProcess([], process.returncode, "", errors.decode()))
    assert re.fullmatch(rf"n1  {expected.replace('n1:', '127.0.0.9:')}", line), line


DESTINATION = Destination("n1", "10.0.0.1", "bob", 22)


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (
            "ssh: connect to host 10.0.0.1 port 22: Connection timed out",
            "timed out",
            "10.0.0.1:22 did not accept a connection within 10 s",
        ),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", "unreachable", "there is no route to 10.0.0.1:22"),
        (
            "debug1: Offering public key: /a ED25519 SHA256:x agent\ndebug1: Offering public key: /b RSA SHA256:y\n"
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures",
            "authentication",
            "10.0.0.1:22 disconnected user 'bob' after 2 keys (MaxAuthTries): tried /a, /b; in ~/.ssh/config,",
        ),
        (
            "bob@10.0.0.1: Permission denied (password,keyboard-interactive).",
            "authentication",
            "10.0.0.1:22 refused user 'bob' (it accepts password, keyboard-interactive); found no key to try; start "
            "launchpad on a terminal to be asked",
        ),
        (
            "debug1: Offering public key: /a ED25519 SHA256:x\ndebug1: Server accepts key: /a ED25519 SHA256:x\n"
            "bob@10.0.0.1: Permission denied (publickey).",
            "authentication",
            "10.0.0.1:22 takes the key /a, which can't be used here: does it need a passphrase? run ssh-add",
        ),
        (
            "debug1: Offering public key: /a ED25519 SHA256:x\ndebug1: Server accepts key: /a ED25519 SHA256:x\n"
            'Authenticated using "publickey" with partial success.\nbob@10.0.0.1: Permission denied (password).',
            "authentication",
            "10.0.0.1:22 refused user 'bob' (it accepts password); tried /a; start launchpad on a terminal",
        ),
        (
            "kex_exchange_identification: read: Connection reset by peer",
            "protocol",
            "10.0.0.1:22 closed the connection (kex_exchange_identification: read: Connection reset by peer); see",
        ),
        (
            "Bad owner or permissions on /c",
            "protocol",
            "ssh ended without a connection (Bad owner or permissions on /c)",
        ),
    ],
)
def test_what_ssh_says_is_told_in_our_words(said: str, kind: str, text: str) -> None:
    error = why(DESTINATION, said)
    assert isinstance(error, ConnectError)
    assert (error.kind, error.host) == (kind, "n1")
    assert error.text.startswith(text)


def test_a_new_host_key_that_is_accepted(launchpad: Launchpad, hosts: Hosts) -> None:
    forget(hosts)
    assert lines(hosts.run(launchpad, *SSH, "--accept-new-host-keys", "-H", "n1", "true")) == []
    assert public(hosts.hosts[0].host_keys[0]) in hosts.known_hosts.read_text()
    change_key(hosts)
    assert "n1  host key: " in refusal(hosts.run(launchpad, *SSH, "--accept-new-host-keys", "-H", "n1", "true"))


def test_a_machine_without_ssh(launchpad: Launchpad) -> None:
    launchpad.environ["PATH"] = str(launchpad.folder)
    done = launchpad.run("run", *SSH, "-H", "127.0.0.2", "true")
    assert done.returncode == 2
    assert "which can't be run here (No such file or directory); install openssh-client" in done.stderr


# Chosen without being asked for.


@pytest.mark.parametrize("where", ["CertificateFile", "beside the key"])
def test_a_users_certificate(launchpad: Launchpad, tmp_path: Path, where: str) -> None:
    authority = keygen(tmp_path / "authority")
    with Hosts(launchpad, tmp_path / "ssh", f"TrustedUserCAKeys {authority}.pub\nLogLevel VERBOSE") as hosts:
        refuse(hosts)
        argv = ["ssh-keygen", "-q", "-s", authority, "-I", "mine", "-n", USER, f"{hosts.identity}.pub"]
        subprocess.run(argv, check=True, timeout=DEADLINE)
        if where == "CertificateFile":
            certificate = Path(f"{hosts.identity}-cert.pub").rename(tmp_path / "certificate")
            hosts.configure(f"CertificateFile {certificate}\n")
        assert lines(hosts.run(launchpad, "-H", "n1", "echo", "hello")) == ["[0] hello"]
        assert "Accepted publickey" in (log := hosts.hosts[0].log.read_text())
        assert "ID mine" in log


def test_a_hosts_certificate(launchpad: Launchpad, tmp_path: Path) -> None:
    authority = keygen(tmp_path / "authority")
    folder = tmp_path / "ssh"
    with Hosts(launchpad, folder, f"HostCertificate {folder}/n1/host_ed25519-cert.pub") as hosts:
        argv = [
            "ssh-keygen",
            "-q",
            "-s",
            authority,
            "-I",
            "n1",
            "-h",
            "-n",
            "127.0.0.2",
            f"{hosts.hosts[0].host_keys[0]}.pub",
        ]
        subprocess.run(argv, check=True, timeout=DEADLINE)
        hosts.hosts[0].stop()
        hosts.hosts[0].start()
        hosts.known_hosts.write_text(f"@cert-authority [127.0.0.*]:* {public(authority)}\n")
        assert "certificate authority" in refusal(hosts.run(launchpad, "--ssh", "paramiko", "-H", "n1", "true"))
        assert lines(hosts.run(launchpad, "-H", "n1", "echo", "hello")) == ["[0] hello"]


def test_a_connection_that_is_kept(launchpad: Launchpad, hosts: Hosts) -> None:
    """It serves once the key is no longer taken, and stays."""
    path = launchpad.scratch / "cm"
    hosts.configure(f"Host n1\n ControlPath {path}\n")
    argv = ["ssh", "-F", hosts.ssh_config, "-M", "-N", "n1"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            wait_until(path.exists, "the connection")
            refuse(hosts)
            assert lines(hosts.run(launchpad, "-H", "n1:2", "echo", "hello")) == ["[0] hello", "[1] hello"]
            assert refusal(hosts.run(launchpad, "--ssh", "paramiko", "-H", "n1", "true"))
            assert master.poll() is None
        finally:
            master.terminate()


def test_our_connection_does_not_become_one_that_is_kept(launchpad: Launchpad, hosts: Hosts) -> None:
    path = launchpad.scratch / "cm"
    hosts.configure(f"Host n1\n ControlPath {path}\n ControlMaster auto\n ControlPersist 60\n")
    assert lines(hosts.run(launchpad, *SSH, "-H", "n1", "true")) == []
    assert not path.exists()


@pytest.fixture
def reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Why a host with this configuration needs ssh; `~` is a folder of the test's own."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setattr(choice, "home", lambda: str(home))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def ask(settings: str) -> str:
        file = tmp_path / "config"
        file.write_text(f"{settings}\nUserKnownHostsFile {tmp_path}/known_hosts\nGlobalKnownHostsFile /dev/null\n")
        config = SshConfig(str(file))
        choice._has_ticket.cache_clear()
        return needs_ssh(config, KnownHosts(), config.lookup("n1"))

    yield ask
    choice._has_ticket.cache_clear()


@pytest.mark.parametrize(
    "setting",
    [
        "CertificateFile /a/certificate",
        "PKCS11Provider /usr/lib/token.so",
        "RevokedHostKeys /etc/ssh/revoked",
        "HostbasedAuthentication yes",
        "PubkeyAuthentication no",
        "PreferredAuthentications password,keyboard-interactive",
    ],
)
def test_a_setting_that_only_ssh_follows(reason: Callable[[str], str], setting: str) -> None:
    assert reason(setting) == setting


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "PKCS11Provider none",
        "PreferredAuthentications publickey,password",
        "ControlPath /nowhere/cm",
    ],
)
def test_a_setting_that_needs_no_ssh(reason: Callable[[str], str], setting: str) -> None:
    assert reason(setting) == ""


def test_the_setting_of_a_jump_host_counts(reason: Callable[[str], str]) -> None:
    text = "Host n1\n ProxyJump n2\nHost n2\n ProxyJump n3\nHost n3\n PKCS11Provider /p.so\n ProxyJump n1\nHost *"
    assert reason(text) == "n3: PKCS11Provider /p.so"


def test_kerberos_needs_a_ticket(reason: Callable[[str], str], tmp_path: Path) -> None:
    klist = tmp_path / "klist"
    for code, expected in ((1, ""), (0, "GSSAPIAuthentication yes")):
        klist.write_text(f"#!/bin/sh\nexit {code}\n")
        klist.chmod(0o755)
        assert reason("GSSAPIAuthentication yes") == expected
        assert reason("GSSAPIAuthentication no") == ""


def test_a_security_key(reason: Callable[[str], str], tmp_path: Path) -> None:
    """Its public part is enough; a private part can't be made without a device, so this one is played."""
    plain = keygen(tmp_path / "plain")
    key = tmp_path / "touch"
    key.write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    assert reason(f"IdentityFile {plain}\nIdentityFile {key}") == f"the security key {key}"
    assert reason(f"IdentityFile {plain}") == ""
    begin, *body = plain.read_text().splitlines()
    data = base64.b64decode("".join(body[:-1])).replace(
        b"\0\0\0\x0bssh-ed25519", b"\0\0\0\x1ask-ssh-ed25519@openssh.com", 1
    )
    key.write_text(f"{begin}\n{base64.encodebytes(data).decode()}{body[-1]}\n")
    assert reason(f"IdentityFile {key}") == f"the security key {key}"
    (tmp_path / "home" / ".ssh" / "id_ed25519_sk").write_text(key.read_text())
    assert reason("") == f"the security key {tmp_path}/home/.ssh/id_ed25519_sk"


def test_paramiko_can_be_asked_for_nevertheless(launchpad: Launchpad, hosts: Hosts) -> None:
    """It skips what is beside the key and is no certificate; ssh is played by one that only answers questions."""
    programs = launchpad.folder / "bin"
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(f'#!/bin/sh\n[ "$1" = -G ] || exit 255\nexec {shutil.which("ssh")} "$@"\n')
    ssh.chmod(0o755)
    Path(f"{hosts.identity}-cert.pub").touch()
    launchpad.environ["PATH"] = f"{programs}:{launchpad.environ['PATH']}"
    expected = "n1  protocol: ssh ended without a connection (and without a word); try ssh n1"
    assert refusal(hosts.run(launchpad, "-H", "n1", "true")) == expected
    assert lines(hosts.run(launchpad, "--ssh", "paramiko", "-H", "n1", "echo", "hello")) == ["[0] hello"]


# Prompts.


@pytest.fixture
def terminal(launchpad: Launchpad) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*args: object, **environ: str) -> Terminal:
        opened.append(Terminal(launchpad.argv(*args), launchpad, {"NO_COLOR": "1", **environ}, 100))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            one.end()


def test_the_user_is_asked_once_for_all_hosts(
    launchpad: Launchpad, hosts: Hosts, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    key = keygen(tmp_path / "locked", passphrase="open sesame")
    for host in hosts.hosts:
        host.authorized_keys.write_text("")
        host.authorize(key)
    hosts.ssh_config.write_text(
        hosts.ssh_config.read_text().replace("BatchMode yes", "").replace(str(hosts.identity), str(key))
    )
    one = terminal("run", "--ssh-config", hosts.ssh_config, *SSH, "-H", "n1,n2", "echo", "hello")
    one.expect("Enter passphrase for key '[^']+': $")
    shown = "\n".join(launchpad.survivors())
    one.type("wrong\n")
    one.expect("Enter passphrase for key '[^']+': $")
    one.type("open sesame\n")
    one.expect(r"\[n\d \d\] hello")
    one.expect(r"\[n\d \d\] hello")
    one.rest()
    assert one.end() == 0
    assert "sesame" not in shown


def test_a_host_key_is_asked_about(hosts: Hosts, terminal: Callable[..., Terminal]) -> None:
    forget(hosts)
    hosts.ssh_config.write_text(hosts.ssh_config.read_text().replace("BatchMode yes", ""))
    one = terminal("run", "--ssh-config", hosts.ssh_config, *SSH, "-H", "n1", "echo", "hello")
    one.expect(r"key fingerprint is SHA256:[\s\S]*\(yes/no.*\)\? $")
    one.type("yes\n")
    one.expect(r"\[0\] hello")
    one.rest()
    assert one.end() == 0
    assert public(hosts.hosts[0].host_keys[0]) in hosts.known_hosts.read_text()


def test_a_password_is_asked_for_where_a_key_is_not_enough(
    launchpad: Launchpad, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    """Without --ssh: paramiko has tried the key by then. Ctrl-C at the prompt leaves nothing."""
    settings = "PasswordAuthentication yes\nAuthenticationMethods publickey,password\nPermitRootLogin yes"
    with Hosts(launchpad, tmp_path / "ssh", settings) as hosts:
        hosts.configure("BatchMode no")
        one = terminal("run", "--ssh-config", hosts.ssh_config, "-H", "n1", "true")
        one.expect(rf"{USER}@127\.0\.0\.2's password: $")
        one.type("\x03")
        one.rest()
        assert one.end() == 130
        wait_until(lambda: not launchpad.survivors(), "ssh and its helper to end", show=launchpad.survivors)


def test_hosts_ask_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that paramiko reaches, and those that ssh does: a secret must not be typed into another's prompt."""
    one = connector.Connector(HostOptions())
    monkeypatch.setattr(connector, "_ask", lambda _: str(one._terminal.locked()))
    assert one._prompt("a's password: ") == "True"
    assert not one._terminal.locked()
    one.abandon()
