"""Which hosts a job runs on and how many ranks each gets: --hosts, hostfiles, --include and --exclude. Pure.

A hostfile has a host a line, as Open MPI, MPICH, DeepSpeed or horovod write it:

    node1 slots=4                      # or cpu=, count=; slots-max= is a limit. Comments: this, // and /* … */
    node2:4 user=ann                   # MPICH; also username=
    ann@[fe80::1] port=2222 slots="2"  # an IPv6 address may stand without brackets where it has no :N
    ^node3                             # not this one, wherever else it stands

Where these launchers clash, the choice is:

- A host without a number has one rank in MPICH, one per core in Open MPI, and is an error in DeepSpeed. Here it has as
  many as --nproc says, else one. A number that --nproc contradicts is refused.
- A host that is named again adds up, as in Open MPI (DeepSpeed refuses it); a mention without a number adds one.
  Where no mention has a number, --nproc goes before their count.
- slots-max= without slots= is the number of slots, as in Open MPI.
- MPICH's binding= is refused: ranks are not bound to cores. So are words that Open MPI skips.
- DeepSpeed's lists of slots (`worker-1:0,2`) are refused: they choose GPUs, not only how many ranks there are.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from launchpad.errors import UsageError

# What --nproc may say.
Nproc = int | Literal["auto", "cpu", "gpu"]

MOST_SLOTS = 999_999
MOST_PORT = 65_535

_KEYS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(("slots-max", "slots_max", "max-slots", "max_slots"), "slots-max"),
    **dict.fromkeys(("user", "username", "user-name", "user_name"), "user"),
    "port": "port",
}

_COMMENT = re.compile(r"/\*.*?(\*/|\Z)|(?:#|//)[^\n]*", re.DOTALL)
_WORD = re.compile(r"""=|"[^"]*"|'[^']*'|[^\s="']+|["']""")


@dataclass(frozen=True)
class Host:
    """One host, named once or several times."""

    name: str  # as given: an alias of ssh's, a host name or an address (IPv6 without brackets)
    user: str = ""  # "": as ssh_config says
    port: int = 0  # 0: as ssh_config says
    slots: int | None = None  # ranks; None: not said
    where: str = ""  # where it is named first: "--hosts" or "hosts.txt, line 3"
    mentions: int = 1  # how often it is named: its ranks where neither slots nor --nproc says


class _Mention(NamedTuple):
    host: Host
    most: int | None = None  # slots-max


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read the value of --hosts: `ann@node1:4,node2,[::1]:2`. Raises UsageError that names the part that is wrong."""
    if not text.strip():
        raise UsageError("--hosts is empty; name the hosts, like --hosts node1:4,node2:4")
    words = [part.strip() for part in text.split(",")]
    for word in words:
        if not word:
            raise UsageError(f"--hosts {_show(text)}: a comma has no host beside it; write node1:4,node2:4, no spaces")
        if len(word.split()) > 1:
            raise UsageError(f"--hosts: {_show(word)}: hosts are separated by commas; write node1:4,node2:4, no spaces")
    return _merge(_Mention(_host(word, "--hosts")) for word in words)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read a hostfile's text; `path` is for messages. Raises UsageError that names the file and the line."""
    mentions: list[_Mention] = []
    excluded: dict[str, str] = {}  # the line, by name
    for number, words in _lines(text, path):
        where = f"{path}, line {number}"
        if words[0].startswith("^"):
            excluded[_excluded(words, where)] = where
        else:
            mentions.append(_mention(words, where))
    if not mentions:
        raise UsageError(f"{path} names no hosts; write one a line, like node1 slots=4")
    hosts = _merge(mentions)
    for name, where in excluded.items():
        if all(host.name.lower() != name for host in hosts):
            raise UsageError(f"{where}: ^{name} excludes none of the file's hosts, which are {_names(hosts)}")
    kept = tuple(host for host in hosts if host.name.lower() not in excluded)
    if not kept:
        raise UsageError(f"{path} excludes every host that it names; take a ^ line out")
    return kept


def choose_hosts(hosts: Sequence[Host], include: str, exclude: str) -> tuple[Host, ...]:
    """The hosts that --include names (none given: all) without those that --exclude names, in their order."""
    chosen = _filtered(hosts, include, "--include") if include else {host.name for host in hosts}
    if exclude:
        chosen -= _filtered(hosts, exclude, "--exclude")
    kept = tuple(host for host in hosts if host.name in chosen)
    if not kept:
        raise UsageError(f"--exclude {_show(exclude)} leaves no host; exclude fewer of {_names(hosts)}")
    return kept


