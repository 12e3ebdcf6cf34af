"""Whom to blame for the failures of an attempt: an ordered list of named rules. Pure.

The rules of OWN_AFTER_ALL come first: failures that look like another rank's doing, and count as a rank's own all the
same. Then the first of BLAME that has an answer decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from launchpad.diagnosis.candidates import Candidate, Candidates

# The cause of a failure; of these, early, waited and held are deduced from what happened to other ranks.
BlameKind = Literal["failure", "early", "waited", "held", "start", "lost"]

# We may notice an exit this much later (ns) than its peers do.
LATE_NS = 1_000_000_000

# Secondary failures that may be the ranks' own ones after all.
_DOUBTFUL = ("weak", "kept")


class Evidence(NamedTuple):
    """What the rules look at. Lists of candidates are in order of time, except the secondary ones."""

    own: Sequence[Candidate] = ()  # failures with a cause in the rank itself, and lost nodes
    secondary: Sequence[Candidate] = ()  # failures because another rank was gone, or seems to have been
    threads: Sequence[Candidate] = ()  # threads that died in ranks that went on
    finished: Sequence[tuple[int, int]] = ()  # (time, rank) of ranks whose program had finished
    holder: Candidate | None = None  # the rank that the others wait for, by their stacks

    @property
    def victim(self) -> Candidate | None:
        """The first of the secondary failures."""
        return min(self.secondary, key=lambda one: one.time, default=None)

    @property
    def failed(self) -> set[int]:
        """The ranks that failed, for whatever reason."""
        return {one.rank for one in (*self.own, *self.secondary)}

    def before(self, victim: Candidate) -> list[Candidate]:
        """Threads that had died when this rank failed."""
        return [one for one in self.threads if one.time < victim.time]

    def owning(self, found: Sequence[Candidate]) -> Evidence:
        """The same, with these as failures of the ranks' own."""
        ranks = {one.rank for one in found}
        own = sorted([*self.own, *found], key=lambda one: one.time)
        return self._replace(own=own, secondary=[one for one in self.secondary if one.rank not in ranks])


class Blame(NamedTuple):
    """An answer."""

    kind: BlameKind
    cause: Candidate
    early: tuple[int, ...] = ()  # ranks that exited with 0 while the others waited for them
    elsewhere: bool = False  # of ranks that only waited, the cause waited at another line than most


def gather(found: Candidates, holder: Candidate | None) -> Evidence:
    """What is known about an attempt, after OWN_AFTER_ALL."""
    own = sorted(found.own, key=lambda one: one.time)
    evidence = Evidence(own, found.secondary_failures, found.threads, found.finished, holder)
    for rule in OWN_AFTER_ALL:
        if more := rule(evidence):
            evidence = evidence.owning(more)
    return evidence


def blame(evidence: Evidence) -> Blame | None:
    """Whom to blame; None if nothing failed as far as is known."""
    return next(filter(None, (rule(evidence) for rule in BLAME)), None)


# OWN_AFTER_ALL: which failures count as the ranks' own.


def doubtful_and_first(evidence: Evidence) -> Sequence[Candidate]:
    """A broken pipe with no failure before it may well be a failure of its own."""
    victim = evidence.victim
    if victim is None or not evidence.own or any(one.secondary not in _DOUBTFUL for one in evidence.secondary):
        return ()
    return evidence.secondary if evidence.own[0].time > victim.time + LATE_NS else ()


def still_handling_its_exception(evidence: Evidence) -> Sequence[Candidate]:
    """A rank that still handled an exception of its own when the first victim was known has failed before it."""
    holder = evidence.holder
    return [holder] if holder is not None and holder.under_way and holder.rank not in evidence.failed else ()


def weak_beside_victims(evidence: Evidence) -> Sequence[Candidate]:
    """What may or may not be a loss of another rank explains those that are one, if nothing else does."""
    weak = [one for one in evidence.secondary if one.secondary == "weak"]
    return weak if not evidence.own and len(weak) < len(evidence.secondary) else ()


# BLAME: whom.


def failed_of_its_own(evidence: Evidence) -> Blame | None:
    """Of the ranks that failed independently, the first; others are victims even if we noticed them earlier."""
    if not evidence.own:
        return None
    first = evidence.own[0]
    return Blame(first.kind if first.kind in ("start", "lost") else "failure", first)


def exited_early(evidence: Evidence) -> Blame | None:
    """Ranks that exited with 0 while others still needed them; what they did to the first victim is told."""
    victim = evidence.victim
    if victim is None or victim.secondary == "weak":
        return None
    # We see a process exit a little after its connections close.
    early = tuple(dict.fromkeys(rank for at, rank in sorted(evidence.finished) if at < victim.time + LATE_NS))
    return Blame("early", victim, early) if early else None


def lost_a_thread_and_held_up_others(evidence: Evidence) -> Blame | None:
    """The rank that the others waited for, by their stacks, and in which a thread had died: the thread."""
    victim, holder = evidence.victim, evidence.holder
    if victim is None or holder is None or victim.secondary in _DOUBTFUL:
        return None
    died = next((one for one in evidence.before(victim) if one.rank == holder.rank), None)
    return Blame("failure", died) if died is not None else None


def held_up_others(evidence: Evidence) -> Blame | None:
    """The rank that the others waited for, by their stacks, unless it is a victim itself."""
    victim, holder = evidence.victim, evidence.holder
    if victim is None or holder is None or victim.secondary == "kept" or holder.rank in evidence.failed:
        return None
    return Blame("held", holder)


def lost_a_thread(evidence: Evidence) -> Blame | None:
    """The first rank in which a thread had died."""
    victim = evidence.victim
    if victim is None or victim.secondary == "weak":
        return None
    died = evidence.before(victim)
    return Blame("failure", died[0]) if died else None


def failed_in_doubt(evidence: Evidence) -> Blame | None:
    """The first victim, whose loss may be unrelated to other ranks."""
    victim = evidence.victim
    return Blame("failure", victim) if victim is not None and victim.secondary in _DOUBTFUL else None


def waited_elsewhere(evidence: Evidence) -> Blame | None:
    """The first rank that waited at another line than most."""
    waited = evidence.secondary
    places = [place and (place.file, place.line) for place in (one.traceback and one.traceback.place for one in waited)]
    usual, count = Counter(places).most_common(1)[0] if places else (None, 0)
    if usual is None or 2 * count <= len(waited):
        return None
    others = [one for one, place in zip(waited, places, strict=True) if place not in (usual, None)]
    odd = min(others, key=lambda one: one.time, default=None)
    return Blame("waited", odd, elsewhere=True) if odd is not None else None


def only_waited(evidence: Evidence) -> Blame | None:
    """There are only victims: the first, as one."""
    victim = evidence.victim
    return Blame("waited", victim) if victim is not None else None


OWN_AFTER_ALL: tuple[Callable[[Evidence], Sequence[Candidate]], ...] = (
    doubtful_and_first,
    still_handling_its_exception,
    weak_beside_victims,
)

BLAME: tuple[Callable[[Evidence], Blame | None], ...] = (
    failed_of_its_own,
    exited_early,
    lost_a_thread_and_held_up_others,
    held_up_others,
    lost_a_thread,
    failed_in_doubt,
    waited_elsewhere,
    only_waited,
)
