"""What ssh's configuration says of a host: the real ssh is asked, and where versions differ a script plays another."""

from __future__ import annotations

import errno
import getpass
import os
import pwd
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from launchpad.errors import ConnectError, UsageError
from launchpad.transport.ssh import config, query
from launchpad.transport.ssh.config import CONNECT_SECONDS, Destination, Hop, SshConfig
from tests.support.command import DEADLINE, wait_until
from tests.support.ssh_config import needs_ssh
from tests.support.ssh_config import system as system

Look = Callable[..., Destination]
Play = Callable[[str], Path]

ME = pwd.getpwuid(os.getuid())


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Look a host up in a file with this text."""

    def up(text: str, host: str = "n1", user: str = "", port: int = 0) -> Destination:
        file = tmp_path / "config"
        file.write_text(text)
        return SshConfig(str(file)).lookup(host, user, port)

    return up


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Put a script in the place of ssh; the folder it lies in."""

    def ssh(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return ssh


@pytest.fixture
def no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without ssh, and a home with no configuration."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path / "etc"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_dir=str(home)))
    return home


@needs_ssh
def test_without_settings_a_host_is_itself(look: Look) -> None:
    found = look("", "N1")
    assert found == Destination(
        name="N1",
        address="n1",
        user=ME.pw_name,
        port=22,
        known_hosts_files=(f"{ME.pw_dir}/.ssh/known_hosts", f"{ME.pw_dir}/.ssh/known_hosts2"),
        global_known_hosts_files=("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"),
    )
    assert found.connect_timeout == CONNECT_SECONDS


@needs_ssh
def test_the_zone_of_an_address_is_no_token(look: Look) -> None:
    assert look("Host *\n HostName %h\n", "fe80::1%eth0").address == "fe80::1%eth0"
    assert look("", "fe80::1%eth0").place == "[fe80::1%eth0]:22"


@needs_ssh
def test_what_the_caller_gives_wins_and_is_what_match_and_tokens_see(look: Look) -> None:
    text = "Match user bob\n HostName bobs\nHost *\n User carol\n Port 7\n ProxyCommand nc %h %p as %r\n"
    found = look(text, user="bob", port=2200)
    assert (found.user, found.port, found.address) == ("bob", 2200, "bobs")
    assert found.proxy_command == "nc bobs 2200 as bob"
    assert look(text).proxy_command == "nc n1 7 as carol"


@needs_ssh
def test_all_that_is_used(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "/keys")
    found = look("""
        Host n1
          HostName %h.example.org
          User bob   # a comment
          Port=2222
          IdentityFile "~/.ssh/my key"
          IdentityFile ${KEYS}/%r@%h
          IdentityFile ${KEYS}/%r@%h
          IdentityFile %d/%u-%i-%n-%p-100%%
          IdentitiesOnly yes
          IdentityAgent %d/agent
          UserKnownHostsFile ~/.ssh/one "%d/.ssh/number two" /three
          GlobalKnownHostsFile none
          HostKeyAlias alias
          ConnectTimeout 1m5s
    """)
    assert found == Destination(
        name="n1",
        address="n1.example.org",
        user="bob",
        port=2222,
        identity_files=(
            f"{ME.pw_dir}/.ssh/my key",
            "/keys/bob@n1.example.org",
            f"{ME.pw_dir}/{ME.pw_name}-{ME.pw_uid}-n1-2222-100%",
        ),
        identities_only=True,
        identity_agent=f"{ME.pw_dir}/agent",
        known_hosts_files=(f"{ME.pw_dir}/.ssh/one", f"{ME.pw_dir}/.ssh/number two", "/three"),
        global_known_hosts_files=(),
        host_key_alias="alias",
        connect_timeout=65.0,
    )


@needs_ssh
def test_values_that_mean_nothing(look: Look) -> None:
    found = look("IdentityFile none\nUserKnownHostsFile none\nConnectTimeout 0\nProxyCommand none\n")
    assert found.identity_files == ()
    assert (found.known_hosts_files, found.proxy_command, found.connect_timeout) == ((), "", CONNECT_SECONDS)


@needs_ssh
@pytest.mark.parametrize(
    ("value", "environ", "expected"),
    [
        ("", {}, ""),
        ("", {"SSH_AUTH_SOCK": "/run/a"}, "/run/a"),
        ("IdentityAgent none", {"SSH_AUTH_SOCK": "/run/a"}, ""),
        ("IdentityAgent SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": "/run/a"}, "/run/a"),
        ("IdentityAgent $OTHER", {"OTHER": "/run/b"}, "/run/b"),
        ("IdentityAgent ${OTHER}", {"OTHER": "/run/b"}, "/run/b"),
        ("IdentityAgent /run/%u", {}, f"/run/{ME.pw_name}"),
    ],
)
def test_the_agent(
    look: Look, monkeypatch: pytest.MonkeyPatch, value: str, environ: dict[str, str], expected: str
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert look(value).identity_agent == expected


@needs_ssh
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
def test_jump_hosts(look: Look, value: str, expected: tuple[Hop, ...]) -> None:
    assert look(f"ProxyJump {value}").proxy_jump == expected


@needs_ssh
def test_of_jump_and_command_the_first_counts(look: Look) -> None:
    assert look("ProxyJump gate\nProxyCommand nc %h").proxy_command == ""
    assert look("ProxyCommand nc %h 2>&1 # not a comment\nProxyJump gate").proxy_jump == ()
    assert look("ProxyCommand nc %h 2>&1").proxy_command == "nc n1 2>&1"
    assert look('ProxyCommand "a b" "$HOME/${X}" 100%%').proxy_command == '"a b" "$HOME/${X}" 100%'


@needs_ssh
def test_a_file_is_read_as_ssh_reads_it(tmp_path: Path, look: Look) -> None:
    inner = tmp_path / "inner"
    inner.write_text("Host a\n User inner\nHost b\n Port 5\n")
    text = f"""
        Host a b !c
          Include {tmp_path}/inn*
          HostName %h.example
        Host c
          Include {inner}
        Match originalhost a,b !user inner
          Port 6
        Match exec "test %n = c"
          HostName executed
        Match all
          User "last"
          Port 7
    """
    found = {host: look(text, host) for host in ("a", "b", "c")}
    assert {host: (one.address, one.user, one.port) for host, one in found.items()} == {
        "a": ("a.example", "inner", 7),
        "b": ("b.example", "last", 5),
        "c": ("executed", "last", 7),
    }


@needs_ssh
def test_a_match_exec_that_talks_and_leaves_something_running(look: Look, tmp_path: Path) -> None:
    """What it says is no setting, and what it leaves is not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = f'Match exec "echo port 1; echo port 2 >&2; (read line <{pipe}) & true"\n Port 2200\n'
    assert look(text).port == 2200
    with pipe.open("w"):  # opens once it is being read: the process lives, and ends now
        pass


@needs_ssh
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Port 1\nHost\n",
            r'config line 2: no argument after keyword "host"; correct it and try ssh -G -F /.*/config n1$',
        ),
        (
            "Bogus 1\nMore 2\n",
            "^ssh's configuration of n1: /.*/config: line 1: Bad configuration option: bogus; ",
        ),
        ("Match foo bar\n", "config line 1: Bad Match condition: Unsupported Match attribute foo; correct"),
        ("ConnectTimeout soon\n", "config line 1: invalid time value; correct it"),
        ("ProxyJump a:b:c\n", 'config line 1: Invalid ProxyJump "a:b:c"'),
        ("HostName %Q\n", "unknown key %Q"),
        ("Include {file}\n", "Too many recursive configuration includes; correct it and try ssh -G -F /"),
        ("IdentityFile ~/%Q\n", "^ssh's configuration of n1: ~/%Q: launchpad doesn't know the token %Q"),
        ("IdentityFile ${NOT_SET_AT_ALL}/x\n", "NOT_SET_AT_ALL is not set"),
        ("IdentityFile /dev/zero\n", "^ssh's configuration of n1: /dev/zero: it is a device; name a file$"),
        ("UserKnownHostsFile /dev/zero\n", "^ssh's configuration of n1: /dev/zero: it is a device; name a file$"),
        ("GlobalKnownHostsFile /dev/null /dev/zero\n", "/dev/zero: it is a device; name a file$"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, look: Look, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        look(text.replace("{file}", str(tmp_path / "config")))
    assert "\n" not in str(caught.value)


def test_a_named_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"^--ssh-config /not/there: no such file; name one in the format of"):
        SshConfig("/not/there")


@pytest.mark.parametrize(
    ("host", "user"),
    [
        *(
            ("-oProxyCommand=x", ""),
            ("a b", ""),
            ("$(x)", ""),
            ("", ""),
            ("bob@n1", ""),
            ("ssh://n1", ""),
            ("a\\b", ""),
        ),
        *(("n1", "a\nPort 1"), ("n1", "`x`"), ("n1", "-x")),
    ],
)
def test_names_that_mean_something_to_ssh_or_a_shell_are_refused(look: Look, host: str, user: str) -> None:
    with pytest.raises(UsageError, match="name that ssh takes"):
        look("", host, user)


# Asking


def test_what_ssh_is_asked(look: Look, play: Play, tmp_path: Path) -> None:
    folder = play('echo "$@" >${0%/*}/words')
    look("", "n1", "ann", 2200)
    assert (folder / "words").read_text() == f"-G -T -F {tmp_path}/config -l ann -p 2200 -- n1\n"
    SshConfig().lookup("n1")
    assert (folder / "words").read_text() == "-G -T -- n1\n"


def test_all_hosts_are_asked_at_once_and_each_question_once(play: Play) -> None:
    """Each ssh waits for all three of them."""
    folder = play("cd ${0%/*}; echo $6 $4 >>asked; until [ $(wc -l <asked) = 3 ]; do sleep 0.01; done; echo port 7")
    config = SshConfig()
    questions = [("a", "u", 1), ("b", "u", 1), ("a", "u", 2)]
    for question in [*questions, *questions]:
        config.ask(*question)
    found = [config.lookup(*question).port for question in [*questions, *questions]]
    assert found == [7] * 6
    assert len((folder / "asked").read_text().splitlines()) == 3


def test_what_older_versions_leave_unexpanded(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenSSH 7.9 prints it."""
    monkeypatch.setenv("RUN", "/run/me")
    play("""cat <<'END'
user ann
hostname n1.example.org
port 22
identitiesonly no
identityagent ${RUN}/%r
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile ~/.ssh/known_hosts ~/.ssh/known_hosts2
identityfile ~/.ssh/id_rsa
identityfile ~/.ssh/id_dsa
identityfile ~/.ssh/id_ecdsa
identityfile ~/.ssh/id_ed25519
connecttimeout none
END
""")
    found = SshConfig().lookup("n1")
    assert found.identity_agent == "/run/me/ann"
    assert found.identity_files is None
    assert found.known_hosts_files == (f"{ME.pw_dir}/.ssh/known_hosts", f"{ME.pw_dir}/.ssh/known_hosts2")


def test_an_option_that_this_build_of_ssh_lacks_is_no_error(play: Play) -> None:
    complaint = '/etc/ssh/ssh_config line 53: Unsupported option \\"gssapiauthentication\\"'
    play(f'echo "{complaint}" >&2; echo port 7')
    assert SshConfig().lookup("n1").port == 7
    play(f'echo "{complaint}" >&2; echo "config: line 2: Bad configuration option: x" >&2; exit 255')
    with pytest.raises(UsageError, match=r"^ssh's configuration of n1: config: line 2: Bad configuration option: x; "):
        SshConfig().lookup("n1")


def test_an_ssh_that_is_not_opensshs(play: Play) -> None:
    play("exit 1")
    with pytest.raises(UsageError, match=r"of n1: ssh -G exited with code 1; correct it and try ssh -G n1$"):
        SshConfig().lookup("n1")


def test_an_answer_that_does_not_come(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "ANSWER_SECONDS", 2.0)
    folder = play("echo $$ >${0%/*}/pid; sleep 600 & wait")
    with pytest.raises(UsageError, match=r"^ssh -G n1 takes more than 2 s; fix a Match exec that hangs"):
        SshConfig().lookup("n1")
    session = (folder / "pid").read_text().strip()
    wait_until(lambda: not members(session), "what ssh had started to be gone", show=lambda: members(session))


def test_closing_ends_what_is_being_asked(play: Play) -> None:
    folder = play("sleep 600 & echo $$ >${0%/*}/new; mv ${0%/*}/new ${0%/*}/pid; wait")
    config = SshConfig()
    errors: list[BaseException] = []

    def lookup() -> None:
        try:
            config.lookup("n1")
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=lookup)
    thread.start()
    wait_until((folder / "pid").exists, "ssh to start")
    config.ask("n2")
    config.close()
    thread.join(DEADLINE)
    assert [str(error) for error in errors] == [
        f"ssh's configuration of n1: ssh -G exited with code -{signal.SIGKILL:d}; correct it and try ssh -G n1"
    ]
    session = (folder / "pid").read_text().strip()
    wait_until(lambda: not members(session), "what ssh had started to be gone", show=lambda: members(session))
    with pytest.raises(ConnectError, match=r"given up; the run is ending$"):
        config.ask("n3")