def slots_of(hosts: Sequence[Host], nproc: Nproc | None) -> tuple[Nproc, ...]:
    """How many ranks each host gets; `nproc` is what --nproc gave, None where it was not given."""
    for host in hosts:
        if None not in (host.slots, nproc) and host.slots != nproc:
            raise UsageError(
                f"{host.where}: {host.name} has {host.slots} ranks there, and --nproc asks for {nproc}; leave out "
                "--nproc, or the numbers beside the hosts"
            )
    return tuple(host.slots or nproc or host.mentions for host in hosts)


def _lines(text: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each line that has some, quotes still on, by the line's number."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")

    def number_at(place: int) -> int:
        return text.count("\n", 0, place) + 1

    def blank(comment: re.Match[str]) -> str:
        if comment[1] == "":
            raise UsageError(f"{path}, line {number_at(comment.start())}: the comment has no end; close it with */")
        return "\n" * comment[0].count("\n") or " "

    if "\0" in text:
        raise UsageError(f"{path}, line {number_at(text.index(chr(0)))}: a NUL byte; a hostfile is plain text")
    for number, line in enumerate(_COMMENT.sub(blank, text).split("\n"), start=1):
        words = _WORD.findall(line)
        if words:
            yield number, words


def _mention(words: Sequence[str], where: str) -> _Mention:
    """Read the words of one line: a host, then KEY = VALUE as often as there are."""
    host = _host(_unquoted(words[0], where), where)
    found = {}
    if host.user:
        found["user"] = host.user
    if host.slots is not None:
        found["slots"] = str(host.slots)
    for at in range(1, len(words), 3):
        word, equals, value = [*words[at : at + 3], "", ""][:3]
        if word == "=" or equals != "=" or value in ("", "="):
            raise UsageError(
                f"{where}: {_show(word)} is out of place; a line is one host and its settings, like node1 slots=4"
            )
        if word == "binding":
            raise UsageError(f"{where}: launchpad binds no ranks to cores; take binding= out")
        key = _KEYS.get(word)
        if key is None:
            raise UsageError(f"{where}: there is no setting {_show(word)}; there are {', '.join(_KEYS)}")
        if key in found:
            raise UsageError(f"{where}: {host.name} has its {key} twice on the line; keep one")
        found[key] = _unquoted(value, where)
        match key:
            case "user":
                _check_user(found[key], where)
            case "port":
                _number(found[key], MOST_PORT, f"port={found[key]}", where)
            case _:
                _number(found[key], MOST_SLOTS, f"{word}={found[key]}", where)
    most = int(found["slots-max"]) if "slots-max" in found else None
    slots = int(found["slots"]) if "slots" in found else most
    changed = dataclasses.replace(host, user=found.get("user", ""), port=int(found.get("port", 0)), slots=slots)
    return _Mention(changed, most)


def _excluded(words: Sequence[str], where: str) -> str:
    host = _host(words[0][1:], where)
    if len(words) > 1 or host.user or host.slots:
        raise UsageError(f"{where}: ^ takes the name of one host and nothing else, like ^{host.name}")
    return host.name.lower()


def _host(word: str, where: str) -> Host:
    """Read [USER@]HOST[:N]."""
    user, at, rest = word.rpartition("@")
    if at:
        _check_user(user, where)
    name, colon, count = _split_count(rest, where)
    if not name:
        raise UsageError(f"{where}: {_show(word)} names no host; write node1, node1:4 or ann@node1:4")
    if name.startswith("-"):
        raise UsageError(f"{where}: {_show(name)} would be an option to ssh; a host's name does not begin with '-'")
    if not (_made_of(name, "._-") or _is_ipv6(name)):
        raise UsageError(f"{where}: {_show(name)} is no host's name; it has letters, digits, '.', '_' and '-' only")
    return Host(name, user, slots=_number(count, MOST_SLOTS, word, where) if colon else None, where=where)


def _split_count(text: str, where: str) -> tuple[str, str, str]:
    """HOST, ":" where N follows, N."""
    if text.startswith("["):
        name, closed, rest = text[1:].partition("]")
        if not closed or (rest and rest[0] != ":") or not _is_ipv6(name):
            raise UsageError(f"{where}: {_show(text)}: brackets hold an IPv6 address; write [::1] or [::1]:4")
        return name, rest[:1], rest[1:]
    name, colon, count = text.rpartition(":")
    if ":" not in name:
        return (name, colon, count) if colon else (text, "", "")
    if count.isdecimal() and _is_ipv6(name):
        whole = f", or [{text}] for the address alone" if _is_ipv6(text) else ""
        raise UsageError(
            f"{where}: {text}: an IPv6 address with a number of ranks needs brackets; write [{name}]:{count}{whole}"
        )
    if not _is_ipv6(text):
        raise UsageError(f"{where}: {_show(text)} is neither HOST:N nor an IPv6 address; write node1:4 or [::1]:4")
    return text, "", ""


def _merge(mentions: Iterable[_Mention]) -> tuple[Host, ...]:
    """One entry for each host, where it is named first."""
    merged: dict[str, _Mention] = {}
    for mention in mentions:
        key = mention.host.name.lower()
        where = mention.host.where
        host, most = merged[key] = _sum(merged[key], mention) if key in merged else mention
        if most is not None and (host.slots or 0) > most:
            raise UsageError(
                f"{where}: {host.name} has {host.slots} slots, and slots-max={most}; lower the one or raise the other"
            )
    return tuple(mention.host for mention in merged.values())


def _sum(first: _Mention, again: _Mention) -> _Mention:
    old, new = first.host, again.host
    if (old.user, old.port) != (new.user, new.port):
        line = f" (first: {old.where})" if old.where != new.where else ""
        raise UsageError(
            f"{new.where}: {new.name} is named again with another user or port{line}; give it the same, or keep one"
        )
    counted = old.slots is not None or new.slots is not None
    slots = (old.slots or old.mentions) + (new.slots or new.mentions) if counted else None
    limits = [most for most in (first.most, again.most) if most is not None]
    return _Mention(
        dataclasses.replace(old, slots=slots, mentions=old.mentions + new.mentions), min(limits, default=None)
    )


def _filtered(hosts: Sequence[Host], text: str, option: str) -> set[str]:
    """The names of the hosts that a filter names, by name or pattern, separated by @ or commas."""
    found: set[str] = set()
    for part in re.split("[@,]", text):
        pattern = part.strip()
        if not pattern:
            raise UsageError(f"{option} {_show(text)}: a name is empty; write names or patterns, like node1,worker-*")
        names = _matching(hosts, pattern)
        if not names and _matching(hosts, pattern.rpartition(":")[0]):
            raise UsageError(
                f"{option} {_show(text)}: a list of slots chooses GPUs, which launchpad does not; name the hosts "
                "alone, and choose GPUs with --env CUDA_VISIBLE_DEVICES=0,2"
            )
        if not names:
            raise UsageError(
                f"{option} {_show(text)}: {_show(pattern)} is none of the hosts, which are {_names(hosts)}"
            )
        found |= names
    return found


def _matching(hosts: Sequence[Host], pattern: str) -> set[str]:
    lower = pattern.lower()
    if lower.startswith("[") and lower.endswith("]") and _is_ipv6(lower[1:-1]):
        lower = lower[1:-1]
    exact = {host.name for host in hosts if host.name.lower() == lower}
    return exact or {host.name for host in hosts if fnmatch.fnmatchcase(host.name.lower(), lower)}


def _number(text: str, most: int, shown: str, where: str) -> int:
    digits = text.lstrip("0")
    # int() refuses what has thousands of digits, and takes digits of other scripts.
    if not (text.isascii() and digits.isdecimal() and len(digits) <= len(str(most)) and int(digits) <= most):
        raise UsageError(f"{where}: {_show(shown)}: the number is a whole one from 1 to {most}")
    return int(digits)


def _check_user(user: str, where: str) -> None:
    if not user or user.startswith("-") or not _made_of(user, "._-+$\\"):
        raise UsageError(f"{where}: {_show(user)} is no user's name; write ann@node1, or name the user in ssh_config")


def _unquoted(word: str, where: str) -> str:
    if word[0] not in "\"'":
        return word
    if len(word) == 1:
        raise UsageError(f"{where}: a quote ({word}) has no end; close it, or take it out")
    return word[1:-1]


def _made_of(text: str, signs: str) -> bool:
    return all(letter.isalnum() or letter in signs for letter in text)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return _made_of(text, "._-:%")  # a zone (fe80::1%eth0) may have any letters, as Python sees it


def _names(hosts: Sequence[Host]) -> str:
    listed = ", ".join(host.name for host in hosts[:20])
    return listed if len(hosts) <= 20 else f"{listed} … ({len(hosts)} in all)"


def _show(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
