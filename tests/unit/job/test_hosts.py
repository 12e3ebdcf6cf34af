"""job/hosts: hosts on the command line and in hostfiles, filters, ranks per host, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.errors import UsageError
from launchpad.job.hosts import Host, Nproc, choose_hosts, parse_hostfile, parse_hosts, slots_of
from tests.support.hostfiles import message
from tests.support.unhurried import UNHURRIED

PATH = "hosts.txt"


def bare(hosts: tuple[Host, ...]) -> list[tuple[str, str, int, int | None]]:
    return [(host.name, host.user, host.port, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [("node1", "", 0, None)]),
        ("node1:4", [("node1", "", 0, 4)]),
        ("ann@a:4,b:2", [("a", "ann", 0, 4), ("b", "", 0, 2)]),
        ("localhost:2", [("localhost", "", 0, 2)]),
        ("10.0.0.7:2,10.0.0.8", [("10.0.0.7", "", 0, 2), ("10.0.0.8", "", 0, None)]),
        ("[fe80::1]:2", [("fe80::1", "", 0, 2)]),
        ("[fe80::1%eth0]:2", [("fe80::1%eth0", "", 0, 2)]),
        ("ann@[::1]", [("::1", "ann", 0, None)]),
        ("fe80::1", [("fe80::1", "", 0, None)]),
        ("fe80::a:b", [("fe80::a:b", "", 0, None)]),
        ("2001:db8:0:0:0:0:0:1", [("2001:db8:0:0:0:0:0:1", "", 0, None)]),
        ("[fe80::1:4]", [("fe80::1:4", "", 0, None)]),
        (" b:1 , a:007 ", [("b", "", 0, 1), ("a", "", 0, 7)]),
        ("DOM\\ann@my_alias.example-1:3", [("my_alias.example-1", "DOM\\ann", 0, 3)]),
        ("a,b,a", [("a", "", 0, None), ("b", "", 0, None)]),
        ("a:2,b,a:3", [("a", "", 0, 5), ("b", "", 0, None)]),
        ("a:2,a", [("a", "", 0, 3)]),
        ("a,a,a:2", [("a", "", 0, 4)]),
        ("a:1,A:1", [("a", "", 0, 2)]),
        ("ann@a:1,ann@a:1", [("a", "ann", 0, 2)]),
        ("rechner-ü:2", [("rechner-ü", "", 0, 2)]),
    ],
)
def test_hosts_on_the_command_line(text: str, expected: list[tuple[str, str, int, int | None]]) -> None:
    hosts = parse_hosts(text)
    assert bare(hosts) == expected
    assert {host.where for host in hosts} == {"--hosts"}


NUMBER = "the number must be a whole number from 1 to 999999"
NAME = "is not a host name; use letters, digits, '.', '_' and '-' only"
USER = "is not a user name; write ann@node1, or set the user in ssh_config"
SPARE_COMMA = "a host is missing next to a comma; write node1:4,node2:4"
BRACKETS = "brackets must enclose an IPv6 address; write [::1] or [::1]:4"
OPTION = "for an option; a host name can't begin with '-'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "--hosts is empty; list the hosts, like --hosts node1:4,node2:4"),
        (" \t", "--hosts is empty; list the hosts, like --hosts node1:4,node2:4"),
        ("a,,b", f"--hosts 'a,,b': {SPARE_COMMA}"),
        ("a,", f"--hosts 'a,': {SPARE_COMMA}"),
        (",", f"--hosts ',': {SPARE_COMMA}"),
        ("a b", "--hosts: 'a b': separate hosts with commas, without spaces: node1:4,node2:4"),
        ("a: 4", "--hosts: 'a: 4': separate hosts with commas, without spaces: node1:4,node2:4"),
        ("b,a:0", f"--hosts: 'a:0': {NUMBER}"),
        ("a:-1", f"--hosts: 'a:-1': {NUMBER}"),
        ("a:", f"--hosts: 'a:': {NUMBER}"),
        ("a:x", f"--hosts: 'a:x': {NUMBER}"),
        ("a:2.0", f"--hosts: 'a:2.0': {NUMBER}"),
        ("a:1_0", f"--hosts: 'a:1_0': {NUMBER}"),
        ("a:0x4", f"--hosts: 'a:0x4': {NUMBER}"),
        ("a:٣", f"--hosts: 'a:٣': {NUMBER}"),
        ("a:1000000", f"--hosts: 'a:1000000': {NUMBER}"),
        ("a:" + "9" * 5000, f"--hosts: 'a:{'9' * 57}…': {NUMBER}"),
        (":4", "--hosts: ':4' has no host name; write node1, node1:4 or ann@node1:4"),
        ("ann@", "--hosts: 'ann@' has no host name; write node1, node1:4 or ann@node1:4"),
        ("ann@:4", "--hosts: 'ann@:4' has no host name; write node1, node1:4 or ann@node1:4"),
        ("@a", f"--hosts: '' {USER}"),
        ("-l@a", f"--hosts: '-l' {USER}"),
        ("ann@bob@a", f"--hosts: 'ann@bob' {USER}"),
        ("-oProxyCommand", f"--hosts: ssh would take '-oProxyCommand' {OPTION}"),
        ("-oProxyCommand=id", f"--hosts: ssh would take '-oProxyCommand=id' {OPTION}"),
        ("ann@-a:4", f"--hosts: ssh would take '-a' {OPTION}"),
        ("a;id", f"--hosts: 'a;id' {NAME}"),
        ("$(id)", f"--hosts: '$(id)' {NAME}"),
        ("a/b", f"--hosts: 'a/b' {NAME}"),
        ("^a", f"--hosts: '^a' {NAME}"),
        ("a%h", f"--hosts: 'a%h' {NAME}"),
        ("a\x00", f"--hosts: 'a\\x00' {NAME}"),
        ("node[1-4]", f"--hosts: 'node[1-4]' {NAME}"),
        ("[::1", f"--hosts: '[::1': {BRACKETS}"),
        ("[::1]4", f"--hosts: '[::1]4': {BRACKETS}"),
        ("[]:4", f"--hosts: '[]:4': {BRACKETS}"),
        ("[fe80::1%$(id)]:4", f"--hosts: '[fe80::1%$(id)]:4': {BRACKETS}"),
        ("[node1]:4", f"--hosts: '[node1]:4': {BRACKETS}"),
        ("::1]:4", "--hosts: '::1]:4' is neither HOST:N nor an IPv6 address; write node1:4 or [::1]:4"),
        ("a:4:2", "--hosts: 'a:4:2' is neither HOST:N nor an IPv6 address; write node1:4 or [::1]:4"),
        ("[::1]:0", f"--hosts: '[::1]:0': {NUMBER}"),
        ("[::1]:", f"--hosts: '[::1]:': {NUMBER}"),
        (
            "::1:4",
            "--hosts: ::1:4: an IPv6 address with a number of ranks needs brackets; write [::1]:4, or [::1:4] for the "
            "address alone",
        ),
        (
            "1:2:3:4:5:6:7:8:9",
            "--hosts: 1:2:3:4:5:6:7:8:9: an IPv6 address with a number of ranks needs brackets; write "
            "[1:2:3:4:5:6:7:8]:9",
        ),
        ("ann@a,a", "--hosts: a is listed again with another user or port; give both the same, or keep one"),
    ],
)
def test_an_error_on_the_command_line_names_the_wrong_part(text: str, expected: str) -> None:
    assert message(parse_hosts, text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", "", 0, None)]),
        ("a\n", [("a", "", 0, None)]),
        ("\ufeffa slots=2\r\nb slots=3\r\n", [("a", "", 0, 2), ("b", "", 0, 3)]),
        ("a\rb", [("a", "", 0, None), ("b", "", 0, None)]),
        ("\n\n  b slots=1 \n\ta\n", [("b", "", 0, 1), ("a", "", 0, None)]),
        # Open MPI
        ("a slots=4\nb cpu = 3\nc count= 2", [("a", "", 0, 4), ("b", "", 0, 3), ("c", "", 0, 2)]),
        ("a slots=2 slots-max=2\nb max_slots=8 slots=4", [("a", "", 0, 2), ("b", "", 0, 4)]),
        ("a max-slots=4\nb slots_max=1", [("a", "", 0, 4), ("b", "", 0, 1)]),
        ("ann@a port=2222\nb username=bob\n", [("a", "ann", 2222, None), ("b", "bob", 0, None)]),
        ("a user-name=ann\nb user_name = bob", [("a", "ann", 0, None), ("b", "bob", 0, None)]),
        ("a slots=\"4\" username='ann'\n\"b\" slots = '2'", [("a", "ann", 0, 4), ("b", "", 0, 2)]),
        (
            "10.0.0.7 slots=2\n::1 slots=3\n[fe80::1]",
            [("10.0.0.7", "", 0, 2), ("::1", "", 0, 3), ("fe80::1", "", 0, None)],
        ),
        ("# c\na # slots=9\n// c\nb // slots=9\nc#d", [("a", "", 0, None), ("b", "", 0, None), ("c", "", 0, None)]),
        ("a /* x */ slots=2 /* /* */\n/* b\n# c */ d", [("a", "", 0, 2), ("d", "", 0, None)]),
        ("# don't /* open\na // nor /* here", [("a", "", 0, None)]),
        ("a slots=2\n^b\nb slots=2\nc\nb", [("a", "", 0, 2), ("c", "", 0, None)]),
        ("^::1\n[::1]\na\n^A.x\na.x", [("a", "", 0, None)]),
        ("a slots=2\nb\na slots=3\na", [("a", "", 0, 6), ("b", "", 0, None)]),
        ("a slots=1 max-slots=2\na", [("a", "", 0, 2)]),
        # MPICH
        ("a:4 user=ann\nb\n[::1]:2\n", [("a", "ann", 0, 4), ("b", "", 0, None), ("::1", "", 0, 2)]),
        # DeepSpeed, horovod
        ("worker-0 slots=4\nworker-1 slots=2", [("worker-0", "", 0, 4), ("worker-1", "", 0, 2)]),
    ],
)
def test_hosts_in_a_file(text: str, expected: list[tuple[str, str, int, int | None]]) -> None:
    assert bare(parse_hostfile(text, PATH)) == expected


def test_a_host_knows_its_line() -> None:
    hosts = parse_hostfile("# ours\n/*\n*/ a\r\n\nb slots=2\na\n", PATH)
    assert [(host.name, host.where, host.mentions) for host in hosts] == [
        ("a", "hosts.txt, line 3", 2),
        ("b", "hosts.txt, line 5", 1),
    ]


KEYS = "slots, cpu, count, slots-max, slots_max, max-slots, max_slots, user, username, user-name, user_name, port"
ONE_HOST = "a line is one host and its settings, like node1 slots=4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "hosts.txt lists no hosts; write one per line, like node1 slots=4"),
        (" \r\n# a\n/* b */", "hosts.txt lists no hosts; write one per line, like node1 slots=4"),
        ("^a", "hosts.txt lists no hosts; write one per line, like node1 slots=4"),
        ("a\n^a", "hosts.txt excludes every host that it lists; remove a ^ line"),
        ("a\nb\n^c", "hosts.txt, line 3: ^c matches none of the file's hosts, which are a, b"),
        ("a\n^a slots=2", "hosts.txt, line 2: ^ takes one host name and nothing else, like ^a"),
        ("a\n^ann@a", "hosts.txt, line 2: ^ takes one host name and nothing else, like ^a"),
        ("a\n^a:2", "hosts.txt, line 2: ^ takes one host name and nothing else, like ^a"),
        ("a\n^", "hosts.txt, line 2: '' has no host name; write node1, node1:4 or ann@node1:4"),
        ("a\n\nb slots=0", f"hosts.txt, line 3: 'slots=0': {NUMBER}"),
        ("a cpu=-1", f"hosts.txt, line 1: 'cpu=-1': {NUMBER}"),
        ("a count=two", f"hosts.txt, line 1: 'count=two': {NUMBER}"),
        ("a slots=''", f"hosts.txt, line 1: 'slots=': {NUMBER}"),
        ("a:0", f"hosts.txt, line 1: 'a:0': {NUMBER}"),
        ("a max-slots=0", f"hosts.txt, line 1: 'max-slots=0': {NUMBER}"),
        ("a port=0", "hosts.txt, line 1: 'port=0': the number must be a whole number from 1 to 65535"),
        ("a port=65536", "hosts.txt, line 1: 'port=65536': the number must be a whole number from 1 to 65535"),
        ("a port=ssh", "hosts.txt, line 1: 'port=ssh': the number must be a whole number from 1 to 65535"),
        (
            "a\nb slots=4 slots-max=2",
            "hosts.txt, line 2: b has 4 slots, but slots-max=2; lower slots or raise slots-max",
        ),
        (
            "a slots=2 slots-max=3\na slots=2",
            "hosts.txt, line 2: a has 4 slots, but slots-max=3; lower slots or raise slots-max",
        ),
        ("a slot=4", f"hosts.txt, line 1: unknown setting 'slot'; the settings are {KEYS}"),
        ("a Slots=4", f"hosts.txt, line 1: unknown setting 'Slots'; the settings are {KEYS}"),
        ("a slots=4 cpu=4", "hosts.txt, line 1: slots is given twice for a; keep one"),
        ("a:4 slots=4", "hosts.txt, line 1: slots is given twice for a; keep one"),
        ("ann@a user=ann", "hosts.txt, line 1: user is given twice for a; keep one"),
        ("a binding=user:0,1", "hosts.txt, line 1: remove binding=, and bind ranks with --bind"),
        ("a 4", f"hosts.txt, line 1: unexpected '4'; {ONE_HOST}"),
        ("a b", f"hosts.txt, line 1: unexpected 'b'; {ONE_HOST}"),
        ("a slots", f"hosts.txt, line 1: unexpected 'slots'; {ONE_HOST}"),
        ("a slots=", f"hosts.txt, line 1: unexpected 'slots'; {ONE_HOST}"),
        ("a slots 4", f"hosts.txt, line 1: unexpected 'slots'; {ONE_HOST}"),
        ("a slots==4", f"hosts.txt, line 1: unexpected 'slots'; {ONE_HOST}"),
        ("a slots=4=5", f"hosts.txt, line 1: unexpected '='; {ONE_HOST}"),
        ("slots=4", f"hosts.txt, line 1: unexpected '='; {ONE_HOST}"),
        ("a b, c", f"hosts.txt, line 1: unexpected 'b,'; {ONE_HOST}"),
        ("a,b", f"hosts.txt, line 1: 'a,b' {NAME}"),
        ("a user=", f"hosts.txt, line 1: unexpected 'user'; {ONE_HOST}"),
        ("a user=''", f"hosts.txt, line 1: '' {USER}"),
        ("a user=-l", f"hosts.txt, line 1: '-l' {USER}"),
        ('a user="ann b"', f"hosts.txt, line 1: 'ann b' {USER}"),
        ("@a", f"hosts.txt, line 1: '' {USER}"),
        ('a user="ann', 'hosts.txt, line 1: a quote (") is not closed; close it or remove it'),
        ('""', "hosts.txt, line 1: '' has no host name; write node1, node1:4 or ann@node1:4"),
        ("a\n-a", f"hosts.txt, line 2: ssh would take '-a' {OPTION}"),
        ("a\nb\n/* c\nd", "hosts.txt, line 3: the comment is not closed; end it with */"),
        ("a\n/*/", "hosts.txt, line 2: the comment is not closed; end it with */"),
        ("a */", f"hosts.txt, line 1: unexpected '*/'; {ONE_HOST}"),
        ("a\r\nb\0\n", "hosts.txt, line 2: NUL byte; a hostfile must be plain text"),
        ("\x7fELF\x02", f"hosts.txt, line 1: '\\x7fELF\\x02' {NAME}"),
        ("\udc80\udcff", f"hosts.txt, line 1: '\\udc80\\udcff' {NAME}"),
        ("é" * 5000 + "!", f"hosts.txt, line 1: '{'é' * 59}…' {NAME}"),
        ("[::1", f"hosts.txt, line 1: '[::1': {BRACKETS}"),
        (
            "2001:db8::5:10 slots=2",
            "hosts.txt, line 1: 2001:db8::5:10: an IPv6 address with a number of ranks needs brackets; write "
            "[2001:db8::5]:10, or [2001:db8::5:10] for the address alone",
        ),
        (
            "a\nb\na port=22",
            "hosts.txt, line 3: a is listed again with another user or port (first: hosts.txt, line 1); give both "
            "the same, or keep one",
        ),
        (
            "ann@a\nbob@a",
            "hosts.txt, line 2: a is listed again with another user or port (first: hosts.txt, line 1); give both "
            "the same, or keep one",
        ),
    ],
)
def test_an_error_in_a_file_names_its_line(text: str, expected: str) -> None:
    assert message(parse_hostfile, text, PATH) == expected


HOSTS = parse_hosts("worker-0:4,worker-1:2,Login,::1")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", "worker-0 worker-1 Login ::1"),
        ("worker-1@worker-0", "", "worker-0 worker-1"),
        ("Login,worker-1", "", "worker-1 Login"),
        (" worker-1 , login ", "", "worker-1 Login"),
        ("worker-*", "", "worker-0 worker-1"),
        ("worker-?,worker-0", "", "worker-0 worker-1"),
        ("WORKER-[1-9]", "", "worker-1"),
        ("*", "*1", "worker-0 Login"),
        ("", "Login", "worker-0 worker-1 ::1"),
        ("::1", "", "::1"),
        ("[::1]", "", "::1"),
        ("", "[::1]@worker-*", "Login"),
        ("worker-*", "worker-0", "worker-1"),
    ],
)
def test_filters_keep_the_order_of_the_hosts(include: str, exclude: str, expected: str) -> None:
    assert [host.name for host in choose_hosts(HOSTS, include, exclude)] == expected.split()


NONE_OF = "matches none of the hosts, which are worker-0, worker-1, Login, ::1"
SLOT_LIST = (
    "launchpad does not select GPUs by slot lists; give host names only, and select GPUs with --env "
    "CUDA_VISIBLE_DEVICES=0,2"
)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("worker-2", "", f"--include 'worker-2': 'worker-2' {NONE_OF}"),
        ("", "worker-0,nod*", f"--exclude 'worker-0,nod*': 'nod*' {NONE_OF}"),
        ("ann@worker-0", "", f"--include 'ann@worker-0': 'ann' {NONE_OF}"),
        ("worker-0@worker-1:0,2", "", f"--include 'worker-0@worker-1:0,2': {SLOT_LIST}"),
        ("", "worker-*:1", f"--exclude 'worker-*:1': {SLOT_LIST}"),
        ("[::1]:0", "", f"--include '[::1]:0': {SLOT_LIST}"),
        ("nobody:0", "", f"--include 'nobody:0': 'nobody:0' {NONE_OF}"),
        (" ", "", "--include ' ': empty host name; write names or patterns, like node1,worker-*"),
        ("", "worker-0@", "--exclude 'worker-0@': empty host name; write names or patterns, like node1,worker-*"),
        ("", "*", "--exclude '*' leaves no hosts; exclude fewer of worker-0, worker-1, Login, ::1"),
        (
            "Login",
            "log*",
            "--exclude 'log*' leaves no hosts; exclude fewer of worker-0, worker-1, Login, ::1",
        ),
    ],
)
def test_an_error_in_a_filter_names_the_option(include: str, exclude: str, expected: str) -> None:
    assert message(choose_hosts, HOSTS, include, exclude) == expected


def test_a_long_list_of_hosts_is_truncated() -> None:
    hosts = tuple(Host(f"n{number}") for number in range(1000))
    assert message(choose_hosts, hosts, "x", "").endswith(", n18, n19 … (1000 in all)")


@pytest.mark.parametrize(
    ("text", "nproc", "expected"),
    [
        ("a,b", None, (1, 1)),
        ("a,b", 3, (3, 3)),
        ("a,b", "auto", ("auto", "auto")),
        ("a:4,b:2", None, (4, 2)),
        ("a:4,b", None, (4, 1)),
        ("a:4,b", 4, (4, 4)),
        ("a,a,b", None, (2, 1)),
        ("a,a,b", 4, (4, 4)),
        ("a,a,b", "gpu", ("gpu", "gpu")),
        ("a:2,a,b", None, (3, 1)),
        ("a:2,a,b", 3, (3, 3)),
    ],
)
def test_a_host_gets_its_own_number_of_ranks_or_nprocs_or_one(
    text: str, nproc: Nproc | None, expected: tuple[Nproc, ...]
) -> None:
    assert slots_of(parse_hosts(text), nproc) == expected


@pytest.mark.parametrize("nproc", [2, "auto", "cpu", "gpu"])
def test_a_number_that_nproc_contradicts_is_refused(nproc: Nproc) -> None:
    problem = "b is given 4 ranks, but --nproc asks for"
    remedy = "leave out --nproc, or the numbers next to the hosts"
    assert message(slots_of, parse_hosts("a,b:4"), nproc) == f"--hosts: {problem} {nproc}; {remedy}"
    hosts = parse_hostfile("a\n\nb slots=4", PATH)
    assert message(slots_of, hosts, nproc) == f"hosts.txt, line 3: {problem} {nproc}; {remedy}"


names = st.from_regex(r"[a-z0-9_.][a-z0-9_.-]{0,8}", fullmatch=True) | st.ip_addresses(v=4).map(str)
addresses = names | st.ip_addresses(v=6).map(str)
users = st.just("") | st.from_regex(r"[a-z_][a-z0-9_-]{0,6}", fullmatch=True)
counts = st.none() | st.integers(1, 999_999)
lists = st.lists(
    st.tuples(addresses, users, st.integers(0, 65_535), counts).map(lambda fields: Host(*fields)),
    min_size=1,
    max_size=6,
    unique_by=lambda host: host.name,
)


def rendered_name(host: Host) -> str:
    at = f"{host.user}@" if host.user else ""
    return at + (f"[{host.name}]" if ":" in host.name else host.name)


@UNHURRIED
@given(hosts=lists)
def test_hosts_rendered_for_the_command_line_parse_back(hosts: list[Host]) -> None:
    text = ",".join(rendered_name(host) + (f":{host.slots}" if host.slots else "") for host in hosts)
    assert parse_hosts(text) == tuple(host._replace(port=0, where="--hosts") for host in hosts)


@UNHURRIED
@given(hosts=lists, data=st.data())
def test_hosts_rendered_for_a_file_parse_back(hosts: list[Host], data: st.DataObject) -> None:
    lines = []
    for host in hosts:
        equals = data.draw(st.sampled_from(["=", " = ", "\t=", "= "]))
        quote = data.draw(st.sampled_from(["", '"', "'"]))
        words = [rendered_name(host)]
        if host.port:
            words.append(f"port{equals}{quote}{host.port}{quote}")
        if host.slots:
            words.append(f"{data.draw(st.sampled_from(['slots', 'cpu', 'count']))}{equals}{quote}{host.slots}{quote}")
        gap = data.draw(st.sampled_from([" ", "\t", " /* c */ "]))
        lines.append(gap.join(words) + data.draw(st.sampled_from(["", " # c", "// c", " "])))
    text = data.draw(st.sampled_from(["\n", "\r\n"])).join(lines) + data.draw(st.sampled_from(["", "\n"]))
    expected = [host._replace(where=f"hosts.txt, line {at}") for at, host in enumerate(hosts, start=1)]
    assert parse_hostfile(text, PATH) == tuple(expected)


@UNHURRIED
@given(mentions=st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(1, 9)), min_size=1, max_size=8))
def test_mentions_add_up_in_any_order(mentions: list[tuple[str, int | None]]) -> None:
    hosts = parse_hosts(",".join(name + (f":{count}" if count else "") for name, count in mentions))
    assert [host.name for host in hosts] == list(dict.fromkeys(name for name, _ in mentions))
    assert sum(int(count) for count in slots_of(hosts, None)) == sum(count or 1 for _, count in mentions)


def result(act: Callable[[], tuple[Host, ...]]) -> tuple[Host, ...] | str:
    try:
        return act()
    except UsageError as error:
        return str(error)


# Text that often gets past the first checks.
words = st.sampled_from(["slots", "port", "user", "::1", "slots=2", *"ab[]:^@*/#=\"'-!,.? \n\r\0é1"])
texts = st.text() | st.lists(words).map("".join)


@UNHURRIED
@given(text=texts)
def test_any_text_gives_hosts_or_a_usage_error(text: str) -> None:
    for found in (result(lambda: parse_hosts(text)), result(lambda: parse_hostfile(text, PATH))):
        if isinstance(found, str):
            assert found.startswith(("--hosts", PATH))
            assert "\n" not in found
        else:
            assert found
            assert all(host.name and host.name[0] != "-" and host.slots != 0 for host in found)


@UNHURRIED
@given(include=texts, exclude=texts)
def test_any_filter_gives_hosts_or_a_usage_error(include: str, exclude: str) -> None:
    chosen = result(lambda: choose_hosts(HOSTS, include, exclude))
    if isinstance(chosen, str):
        assert chosen.startswith(("--include", "--exclude"))
    else:
        assert chosen
        assert [host for host in HOSTS if host in chosen] == list(chosen)