def members(session: str) -> list[str]:
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, leader = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if leader == session and state not in "ZX":
            found.append(path.parent.name)
    return found


# Without ssh


def test_without_ssh_and_a_configuration_the_defaults_hold(no_ssh: Path, system: Path) -> None:
    config = SshConfig()
    assert config.lookup("n1") == Destination(
        name="n1",
        address="n1",
        user="me",
        port=22,
        known_hosts_files=(f"{no_ssh}/.ssh/known_hosts", f"{no_ssh}/.ssh/known_hosts2"),
        global_known_hosts_files=(f"{system}/ssh_known_hosts", f"{system}/ssh_known_hosts2"),
    )
    given = config.lookup("n1", "bob", 2200)
    assert (given.user, given.port) == ("bob", 2200)


def test_without_ssh_a_configuration_can_not_be_read(no_ssh: Path, system: Path, look: Look, tmp_path: Path) -> None:
    mend = r"is read by ssh, which can't be run here \(No such file or directory\); install openssh-client, or remove"
    with pytest.raises(UsageError, match=f"^{tmp_path}/config {mend}"):
        look("")
    for file in (system / "ssh_config", no_ssh / ".ssh" / "config"):
        file.write_text("")
        with pytest.raises(UsageError, match=f"^{file} {mend}"):
            SshConfig().ask("n1")


def test_an_ssh_that_can_not_be_started(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(config, "Query", none_left)
    with pytest.raises(ConnectError, match=r"can't start ssh here: Too many open files$"):
        look("")


def test_a_user_without_a_name(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs under any user id: ssh refuses to work there."""

    def nobody(*_: object) -> str:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UsageError, match=rf"config is read by ssh, which knows no user with the id {os.getuid()}; add"):
        look("")
    monkeypatch.setattr(getpass, "getuser", lambda: "someone")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = SshConfig().lookup("n1")
    assert (found.user, found.known_hosts_files[0]) == ("someone", f"{tmp_path}/.ssh/known_hosts")
    monkeypatch.setattr(getpass, "getuser", nobody)
    with pytest.raises(UsageError, match="has no name here; set USER"):
        SshConfig().lookup("n1")
