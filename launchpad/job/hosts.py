"""Which hosts a job runs on and how many ranks each gets: --hosts, hostfiles, --include and --exclude. Pure.

A hostfile has one host per line, in the syntax of Open MPI, MPICH, DeepSpeed or Horovod:

    node1 slots=4                      # or cpu=, count=; slots-max= is a limit. Comments: this, // and /* … */
    node2:4 user=ann                   # MPICH; also username=
    ann@[fe80::1] port=2222 slots="2"  # an IPv6 address needs brackets only before :N
    ^node3                             # exclude this host, wherever else it is listed

Where these launchers disagree:

- A host without a number gets one rank in MPICH, one per core in Open MPI, and is an error in DeepSpeed. Here it gets
  --nproc ranks, or one. A number that contradicts --nproc is refused.
- The slots of a host that is listed again are added up, as in Open MPI (DeepSpeed refuses this); a mention without a
  number adds one. If no mention has a number, --nproc takes precedence over the number of mentions.
- slots-max= without slots= is the number of slots, as in Open MPI.
- MPICH's binding= is refused, because --bind says how ranks are bound. So are words that Open MPI ignores.
- DeepSpeed's slot lists (`worker-1:0,2`) are refused: they select GPUs, not just a number of ranks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from launchpad.errors import UsageError
from launchpad.named import NamedTuple

# A value of --nproc.
Nproc = int | Literal["auto", "cpu", "gpu", "xpu", "hpu", "npu", "mlu", "musa", "mtia", "privateuseone"]

# Those that torch knows by these names, and can count.
ACCELERATORS = ("xpu", "hpu", "npu", "mlu", "musa", "mtia", "privateuseone")

MOST_SLOTS = 999_999

# So many hosts are named on one line.
NAMED = 8
MOST_PORT = 65_535

# One of these is set in a batch allocation (allocation.py, slurm.py), whose nodes are then the hosts. They stand here
# because a job without an allocation doesn't load those modules.
ALLOCATION_VARIABLES = frozenset(
    "FLUX_JOB_ID FLUX_URI PBS_NODEFILE LSB_DJOB_HOSTFILE LSB_MCPU_HOSTS PE_HOSTFILE OAR_NODEFILE SLURM_JOB_ID".split()
)

_KEYS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(("slots-max", "slots_max", "max-slots", "max_slots"), "slots-max"),
    **dict.fromkeys(("user", "username", "user-name", "user_name"), "user"),
    "port": "port",
}

# Most jobs have no hostfile, and compile none of these.
_COMMENT = r"(?s)/\*.*?(\*/|\Z)|(?:#|//)[^\n]*"
_WORD = r"""=|"[^"]*"|'[^']*'|[^\s="']+|["']"""


class Host(NamedTuple):
    """One host, listed once or several times."""

    name: str  # as given: an ssh alias, a host name or an address (IPv6 without brackets)
    user: str = ""  # "": as ssh_config says
    port: int = 0  # 0: as ssh_config says
    slots: int | None = None  # ranks; None: not given
    where: str = ""  # where it is first listed: "--hosts" or "hosts.txt, line 3"
    mentions: int = 1  # how often it is listed: its number of ranks if neither slots nor --nproc is given
    here: bool = False  # the machine that launchpad runs on; set after parsing


class _Mention(NamedTuple):
    host: Host
    most: int | None = None  # slots-max


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the value of --hosts: `ann@node1:4,node2,[::1]:2`. Raises UsageError that names the wrong part."""
    if not text.strip():
        raise UsageError("--hosts is empty; list the hosts, like --hosts node1:4,node2:4")
    words = [part.strip() for part in text.split(",")]
    for word in words:
        if not word:
            raise UsageError(f"--hosts {_show(text)}: a host is missing next to a comma; write node1:4,node2:4")
        if len(word.split()) > 1:
            raise UsageError(f"--hosts: {_show(word)}: separate hosts with commas, without spaces: node1:4,node2:4")
    return _merge(_Mention(_host(word, "--hosts")) for word in words)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse a hostfile's text; `path` is for messages. Raises UsageError that names the file and the line."""
    mentions: list[_Mention] = []
    excluded: dict[str, str] = {}  # by name: the line that excludes it
    for number, words in _lines(text, path):
        where = f"{path}, line {number}"
        if words[0].startswith("^"):
            excluded[_excluded(words, where)] = where
        else:
            mentions.append(_mention(words, where))
    if not mentions:
        raise UsageError(f"{path} lists no hosts; write one per line, like node1 slots=4")
    hosts = _merge(mentions)
    for name, where in excluded.items():
        if all(host.name.lower() != name for host in hosts):
            raise UsageError(f"{where}: ^{name} matches none of the file's hosts, which are {_names(hosts)}")
    kept = tuple(host for host in hosts if host.name.lower() not in excluded)
    if not kept:
        raise UsageError(f"{path} excludes every host that it lists; remove a ^ line")
    return kept


