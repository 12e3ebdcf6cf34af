"""diagnosis/blame: each rule by its name, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from launchpad.diagnosis import blame, tracebacks
from launchpad.diagnosis.blame import LATE_NS, Blame, Evidence
from launchpad.diagnosis.candidates import Candidate, Candidates
from launchpad.diagnosis.history import History

SECOND = 10**9


def failed(rank: int, seconds: float = 1.0, **more: Any) -> Candidate:
    return Candidate("exception", rank, time=int(seconds * SECOND), code=1, **more)


def lost_a_peer(rank: int, seconds: float = 1.0, secondary: str = "peer", line: int = 7) -> Candidate:
    frames = [["/w/train.py", line, "step", "all_reduce"]]
    found = tracebacks.from_event({"type": "RuntimeError", "message": "closed", "frames": frames})
    return failed(rank, seconds, secondary=secondary, traceback=found)


def thread_of(rank: int, seconds: float) -> Candidate:
    return failed(rank, seconds)._replace(kind="thread", thread="loader")


def holding(rank: int, *, under_way: bool = False) -> Candidate:
    return Candidate("hang", rank, time=2 * SECOND, under_way=under_way)


def ranks(found: Sequence[Candidate]) -> list[int]:
    return [one.rank for one in found]


def test_each_rule_has_its_test() -> None:
    assert [rule for rule in (*blame.OWN_AFTER_ALL, *blame.BLAME) if f"test_{rule.__name__}" not in globals()] == []


@pytest.mark.parametrize("rule", [*blame.OWN_AFTER_ALL, *blame.BLAME], ids=lambda rule: rule.__name__)
def test_no_rule_answers_without_evidence(rule: Any) -> None:
    assert not rule(Evidence())


@pytest.mark.parametrize(
    ("own_at", "secondary", "moved"),
    [
        (1.0 + 2 * LATE_NS / SECOND, ("weak", "kept"), [0, 1]),
        (1.0 + 2 * LATE_NS / SECOND, ("weak", "peer"), []),
        (1.5, ("weak", "kept"), []),
    ],
)
def test_doubtful_and_first(own_at: float, secondary: tuple[str, str], moved: list[int]) -> None:
    victims = [lost_a_peer(rank, 1.0, strength) for rank, strength in enumerate(secondary)]
    assert ranks(blame.doubtful_and_first(Evidence([failed(2, own_at)], victims))) == moved


def test_still_handling_its_exception() -> None:
    rule, victims = blame.still_handling_its_exception, [lost_a_peer(1)]
    raising = holding(0, under_way=True)
    assert rule(Evidence((), victims, holder=raising)) == [raising]
    assert not rule(Evidence((), victims, holder=holding(0)))
    assert not rule(Evidence((), victims, holder=holding(1, under_way=True)))  # it is known already


def test_weak_beside_victims() -> None:
    rule, weak, victim = blame.weak_beside_victims, lost_a_peer(0, secondary="weak"), lost_a_peer(1)
    assert rule(Evidence((), [weak, victim])) == [weak]
    assert not rule(Evidence((), [weak]))
    assert not rule(Evidence([failed(2)], [weak, victim]))


@pytest.mark.parametrize(("what", "kind"), [("exception", "failure"), ("start", "start"), ("lost", "lost")])
def test_failed_of_its_own(what: Any, kind: str) -> None:
    first = failed(2, 3.0)._replace(kind=what)
    assert blame.failed_of_its_own(Evidence([first, failed(0, 4.0)], [lost_a_peer(1)])) == Blame(kind, first)  # type: ignore[arg-type]


def test_exited_early() -> None:
    victim, late = lost_a_peer(1, 2.0), 2 * SECOND + LATE_NS
    finished = [(late - 1, 2), (SECOND, 3), (SECOND + 1, 3), (late, 0)]
    found = blame.exited_early(Evidence((), [victim], finished=finished))
    assert found == Blame("early", victim, early=(3, 2))
    assert blame.exited_early(Evidence((), [lost_a_peer(1, 2.0, "weak")], finished=finished)) is None


def test_lost_a_thread_and_held_up_others() -> None:
    rule, threads, victim = (
        blame.lost_a_thread_and_held_up_others,
        [thread_of(3, 0.5), thread_of(0, 0.7)],
        lost_a_peer(1),
    )
    assert rule(Evidence((), [victim], threads, holder=holding(0))) == Blame("failure", threads[1])
    assert rule(Evidence((), [victim], threads, holder=holding(2))) is None
    assert rule(Evidence((), [lost_a_peer(1, 0.6)], threads, holder=holding(0))) is None  # it died only afterwards
    assert rule(Evidence((), [lost_a_peer(1, secondary="kept")], threads, holder=holding(0))) is None


def test_held_up_others() -> None:
    rule, holder = blame.held_up_others, holding(0)
    assert rule(Evidence((), [lost_a_peer(1)], holder=holder)) == Blame("held", holder)
    assert rule(Evidence((), [lost_a_peer(0)], holder=holder)) is None
    assert rule(Evidence((), [lost_a_peer(1, secondary="kept")], holder=holder)) is None


def test_lost_a_thread() -> None:
    rule, threads = blame.lost_a_thread, [thread_of(3, 0.5), thread_of(0, 0.7)]
    assert rule(Evidence((), [lost_a_peer(1)], threads)) == Blame("failure", threads[0])
    assert rule(Evidence((), [lost_a_peer(1, secondary="weak")], threads)) is None
    assert rule(Evidence((), [lost_a_peer(1, 0.4)], threads)) is None


@pytest.mark.parametrize(("secondary", "answers"), [("weak", True), ("kept", True), ("peer", False), ("late", False)])
def test_failed_in_doubt(secondary: str, answers: bool) -> None:
    victim = lost_a_peer(1, secondary=secondary)
    assert blame.failed_in_doubt(Evidence((), [victim])) == (Blame("failure", victim) if answers else None)


@pytest.mark.parametrize(
    ("lines", "odd"), [((7, 7, 9, 8), None), ((7, 7, 9), 2), ((7, 7, 7, 9, 8), 3), ((7, 9), None), ((7, 7), None)]
)
def test_waited_elsewhere(lines: tuple[int, ...], odd: int | None) -> None:
    waited = [lost_a_peer(rank, 1.0 + rank, line=line) for rank, line in enumerate(lines)]
    expected = None if odd is None else Blame("waited", waited[odd], elsewhere=True)
    assert blame.waited_elsewhere(Evidence((), waited)) == expected


def test_only_waited() -> None:
    first, second = lost_a_peer(1, 1.0), lost_a_peer(0, 2.0)
    assert blame.only_waited(Evidence((), [second, first])) == Blame("waited", first)


def test_what_counts_as_a_ranks_own_failure_is_blamed_and_no_victim() -> None:
    found = Candidates(History())
    found.secondary_failures = [lost_a_peer(1, 2.0), lost_a_peer(0, 3.0, "weak")]
    evidence = blame.gather(found, None)
    assert (ranks(evidence.own), ranks(evidence.secondary)) == ([0], [1])
    assert blame.blame(evidence) == Blame("failure", evidence.own[0])


def test_the_first_rule_that_answers_decides() -> None:
    """A rank that exited early counts more than one that is held to hold up the others."""
    evidence = Evidence((), [lost_a_peer(1)], [thread_of(0, 0.5)], [(SECOND, 2)], holding(0))
    answers = [found.kind for rule in blame.BLAME if (found := rule(evidence))]
    assert answers == ["early", "failure", "held", "failure", "waited"]
    assert blame.blame(evidence) == blame.exited_early(evidence)
