"""What an ssh_config says of a host; where ssh itself can be asked, it is."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.transport.ssh import config as ssh_config
from launchpad.transport.ssh.config import CONNECT_SECONDS, Destination, Hop, SshConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a system folder of the test's own."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(ssh_config, "SYSTEM_FOLDER", str(tmp_path / "etc"))
    return folder


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Destination]:
    """Look a host up in a file with this text."""

    def up(text: str, host: str = "n1", user: str = "", port: int = 0) -> Destination:
        file = tmp_path / "config"
        file.write_text(text)
        return SshConfig(str(file)).lookup(host, user, port)

    return up


def test_without_any_file_a_host_is_itself(home: Path, tmp_path: Path) -> None:
    found = SshConfig().lookup("n1")
    assert found == Destination(
        name="n1",
        address="n1",
        user=getpass.getuser(),
        port=22,
        known_hosts_files=(f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2"),
        global_known_hosts_files=(f"{tmp_path}/etc/ssh_known_hosts", f"{tmp_path}/etc/ssh_known_hosts2"),
    )
    assert found.connect_timeout == CONNECT_SECONDS


def test_the_zone_of_an_address_is_no_token(look: Callable[..., Destination]) -> None:
    assert look("Host *\n HostName %h\n", "fe80::1%eth0").address == "fe80::1%eth0"
    assert look("", "fe80::1%eth0").place == "[fe80::1%eth0]:22"


def test_the_users_file_comes_before_the_systems(home: Path, tmp_path: Path) -> None:
    (home / ".ssh" / "config").write_text("Host n1\n Port 2201\n")
    (tmp_path / "etc" / "ssh_config").write_text("Port 2202\nUser system\nHost n1\n HostName 10.0.0.1\n")
    found = SshConfig().lookup("n1")
    assert (found.port, found.user, found.address) == (2201, "system", "10.0.0.1")
    assert SshConfig().lookup("n2").port == 2202


def test_a_named_file_replaces_both(home: Path, tmp_path: Path, look: Callable[..., Destination]) -> None:
    (home / ".ssh" / "config").write_text("Port 2201\n")
    (tmp_path / "etc" / "ssh_config").write_text("User system\n")
    found = look("HostName other\n")
    assert (found.port, found.user, found.address) == (22, getpass.getuser(), "other")


def test_what_the_caller_gives_wins_and_is_what_match_and_tokens_see(look: Callable[..., Destination]) -> None:
    text = "Match user bob\n HostName bobs\nHost *\n User carol\n Port 7\n ProxyCommand nc %h %p as %r\n"
    found = look(text, user="bob", port=2200)
    assert (found.user, found.port, found.address) == ("bob", 2200, "bobs")
    assert found.proxy_command == "nc bobs 2200 as bob"
    assert look(text).proxy_command == "nc n1 7 as carol"


def test_all_that_is_read(look: Callable[..., Destination], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "/keys")
    found = look("""
        Host n1
          HostName %h.example.org
          User bob   # a comment
          Port=2222
          IdentityFile "~/.ssh/my key"
          IdentityFile ${KEYS}/%r@%h
          IdentityFile ${KEYS}/%r@%h
          IdentitiesOnly yes
          IdentityAgent %d/agent
          UserKnownHostsFile ~/.ssh/one "%d/.ssh/number two"
          GlobalKnownHostsFile none
          HostKeyAlias alias
          ConnectTimeout 1m5s
    """)
    assert found == Destination(
        name="n1",
        address="n1.example.org",
        user="bob",
        port=2222,
        identity_files=(f"{home}/.ssh/my key", "/keys/bob@n1.example.org"),
        identities_only=True,
        identity_agent=f"{home}/agent",
        known_hosts_files=(f"{home}/.ssh/one", f"{home}/.ssh/number two"),
        global_known_hosts_files=(),
        host_key_alias="alias",
        connect_timeout=65.0,
    )


@pytest.mark.parametrize(
    ("value", "environ", "expected"),
    [
        ("", {}, ""),
        ("", {"SSH_AUTH_SOCK": "/run/a"}, "/run/a"),
        ("IdentityAgent none", {"SSH_AUTH_SOCK": "/run/a"}, ""),
        ("IdentityAgent SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": "/run/a"}, "/run/a"),
        ("IdentityAgent $OTHER", {"OTHER": "/run/b"}, "/run/b"),
        ("IdentityAgent ${OTHER}", {"OTHER": "/run/b"}, "/run/b"),
        ("IdentityAgent /run/%u", {"USER": "me", "LOGNAME": "me"}, "/run/me"),
    ],
)
def test_the_agent(
    look: Callable[..., Destination],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    environ: dict[str, str],
    expected: str,
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert look(value).identity_agent == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("gate", (Hop("gate"),)),
        ("bob@gate:2222", (Hop("gate", "bob", 2222),)),
        ("a,bob@b,c:22", (Hop("a"), Hop("b", "bob"), Hop("c", "", 22))),
        ("ssh://bob@gate:2222", (Hop("gate", "bob", 2222),)),
        ("[::1]:2222", (Hop("::1", "", 2222),)),
        ("gate-%h", (Hop("gate-n1"),)),
        ("none", ()),
    ],
)
def test_jump_hosts(look: Callable[..., Destination], value: str, expected: tuple[Hop, ...]) -> None:
    assert look(f"ProxyJump {value}").proxy_jump == expected


def test_of_jump_and_command_the_first_counts(look: Callable[..., Destination]) -> None:
    assert look("ProxyJump gate\nProxyCommand nc %h").proxy_command == ""
    assert look("ProxyCommand nc %h 2>&1 # not a comment\nProxyJump gate").proxy_jump == ()
    assert look("ProxyCommand nc %h 2>&1").proxy_command == "nc n1 2>&1"
    assert look('ProxyCommand "a b" "$HOME/${X}" 100%%').proxy_command == '"a b" "$HOME/${X}" 100%'
    assert look("Host n1\n ProxyJump none\nHost *\n ProxyCommand nc").proxy_command == ""


def test_include_is_followed(home: Path, look: Callable[..., Destination]) -> None:
    (home / ".ssh" / "config.d").mkdir()
    (home / ".ssh" / "config.d" / "10-port").write_text("Port 2210\n")
    (home / ".ssh" / "config.d" / "20-port").write_text("Port 2220\nUser twenty\n")
    (home / ".ssh" / "nested").write_text('Include "~/.ssh/config.d/*"\n')
    found = look("Include nested not-there/*\nHost n1\n HostName last\n")
    assert (found.port, found.user, found.address) == (2210, "twenty", "last")


def test_an_included_files_blocks_count_where_the_including_block_does(
    home: Path, look: Callable[..., Destination]
) -> None:
    (home / ".ssh" / "inner").write_text("User inner\nHost n1 n2\n Port 2200\nMatch all\n HostKeyAlias all\n")
    text = "Host n1 n3\n Include inner\n HostName after\nHost *\n ConnectTimeout 3\n"
    n1, n2, n3 = (look(text, host) for host in ("n1", "n2", "n3"))
    assert (n1.user, n1.port, n1.host_key_alias, n1.address) == ("inner", 2200, "all", "after")
    assert (n2.user, n2.port, n2.host_key_alias, n2.address) == (getpass.getuser(), 22, "", "n2")
    assert (n3.user, n3.port, n3.host_key_alias, n3.address) == ("inner", 22, "all", "after")
    assert n1.connect_timeout == n2.connect_timeout == 3


def test_an_included_files_host_ends_with_the_file(home: Path, look: Callable[..., Destination]) -> None:
    (home / ".ssh" / "inner").write_text("Host other\n User other\n")
    assert look("Include inner\nPort 2200\n").port == 2200


def test_a_negated_pattern(look: Callable[..., Destination]) -> None:
    text = "Host * !gate*\n ProxyJump gate1\n"
    assert look(text, "n1").proxy_jump == (Hop("gate1"),)
    assert look(text, "gate1").proxy_jump == ()


def test_a_match_that_can_not_be_judged_does_not_hold(look: Callable[..., Destination]) -> None:
    assert look("Match localnetwork 10.0.0.0/8\n Port 1\nMatch tagged x\n Port 2\n").port == 22


def test_match_exec(look: Callable[..., Destination]) -> None:
    assert look('Match exec "test %h = n1"\n Port 2200\nMatch exec false\n User no\n').port == 2200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Port 1\nHost\n", "config:2: 'Host' is no ssh_config setting"),
        ('Host "n1\n', """config:1: '"n1': No closing quotation"""),
        ("Match host\n", "config:1: Match host needs a value"),
        ("Port ssh\n", "ssh's configuration of n1: port ssh: not a port; give one from 1 to 65535"),
        ("ConnectTimeout soon\n", "connecttimeout soon: not a time; write seconds, or 1m30s"),
        ("IdentityFile ~/%Q\n", "launchpad doesn't know the token %Q"),
        ("IdentityFile ${NOT_SET_AT_ALL}/x\n", "NOT_SET_AT_ALL is not set"),
        ("ProxyJump a:b:c\n", "proxyjump a:b:c: not a jump host"),
        ("Include config\n", "config:1: Include .*config: Include goes deeper than 16 files"),
        ("CanonicalizeHostname yes\n", "ssh's configuration of n1 lacks 'canonicaldomains'"),
    ],
)
def test_a_wrong_setting_is_named(
    home: Path, tmp_path: Path, look: Callable[..., Destination], text: str, message: str
) -> None:
    (home / ".ssh" / "config").symlink_to(tmp_path / "config")
    with pytest.raises(UsageError, match=message):
        look(text)


def test_a_named_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"^--ssh-config /not/there: no such file; name one in the format of"):
        SshConfig("/not/there")


@pytest.mark.parametrize(
    ("host", "user"),
    [("-oProxyCommand=x", ""), ("a b", ""), ("$(x)", ""), ("", ""), ("n1", "a\nPort 1"), ("n1", "`x`")],
)
def test_names_that_a_shell_might_run_are_refused(look: Callable[..., Destination], host: str, user: str) -> None:
    with pytest.raises(UsageError, match="name that ssh takes"):
        look("", host, user)


def test_a_user_without_a_name(look: Callable[..., Destination], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any user id."""

    def nobody() -> str:
        raise KeyError

    monkeypatch.setattr(getpass, "getuser", nobody)
    with pytest.raises(UsageError, match="has no name here; set USER"):
        look("")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed (openssh-client)")
def test_as_ssh_itself_reads_it(tmp_path: Path, look: Callable[..., Destination]) -> None:
    inner = tmp_path / "inner"
    inner.write_text("Host a\n User inner\nHost b\n Port 5\n")
    text = f"""
        Host a b !c
          Include {inner}
          HostName %h.example
        Host c
          Include {inner}
        Match originalhost a,b !user inner
          Port 6
        Match all
          User "last"
          Port 7
    """
    for host in ("a", "b", "c"):
        found = look(text, host)
        argv = ["ssh", "-G", "-F", str(tmp_path / "config"), host]
        told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
        said = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
        assert (found.address, found.user, str(found.port)) == (said["hostname"], said["user"], said["port"]), host
