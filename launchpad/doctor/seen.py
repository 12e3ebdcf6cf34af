"""What a checkup has seen, as values; and what there is to say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from launchpad.named import NamedTuple
from launchpad.protocol.health import Identity, Network, Probed

Level = Literal["ok", "warn", "bad"]
Pair = tuple[int, int]  # from, to


class HostSeen(NamedTuple):
    """One host."""

    name: str  # as the user gave it; "" for this machine without hosts
    failure: str = ""  # why it can't be checked
    facts: Mapping[str, Any] = {}  # by subject (protocol/health.py)
    problems: Mapping[str, str] = {}  # by subject, why there are none; "": no answer in time
    skew: float | None = None  # seconds that its clock is ahead of ours
    uncertain: float = 0.0  # by how many at most that is wrong

    @property
    def identity(self) -> Identity | None:
        """Who it is, if it said so."""
        return self.facts.get("identity")

    @property
    def network(self) -> Network:
        """Its addresses."""
        return self.facts.get("network") or Network([], [])

    @property
    def shown(self) -> str:
        """Its name for a table."""
        return self.name or (self.identity.hostname if self.identity else "this machine")


class Examination(NamedTuple):
    """Everything that was seen. Hosts go by their place in `hosts`."""

    hosts: Sequence[HostSeen]
    paths: Mapping[Pair, Probed] = {}
    rates: Mapping[Pair, float] = {}  # bytes per second
    reduced: Mapping[str, float] = {}  # by backend, the seconds that an all_reduce took
    not_reduced: Mapping[str, str] = {}  # by backend, why there was none
    environ: Mapping[str, str] = {}  # the ranks' own variables
    cwd: str = ""
    torch: bool = True  # whether ranks need it
    sought: Mapping[int, str] = {}  # by host, the interpreter that was looked for before python3
    unfit: Mapping[int, tuple[str, str]] = {}  # by host, why it can't have this environment (--sync-env); what to do
    seconds: float = 0.0

    @property
    def present(self) -> list[int]:
        """The hosts that were checked."""
        return [place for place, host in enumerate(self.hosts) if not host.failure]

    def facts(self, subject: str) -> dict[int, Any]:
        """What those of them have answered on a subject that have."""
        return {place: facts[subject] for place in self.present if subject in (facts := self.hosts[place].facts)}


class Finding(NamedTuple):
    """Something that is not as it should be."""

    level: Level
    hosts: tuple[int, ...]  # one, or the two of a pair
    subject: str
    text: str
    remedy: str  # what to type, or to do


def size(count: float) -> str:
    """A number of bytes, for people."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}" if count < 1000 else f"{count:.0f} {units[0]}"


def counted(count: int, what: str) -> str:
    """So many of them: "1 core", "2 cores"."""
    return f"{count} {what}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence: "a, b and c"."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
