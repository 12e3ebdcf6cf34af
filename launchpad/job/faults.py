"""The faults of --inject, for trying how a job recovers: what happens to which rank or host, and when. Pure.

kill:3@20s          SIGKILL to the main process of rank 3, 20 s after the ranks were first started
stop:3@20s          SIGSTOP: it hangs                     term:3@20s   SIGTERM
kill:host=b@20s     SIGKILL to the agent of host b, and so to the ranks there: the host is lost
stop:host=b@20s     SIGSTOP to the agent: the host falls silent
cut:host=b@20s      nothing comes through any more, either way, and neither side is told
random:1/60s:7      kill ranks at random, one a minute on average; the number at the end is the seed
"""

from __future__ import annotations

import random
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from launchpad.errors import UsageError
from launchpad.job.duration import parse_seconds

What = Literal["kill", "stop", "term", "cut"]

SIGNALS: dict[str, int] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}

_FORMS = "write kill:3@20s, stop:host=b@1m or random:1/60s"


@dataclass(frozen=True)
class Fault:
    """What happens once, to a rank or to a host."""

    what: What
    at: float  # seconds since the ranks were first started
    rank: int = -1
    host: str = ""  # "" if it happens to a rank

    def __str__(self) -> str:
        return f"{self.what}:{f'host={self.host}' if self.host else self.rank}@{self.at:g}s"


@dataclass(frozen=True)
class RandomKills:
    """Kills of random ranks at random times: `number` of them in `seconds`, on average."""

    number: int
    seconds: float
    seed: int

    def __str__(self) -> str:
        return f"random:{self.number}/{self.seconds:g}s:{self.seed}"

    def kills(self, ranks: int) -> Iterator[Fault]:
        """All of them, in the order of their times; the same ones for the same seed and number of ranks."""
        chance, at = random.Random(self.seed), 0.0
        while True:
            at += chance.expovariate(self.number / self.seconds)
            yield Fault("kill", at, chance.randrange(ranks))


@dataclass(frozen=True)
class Faults:
    """The value of --inject."""

    single: tuple[Fault, ...] = ()  # in the order of their times
    random: RandomKills | None = None


def parse_faults(text: str, seed: int) -> Faults:
    """Parse the value of --inject; `seed` is for random kills that have none. Raises UsageError."""
    single: list[Fault] = []
    kills: RandomKills | None = None
    for part in (part.strip() for part in text.split(",")):
        if part.startswith("random:"):
            if kills is not None:
                raise UsageError(f"--inject {part}: random kills are given twice; add up their rates")
            kills = _parse_random(part, seed)
        else:
            single.append(_parse_fault(part))
    return Faults(tuple(sorted(single, key=lambda fault: fault.at)), kills)


def _parse_fault(part: str) -> Fault:
    what, _, rest = part.partition(":")
    where, at, when = rest.rpartition("@")
    is_host = where.startswith("host=")
    host = where.removeprefix("host=") if is_host else ""
    if not (at and (host if is_host else where.isdecimal() and len(where) < 10)):
        raise UsageError(f"--inject: {part!r} is not WHAT:WHERE@WHEN; {_FORMS}")
    if what not in get_args(What):
        raise UsageError(f"--inject {part}: {what!r} is not a fault; choose from {', '.join(get_args(What))}")
    if what == "cut" and not host:
        raise UsageError(f"--inject {part}: only a host can be cut off; write cut:host=NAME@{when}")
    if what == "term" and host:
        raise UsageError(f"--inject {part}: a host's agent ignores TERM; write kill, stop or cut")
    try:
        seconds = parse_seconds(when)
    except ValueError:
        raise UsageError(f"--inject {part}: {when!r} is not a time; write seconds (30), or 5m, 2h, 1d") from None
    return Fault(what, seconds, -1 if host else int(where), host)  # type: ignore[arg-type]


def _parse_random(part: str, seed: int) -> RandomKills:
    rate, colon, given = part.removeprefix("random:").partition(":")
    number, _, seconds = rate.partition("/")
    try:
        kills = RandomKills(int(number), parse_seconds(seconds), int(given) if colon else seed)
    except ValueError:
        kills = RandomKills(0, 0.0, 0)
    if kills.number <= 0 or kills.seconds <= 0:
        raise UsageError(f"--inject {part}: not random:NUMBER/TIME[:SEED]; write random:1/60s for one kill a minute")
    return kills


def check_targets(faults: Faults, ranks: int, names: Sequence[str]) -> None:
    """Check that a job of so many ranks, on hosts of these names, has what the faults are for. Raises UsageError."""
    for fault in faults.single:
        if fault.host and fault.host not in names:
            raise UsageError(f"--inject {fault}: the job has no host {fault.host}; it has {', '.join(names)}")
        if not fault.host and fault.rank >= ranks:
            there = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"
            raise UsageError(f"--inject {fault}: the job has no rank {fault.rank}; it has {there}")


def check_noticed(faults: Faults, watched: Collection[str]) -> None:
    """Check that each host's silence would be noticed. `watched`: hosts with a heartbeat. Raises UsageError."""
    for fault in faults.single:
        if fault.host and fault.what != "kill" and fault.host not in watched:
            raise UsageError(
                f"--inject {fault}: nobody would notice, as there is no heartbeat between launchpad and {fault.host} "
                "(it runs there itself, or --heartbeat-timeout is 0); choose another host, or kill"
            )
