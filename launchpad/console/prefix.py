"""What stands before a rank's lines: our own label, or --log-line-prefix-template as torchrun fills it in."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from launchpad.errors import UsageError
from launchpad.job.outcome import ranges
from launchpad.named import NamedTuple
from launchpad.protocol.events import STDERR

OPTION = "--log-line-prefix-template"
VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # torchrun reads it where the option is not given, or empty

MACROS = ("role_name", "local_rank", "rank", "hostname")

# The names of so many hosts stand before a line of theirs; of more, only how many there are.
MOST_NAMES = 3

# They would end the line, or move the cursor away from it. A tab is a blank, an escape a colour.
_CONTROL = r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]"
_COLOUR = r"\x1b\[[\d;]*m"


class Prefix(NamedTuple):
    """A rank's prefix, and what one for several ranks is made of."""

    text: str  # with the blank at its end, if it has one
    local_rank: int = -1
    host: str = ""


class PrefixTemplate(NamedTuple):
    """The template, and what it is filled in with besides the rank."""

    text: str
    role: str

    def of(self, rank: int, local_rank: int, host: str) -> Prefix:
        """A rank's prefix."""
        return Prefix(self._filled(str(rank), str(local_rank), host), local_rank, host)

    def of_several(self, prefixes: Mapping[int, Prefix]) -> str:
        """The prefix of ranks that wrote the same: 0-3 is their rank, a,b their host."""
        local_ranks = sorted({one.local_rank for one in prefixes.values()})
        hosts = list(dict.fromkeys(one.host for _, one in sorted(prefixes.items())))
        names = ",".join(hosts) if len(hosts) <= MOST_NAMES else f"{len(hosts)} hosts"
        return self._filled(",".join(ranges(sorted(prefixes))), ",".join(ranges(local_ranks)), names)

    @property
    def has_rank(self) -> bool:
        """Whether a rank's prefix tells its rank."""
        from string import Template

        return "rank" in Template(self.text).get_identifiers()

    def _filled(self, rank: str, local_rank: str, host: str) -> str:
        from string import Template

        return Template(self.text).safe_substitute(role_name=self.role, local_rank=local_rank, rank=rank, hostname=host)


def template_of(text: str, role: str) -> PrefixTemplate | None:
    """The template, if there is one."""
    return PrefixTemplate(text, role) if text else None


def chosen_template(given: str, environ: Mapping[str, str]) -> str:
    """The template that the option or the variable gives, "" for none. Raises UsageError for one that can't be used."""
    text = given or environ.get(VARIABLE, "")
    if text and (found := re.search(_CONTROL, text)):
        raise UsageError(
            f"{OPTION if given else VARIABLE}: it contains {found[0]!r}, which can't stand before a line; leave it out"
        )
    return text


def unknown_macros(template: str) -> list[str]:
    """What looks like a macro in the template, and is none."""
    if "$" not in template:
        return []
    from string import Template

    return [name for name in Template(template).get_identifiers() if name not in MACROS]


def torch_mark(rank: int, stream: int, template: PrefixTemplate | None) -> bytes:
    """What torch puts before a rank's lines on stderr, [rank3]:, if our prefix says the same; else b"".

    It marks the lines of an uncaught exception and of its own log.
    """
    if stream != STDERR or (template is not None and not template.has_rank):
        return b""
    return b"[rank%d]:" % rank


def prefixes(
    nodes: Sequence[Sequence[Any]],
    template: PrefixTemplate | None,
    unnamed: Collection[int] = (),
    programs: Sequence[Sequence[Any]] = (),
    roles: Sequence[Sequence[Any]] = (),
) -> Callable[[int, int, int], Prefix]:
    """Makes the prefix of a rank from its node, rank and local rank; `nodes` are [name, [rank, …]] each.

    Our own is padded to the same length for all: [3], or [name 3] with several nodes; those in `unnamed` don't count.
    `programs` are [name, [rank, …]] each, if there are several: [name program 3].
    """
    names = ["" if node in unnamed else str(name) for node, (name, _) in enumerate(nodes)]
    if template is not None:
        return lambda node, rank, local_rank: template.of(rank, local_rank, names[node])
    if roles:
        return _by_role(roles, nodes)
    digits = len(str(sum(len(ranks) for _, ranks in nodes) - 1))
    longest = max(map(len, names))
    several = len([name for name in names if name]) > 1
    shown = [f"{name:<{longest}} " if several else "" for name in names]
    if not programs:
        return lambda node, rank, _: Prefix(f"[{shown[node]}{rank:>{digits}}] ")
    from launchpad.job.programs import labels

    called = labels(programs)
    width = max(map(len, called.values()), default=0)
    program = {rank: f"{name:<{width}} " for rank, name in called.items()}
    return lambda node, rank, _: Prefix(f"[{shown[node]}{program.get(rank, '')}{rank:>{digits}}] ")


def _by_role(roles: Sequence[Sequence[Any]], nodes: Sequence[Sequence[Any]]) -> Callable[[int, int, int], Prefix]:
    """[train 1]: each world has its own numbers; spawned ranks keep theirs in the job."""
    width = max(len(name) for name, _ in roles)
    digits = max(len(str(len(ranks) - 1)) for _, ranks in roles)
    shown = {rank: f"[{name:<{width}} {own:>{digits}}] " for name, ranks in roles for own, rank in enumerate(ranks)}
    names = {rank: name for name, ranks in roles for rank in ranks}
    of_node = [names[ranks[0]] if ranks else "" for _, ranks in nodes]
    return lambda node, rank, _: Prefix(shown.get(rank) or f"[{of_node[node]:<{width}} {rank:>{digits}}] ")


@lru_cache
def of_several(ranks: tuple[int, ...]) -> str:
    """Our own prefix of ranks that wrote the same."""
    return f"[{','.join(ranges(ranks))}] "


def columns(prefix: str) -> int:
    """The width of a prefix on a terminal."""
    if prefix.isascii() and prefix.isprintable():
        return len(prefix)
    import unicodedata

    text = re.sub(_COLOUR, "", prefix).expandtabs()
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )


def encoded(text: str) -> bytes:
    """As it is written: bytes that are not UTF-8 stay what they were."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate, from the JSON of an error file
        return text.encode(errors="backslashreplace")
