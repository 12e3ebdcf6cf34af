"""Which host keys are accepted, and the messages about the others."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import Destination
from launchpad.transport.ssh.known_hosts import KnownHosts, fingerprint, lookup_name
from tests.support.sshd import keygen, public
from tests.support.unhurried import UNHURRIED

Keys = dict[str, tuple[str, paramiko.PKey]]

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Keys by name: the known_hosts line, and the key as a server presents it."""
    folder = tmp_path_factory.mktemp("keys")
    made = {}
    for name, kind in (("a", "ed25519"), ("b", "ed25519"), ("c", "ecdsa"), ("r", "rsa")):
        line = public(keygen(folder / name, kind))
        kind, text = line.split()
        made[name] = (line, paramiko.PKey.from_type_string(kind, base64.b64decode(text)))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@pytest.fixture
def n1(file: Path) -> Destination:
    return Destination("n1", "10.0.0.1", "bob", 22, known_hosts_files=(str(file),))


def refused(n1: Destination, key: paramiko.PKey, **options: bool) -> str:
    with pytest.raises(ConnectError) as caught:
        KnownHosts(**options).check(n1, key)
    assert caught.value.kind == "host key"
    assert caught.value.host == "n1"
    return caught.value.text


@pytest.mark.parametrize(
    "hosts",
    [
        "10.0.0.1",
        "other,10.0.0.1",
        "10.0.0.*",
        "10.0.0.?",
        "!10.0.0.2,10.*",
    ],
)
def test_a_known_key(keys: Keys, file: Path, n1: Destination, hosts: str) -> None:
    file.write_text(f"{hosts} {keys['a'][0]} a comment\n")
    KnownHosts().check(n1, keys["a"][1])


@pytest.mark.parametrize("hosts", ["10.0.0.11", "10.0.0.*,!10.0.0.1", "[10.0.0.1]:2222", "[10.0.0.1]", "10.0.0.?,!*.1"])
def test_a_line_for_other_hosts(keys: Keys, file: Path, n1: Destination, hosts: str) -> None:
    file.write_text(f"{hosts} {keys['a'][0]}\n")
    assert "which is in no known_hosts file" in refused(n1, keys["a"][1])


def test_a_port_is_part_of_the_name(keys: Keys, file: Path, n1: Destination) -> None:
    odd = n1._replace(port=2222)
    file.write_text(f"[10.0.0.1]:2222 {keys['a'][0]}\n")
    KnownHosts().check(odd, keys["a"][1])
    file.write_text(f"[10.0.0.*]:2222 {keys['a'][0]}\n")
    KnownHosts().check(odd, keys["a"][1])


def test_a_nonstandard_port_may_share_the_key_of_the_host(keys: Keys, file: Path, n1: Destination) -> None:
    """Like ssh, but a different key there doesn't make this one a changed key."""
    odd = n1._replace(port=2222)
    file.write_text(f"10.0.0.1 {keys['a'][0]}\n")
    KnownHosts().check(odd, keys["a"][1])
    assert "which is in no known_hosts file" in refused(odd, keys["b"][1])