def hosts_of_slots(listed: Iterable[tuple[str, int, str]]) -> tuple[Host, ...]:
    """The hosts of (name, number of slots, where that is written), one entry per host. Raises UsageError.

    The slots are mentions of the host, so --nproc takes precedence over them.
    """
    mentions = []
    for name, slots, where in listed:
        host = _host(name, where)
        if host.user or host.slots is not None:
            raise UsageError(f"{where}: {_show(name)} is not a host name; use letters, digits, '.', '_' and '-' only")
        mentions.append(_Mention(host._replace(mentions=slots)))
    return _merge(mentions)


def choose_hosts(hosts: Sequence[Host], include: str, exclude: str) -> tuple[Host, ...]:
    """The hosts that match --include (all by default) and do not match --exclude, in the given order."""
    chosen = _filtered(hosts, include, "--include") if include else {host.name for host in hosts}
    if exclude:
        chosen -= _filtered(hosts, exclude, "--exclude")
    kept = tuple(host for host in hosts if host.name in chosen)
    if not kept:
        raise UsageError(f"--exclude {_show(exclude)} leaves no hosts; exclude fewer of {_names(hosts)}")
    return kept


def some_of(names: Sequence[str]) -> str:
    """The names on one line: the first ones and the last, if there are many."""
    return ", ".join(names if len(names) <= NAMED else [*names[: NAMED - 1], "…", names[-1]])


def slots_of(hosts: Sequence[Host], nproc: Nproc | None) -> tuple[Nproc, ...]:
    """How many ranks each host gets; `nproc` is the value of --nproc, or None."""
    for host in hosts:
        if None not in (host.slots, nproc) and host.slots != nproc:
            raise UsageError(
                f"{host.where}: {host.name} is given {host.slots} ranks, but --nproc asks for {nproc}; leave out "
                "--nproc, or the numbers next to the hosts"
            )
    return tuple(host.slots or nproc or host.mentions for host in hosts)


def _lines(text: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the words of each line that isn't empty; quotes are kept."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")

    def number_at(position: int) -> int:
        return text.count("\n", 0, position) + 1

    def blank(comment: re.Match[str]) -> str:
        if comment[1] == "":
            raise UsageError(f"{path}, line {number_at(comment.start())}: the comment is not closed; end it with */")
        return "\n" * comment[0].count("\n") or " "

    if "\0" in text:
        raise UsageError(f"{path}, line {number_at(text.index(chr(0)))}: NUL byte; a hostfile must be plain text")
    for number, line in enumerate(re.sub(_COMMENT, blank, text).split("\n"), start=1):
        words = re.findall(_WORD, line)
        if words:
            yield number, words


def _mention(words: Sequence[str], where: str) -> _Mention:
    """Parse the words of one line: a host, then any number of KEY = VALUE."""
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
                f"{where}: unexpected {_show(word)}; a line is one host and its settings, like node1 slots=4"
            )
        if word == "binding":
            raise UsageError(f"{where}: remove binding=, and bind ranks with --bind")
        key = _KEYS.get(word)
        if key is None:
            raise UsageError(f"{where}: unknown setting {_show(word)}; the settings are {', '.join(_KEYS)}")
        if key in found:
            raise UsageError(f"{where}: {key} is given twice for {host.name}; keep one")
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
    changed = host._replace(user=found.get("user", ""), port=int(found.get("port", 0)), slots=slots)
    return _Mention(changed, most)


def _excluded(words: Sequence[str], where: str) -> str:
    host = _host(words[0][1:], where)
    if len(words) > 1 or host.user or host.slots:
        raise UsageError(f"{where}: ^ takes one host name and nothing else, like ^{host.name}")
    return host.name.lower()


def _host(word: str, where: str) -> Host:
    """Parse [USER@]HOST[:N]."""
    user, at, rest = word.rpartition("@")
    if at:
        _check_user(user, where)
    name, colon, count = _split_count(rest, where)
    if not name:
        raise UsageError(f"{where}: {_show(word)} has no host name; write node1, node1:4 or ann@node1:4")
    if name.startswith("-"):
        raise UsageError(f"{where}: ssh would take {_show(name)} for an option; a host name can't begin with '-'")
    if not (_made_of(name, "._-") or _is_ipv6(name)):
        raise UsageError(f"{where}: {_show(name)} is not a host name; use letters, digits, '.', '_' and '-' only")
    return Host(name, user, slots=_number(count, MOST_SLOTS, word, where) if colon else None, where=where)


