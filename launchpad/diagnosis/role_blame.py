"""Who is a victim of whom where a job has several worlds: a rank that lost a service, of what happened to that. Pure.

A refused or broken connection is a loss of another world if that had failed before, whether the job ended then or the
world was started again, and unless the error names an address that is not that world's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launchpad.diagnosis.blame import LATE_NS, Evidence
from launchpad.diagnosis.candidates import Candidate
from launchpad.diagnosis.history import History

# A world that was started again, and of which nobody knows when it was ready, was so after this time (ns).
BACK_NS = 60_000_000_000

# Addresses in errors: 127.0.0.1:80, host='127.0.0.1', port=80, ('127.0.0.1', 80).
_ADDRESS = r"(?:\b\d{1,3}(?:\.\d{1,3}){3}|\blocalhost|\])['\"]?(?::|, ?(?:port=)?)(\d{1,5})\b"

# What is said at once by who finds nobody; a connection that has broken may be noticed much later.
_AT_ONCE = r"refused|connect call failed|cannot connect|failed to connect|ConnectError|all connection attempts failed"

# A request that nobody answers any more.
_TIMED_OUT = r"timed out|timeout|deadline.?exceeded|resource temporarily unavailable"


class _Gone(NamedTuple):
    """A world that was not there for some time."""

    world: str
    cause: Candidate
    until: int  # 0: to the end of the job


def over_worlds(history: History, evidence: Evidence, judge: Callable[[History], Candidate | None]) -> Evidence:
    """The evidence, with who lost another world as its victim, and who lost nobody as a failure of its own.

    `judge` says who was to blame in a world that was started again.
    """
    gone = [
        *(_Gone(history.role(one.rank), one, 0) for one in evidence.own if one.rank >= 0),
        *(
            _Gone(world, cause._replace(again=True), until or cause.time + BACK_NS)
            for world, attempt, until in history.downs
            if (cause := judge(attempt)) is not None and cause.rank >= 0
        ),
    ]
    own, secondary = [], []
    causes: list[Candidate] = []
    for one in sorted([*evidence.own, *evidence.secondary], key=lambda one: one.time):
        lost = _lost(history, one, gone)
        if lost is not None:
            secondary.append(one._replace(secondary=one.secondary or "weak"))
            if lost.cause.again and lost.cause not in causes:
                causes.append(lost.cause)
        elif one.secondary == "weak" and _is_elsewhere(history, one):
            own.append(one)
        else:
            (secondary if one in evidence.secondary else own).append(one)
    own = sorted([*own, *causes], key=lambda one: one.time)
    evidence = evidence._replace(own=own, secondary=secondary)
    if (victim := evidence.victim) is not None:  # who has ended well in another world has left nobody there
        role = history.role(victim.rank)
        evidence = evidence._replace(finished=[one for one in evidence.finished if history.role(one[1]) == role])
    return evidence


def _lost(history: History, one: Candidate, gone: Sequence[_Gone]) -> _Gone | None:
    """The world by whose failure this rank failed: the latest that fits."""
    if one.rank < 0 or one.kind == "start":
        return None
    text = _text(one)
    timed_out = re.search(_TIMED_OUT, text, re.IGNORECASE)
    if one.secondary not in ("weak", "kept") and not (timed_out and not one.secondary):
        return None
    at_once = re.search(_AT_ONCE, text, re.IGNORECASE) or timed_out
    ports = set(re.findall(_ADDRESS, text))
    for other in sorted(gone, key=lambda other: other.cause.time, reverse=True):
        served = {address.rpartition(":")[2] for address, world in history.addresses.items() if world == other.world}
        if not served or other.world == history.role(one.rank) or (ports and not ports & served):
            continue
        if other.cause.time > one.time + LATE_NS or (other.until and at_once and one.time > other.until + LATE_NS):
            continue
        return other
    return None


def _is_elsewhere(history: History, one: Candidate) -> bool:
    """Whether it has lost something that is no part of the job."""
    ports = set(re.findall(_ADDRESS, _text(one)))
    return bool(ports) and not ports & {address.rpartition(":")[2] for address in history.addresses}


def _text(one: Candidate) -> str:
    """What the failure says, all along its chain of causes."""
    said = [one.symptom, one.text]
    if one.traceback is not None:
        said += [one.traceback.title, *(root.title for root in one.traceback.roots)]
    return "\n".join(said)