def test_names_are_case_insensitive(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text(f"Host.Example {keys['a'][0]}\n")
    KnownHosts().check(n1._replace(address="HOST.example"), keys["a"][1])


@pytest.mark.parametrize("port", [22, 2222])
def test_hashed_names(keys: Keys, file: Path, n1: Destination, port: int) -> None:
    one = n1._replace(port=port)
    file.write_text(f"{lookup_name(one)} {keys['a'][0]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True, timeout=30)
    assert file.read_text().startswith("|1|")
    KnownHosts().check(one, keys["a"][1])
    assert f"{file}:1 has the ed25519 key" in refused(one, keys["b"][1])
    assert "no known_hosts file" in refused(one._replace(address="10.0.0.2"), keys["b"][1])


def test_an_alias_replaces_host_and_port(keys: Keys, file: Path, n1: Destination) -> None:
    alias = n1._replace(port=2222, host_key_alias="cluster")
    file.write_text(f"cluster {keys['a'][0]}\n")
    KnownHosts().check(alias, keys["a"][1])
    file.write_text(f"[10.0.0.1]:2222,10.0.0.1 {keys['a'][0]}\n")
    assert "| sed 's/^[^ ]*/cluster/' >>" in refused(alias, keys["a"][1])


def test_all_files_are_used(keys: Keys, tmp_path: Path, n1: Destination) -> None:
    (tmp_path / "two").write_text(f"10.0.0.1 {keys['a'][0]}\n")
    (tmp_path / "global").write_text(f"10.0.0.1 {keys['c'][0]}\n")
    everywhere = n1._replace(
        known_hosts_files=(str(tmp_path / "not there"), str(tmp_path / "two")),
        global_known_hosts_files=(str(tmp_path / "global"),),
    )
    known = KnownHosts()
    known.check(everywhere, keys["a"][1])
    known.check(everywhere, keys["c"][1])
    assert known.key_types(everywhere) == ("ssh-ed25519", "ecdsa-sha2-nistp256")


def test_a_revoked_key_is_refused_even_where_it_is_known(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text(f"10.0.0.1 {keys['a'][0]}\n@revoked * {keys['a'][0]}\n")
    for accept_new in (False, True):
        text = refused(n1, keys["a"][1], accept_new=accept_new)
        assert f"which is revoked at {file}:2: don't trust it" in text
    assert f"{file}:1 has the ed25519 key" in refused(n1, keys["b"][1])


def test_a_certificate_authority_is_mentioned_but_not_used(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text(f"@cert-authority *.1 {keys['a'][0]}\n")
    text = refused(n1, keys["a"][1])
    assert f"({file}:1 names a certificate authority for it, but paramiko knows only plain keys)" in text
    file.write_text(f"@cert-authority *.1 {keys['a'][0]}\n10.0.0.1 {keys['b'][0]}\n")
    KnownHosts().check(n1, keys["b"][1])


def test_broken_lines_are_skipped(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_bytes(
        b"# comment\n\n10.0.0.1\n10.0.0.1 ssh-rsa\n10.0.0.1 ssh-rsa !!!\n|1|x|y ssh-rsa AAAA\n|1|AAAA ssh-rsa AAAA\n"
        b"@unknown 10.0.0.1 ssh-rsa AAAA\n\xff\xfe ssh-rsa AAAA\n" + f"  10.0.0.1\t{keys['a'][0]}\n".encode()
    )
    KnownHosts().check(n1, keys["a"][1])


@UNHURRIED
@given(text=st.text(max_size=80))
def test_no_line_can_break_the_parser(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(f"|1|{text}\n10.0.0.1 {text}\n@{text}\n{text}")
    KnownHosts().key_types(Destination("n1", "10.0.0.1", "bob", 22, known_hosts_files=(str(path),)))


def test_an_unknown_key_comes_with_its_fingerprint_and_the_command(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text("")
    text = refused(n1, keys["r"][1])
    file.write_text(f"10.0.0.1 {keys['r'][0]}\n")
    argv = ["ssh-keygen", "-lf", str(file)]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
    assert printed.split()[1] == fingerprint(keys["r"][1].asbytes())
    assert text == (
        f"10.0.0.1:22 presents the rsa key {printed.split()[1]}, which is in no known_hosts file; compare it with the "
        "host's own (ssh-keygen -lf /etc/ssh/ssh_host_rsa_key.pub there), then run ssh-keyscan -t rsa -p 22 10.0.0.1 "
        f">> {file}, or pass --accept-new-host-keys"
    )


def test_behind_a_jump_host_only_ssh_itself_can_accept_a_key(keys: Keys, n1: Destination) -> None:
    assert "then run ssh n1 once, or" in refused(n1._replace(proxy_command="nc"), keys["a"][1])


def test_a_changed_key_comes_with_the_line_and_the_command(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text(f"# mine\n10.0.0.1 {keys['a'][0]}\n")
    for accept_new in (False, True):
        text = refused(n1, keys["b"][1], accept_new=accept_new)
        assert f"{file}:2 has the ed25519 key {fingerprint(keys['a'][1].asbytes())}" in text
        assert f"run ssh-keygen -f {file} -R 10.0.0.1 and accept the new one" in text
    assert file.read_text().count("\n") == 2


def test_a_key_of_another_type_is_not_new(keys: Keys, file: Path, n1: Destination) -> None:
    """A man in the middle may well present a key of a type that isn't known yet."""
    file.write_text(f"10.0.0.1 {keys['a'][0]}\n")
    assert f"{file}:1 has the ed25519 key" in refused(n1, keys["c"][1], accept_new=True)


def test_new_keys_are_appended_by_many_threads(keys: Keys, tmp_path: Path, n1: Destination) -> None:
    file = tmp_path / "new" / "folder" / "known_hosts"
    known = KnownHosts(accept_new=True)
    hosts = [n1._replace(address=f"h{n}", known_hosts_files=(str(file), "/not/there")) for n in range(50)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda host: known.check(host, keys["a"][1]), hosts + hosts))
    assert sorted(file.read_text().splitlines()) == sorted(f"h{n} {keys['a'][0]}" for n in range(50))
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for host in hosts:
        KnownHosts().check(host, keys["a"][1])


def test_a_key_is_appended_on_its_own_line(keys: Keys, file: Path, n1: Destination) -> None:
    file.write_text("other ssh-rsa AAAA")
    KnownHosts(accept_new=True).check(n1, keys["a"][1])
    assert file.read_text() == f"other ssh-rsa AAAA\n10.0.0.1 {keys['a'][0]}\n"


def test_a_key_that_cannot_be_stored(keys: Keys, tmp_path: Path, n1: Destination) -> None:
    (tmp_path / "file").touch()
    nowhere = n1._replace(known_hosts_files=(str(tmp_path / "file" / "known_hosts"),))
    text = refused(nowhere, keys["a"][1], accept_new=True)
    assert f"can't write its key to {tmp_path}/file/known_hosts" in text
    assert "name a file for it with UserKnownHostsFile" in refused(
        n1._replace(known_hosts_files=()), keys["a"][1], accept_new=True
    )


@pytest.mark.parametrize("make", [lambda n1: n1, lambda n1: n1._replace(port=2222)])
def test_ssh_finds_what_was_written(
    keys: Keys, file: Path, n1: Destination, make: Callable[[Destination], Destination]
) -> None:
    KnownHosts(accept_new=True).check(make(n1), keys["a"][1])
    argv = ["ssh-keygen", "-F", lookup_name(make(n1)), "-f", str(file)]
    assert subprocess.run(argv, capture_output=True, timeout=30).returncode == 0