def _split_count(text: str, where: str) -> tuple[str, str, str]:
    """Split HOST[:N] into HOST, the colon and N; without :N both are empty."""
    if text.startswith("["):
        name, closed, rest = text[1:].partition("]")
        if not closed or (rest and rest[0] != ":") or not _is_ipv6(name):
            raise UsageError(f"{where}: {_show(text)}: brackets must enclose an IPv6 address; write [::1] or [::1]:4")
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
    """One entry per host, in the order of first mention."""
    merged: dict[str, _Mention] = {}
    for mention in mentions:
        key = mention.host.name.lower()
        where = mention.host.where
        host, most = merged[key] = _sum(merged[key], mention) if key in merged else mention
        if most is not None and (host.slots or 0) > most:
            raise UsageError(
                f"{where}: {host.name} has {host.slots} slots, but slots-max={most}; lower slots or raise slots-max"
            )
    return tuple(mention.host for mention in merged.values())


def _sum(first: _Mention, again: _Mention) -> _Mention:
    old, new = first.host, again.host
    if (old.user, old.port) != (new.user, new.port):
        line = f" (first: {old.where})" if old.where != new.where else ""
        raise UsageError(
            f"{new.where}: {new.name} is listed again with another user or port{line}; give both the same, or keep one"
        )
    counted = old.slots is not None or new.slots is not None
    slots = (old.slots or old.mentions) + (new.slots or new.mentions) if counted else None
    limits = [most for most in (first.most, again.most) if most is not None]
    return _Mention(old._replace(slots=slots, mentions=old.mentions + new.mentions), min(limits, default=None))


def _filtered(hosts: Sequence[Host], text: str, option: str) -> set[str]:
    """The names of the hosts that match a filter: names or patterns, separated by @ or commas."""
    found: set[str] = set()
    for part in re.split("[@,]", text):
        pattern = part.strip()
        if not pattern:
            raise UsageError(f"{option} {_show(text)}: empty host name; write names or patterns, like node1,worker-*")
        names = _matching(hosts, pattern)
        if not names and _matching(hosts, pattern.rpartition(":")[0]):
            raise UsageError(
                f"{option} {_show(text)}: launchpad does not select GPUs by slot lists; give host names only, and "
                "select GPUs with --env CUDA_VISIBLE_DEVICES=0,2"
            )
        if not names:
            raise UsageError(
                f"{option} {_show(text)}: {_show(pattern)} matches none of the hosts, which are {_names(hosts)}"
            )
        found |= names
    return found


def _matching(hosts: Sequence[Host], pattern: str) -> set[str]:
    lower = pattern.lower()
    if lower.startswith("[") and lower.endswith("]") and _is_ipv6(lower[1:-1]):
        lower = lower[1:-1]
    exact = {host.name for host in hosts if host.name.lower() == lower}
    if exact:
        return exact
    from fnmatch import fnmatchcase

    return {host.name for host in hosts if fnmatchcase(host.name.lower(), lower)}


def _number(text: str, most: int, shown: str, where: str) -> int:
    digits = text.lstrip("0")
    # int() refuses thousands of digits and accepts digits of other scripts.
    if not (text.isascii() and digits.isdecimal() and len(digits) <= len(str(most)) and int(digits) <= most):
        raise UsageError(f"{where}: {_show(shown)}: the number must be a whole number from 1 to {most}")
    return int(digits)


def _check_user(user: str, where: str) -> None:
    if not user or user.startswith("-") or not _made_of(user, "._-+$\\"):
        raise UsageError(f"{where}: {_show(user)} is not a user name; write ann@node1, or set the user in ssh_config")


def _unquoted(word: str, where: str) -> str:
    if word[0] not in "\"'":
        return word
    if len(word) == 1:
        raise UsageError(f"{where}: a quote ({word}) is not closed; close it or remove it")
    return word[1:-1]


def _made_of(text: str, punctuation: str) -> bool:
    return all(letter.isalnum() or letter in punctuation for letter in text)


def _is_ipv6(text: str) -> bool:
    from ipaddress import IPv6Address  # which takes a millisecond to import

    try:
        IPv6Address(text)
    except ValueError:
        return False
    return _made_of(text, "._-:%")  # Python accepts any characters in a zone (fe80::1%eth0)


def _names(hosts: Sequence[Host]) -> str:
    listed = ", ".join(host.name for host in hosts[:20])
    return listed if len(hosts) <= 20 else f"{listed} … ({len(hosts)} in all)"


def _show(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
