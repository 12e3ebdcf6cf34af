"""job/succession.py: who leads after a head is lost, and when a head may go on."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launchpad.job.succession import (
    Dial,
    EarlierHead,
    End,
    Lead,
    Peer,
    Roster,
    Rosters,
    Sight,
    Wait,
    can_lead,
    first_roster,
    in_force,
    may_go_on,
    merged,
    stands_for,
    succession,
    takes_over,
    without_own,
)
from tests.support.succession import SECOND, Fault, play

HISTORIES = int(os.environ.get("LAUNCHPAD_HISTORIES", "200"))


def roster(keys: str, term: int = 1, change: int = 0, head: str = "a", least: int = 1) -> Roster:
    return Roster(term, change, head, tuple(Peer(key, key) for key in keys), least)


FOUR, FIVE = (roster("abcd"),), (roster("abcde"),)
SMALLER = roster("abc", change=1)


def waiting(keys: str, rosters: Rosters) -> dict[str, Rosters]:
    return dict.fromkeys(keys, rosters)


def seeking(keys: str, rosters: Rosters = FIVE) -> dict[str, tuple[int, int, str]]:
    return dict.fromkeys(keys, rosters[-1].age)


# Heads.


@pytest.mark.parametrize(
    ("rosters", "here", "goes_on"),
    [
        (FOUR, "ab", True),  # half is enough for a head
        (FOUR, "a", False),
        (FIVE, "abc", True),
        (FIVE, "ab", False),
        ((roster("ab"),), "a", True),
        ((*FIVE, SMALLER), "abc", True),
        ((*FIVE, SMALLER), "ab", False),  # the larger one still counts
        ((SMALLER,), "ab", True),
        ((*FOUR, roster("ab", term=2)), "ab", False),  # of an earlier head's it needs more than half
        ((*FOUR, roster("abc", term=2)), "abc", True),
        ((roster("ab"), roster("abcde", change=1)), "a", False),  # those that have just come count too
    ],
)
def test_a_head_goes_on_with_half_of_its_rosters(rosters: Rosters, here: str, *, goes_on: bool) -> None:
    assert may_go_on(rosters, set(here)) is goes_on


def test_a_roster_is_in_force_once_all_who_are_on_it_have_acknowledged_it() -> None:
    rosters = (*FIVE, SMALLER)
    old, new = FIVE[0].age, SMALLER.age
    assert in_force(rosters, {"a": new, "b": new, "c": old, "d": old}) == rosters
    assert in_force(rosters, {"a": new, "b": new, "c": new}) == (SMALLER,)
    last = roster("ab", change=2)
    assert in_force((*rosters, last), {"a": last.age, "b": last.age}) == (last,)
    assert in_force((*rosters, last), {"a": last.age, "b": new, "c": new}) == (SMALLER, last)


def test_a_roster_of_an_earlier_head_never_comes_into_force_under_another() -> None:
    rosters = (*FIVE, SMALLER, roster("bcd", term=2, head="b"))
    assert in_force(rosters, dict.fromkeys("abcd", SMALLER.age)) == rosters


# Those without a head.


def test_the_first_who_answers_leads_with_more_than_half() -> None:
    lead = Lead(FIVE, 2, frozenset("bcd"))
    assert succession("b", FIVE, Sight(waiting("cd", FIVE), seeking=seeking("cde"))) == lead
    assert succession("c", FIVE, Sight(waiting("d", FIVE), seeking=seeking("bde"))) == Wait(("b",), enough=False)
    assert succession("b", FIVE, Sight(waiting("c", FIVE), seeking=seeking("cde"))) == Wait((), enough=False)


def test_half_is_not_enough_to_take_over() -> None:
    assert succession("b", FOUR, Sight(waiting("c", FOUR))) == Wait((), enough=False)
    assert succession("b", FOUR, Sight(waiting("c", FOUR), late=True)) == End()
    assert succession("b", (roster("ab"),), Sight()) == Wait((), enough=False)


def test_with_too_few_nodes_nobody_leads_but_newcomers_help() -> None:
    three = (roster("abc", least=3),)
    assert succession("b", three, Sight(waiting("c", three))) == Wait((), enough=False)
    assert succession("b", three, Sight({"c": three, "new": ()})) == Lead(three, 2, frozenset(("b", "c", "new")))
    assert succession("b", FIVE, Sight({"new": (), "newer": (), "newest": ()})) == Wait((), enough=False)


def test_who_could_lead_hesitates_while_somebody_before_it_answers() -> None:
    seen = Sight(waiting("de", FIVE), seeking=seeking("bde"))
    assert succession("c", FIVE, seen) == Wait(("b",), enough=True)
    assert succession("c", FIVE, seen._replace(hesitated=True)) == Lead(FIVE, 2, frozenset("cde"))


def test_a_head_is_joined_that_of_the_latest_term_if_there_are_several() -> None:
    assert succession("c", FIVE, Sight(waiting("bde", FIVE), leading={"a": 1})) == Dial("a")
    assert succession("c", FIVE, Sight(leading={"a": 1, "e": 3, "d": 2}, late=True)) == Dial("e")


def test_a_smaller_roster_counts_for_all_who_meet_one_that_knows_it_to_be_in_force() -> None:
    assert succession("c", FIVE, Sight(waiting("de", FIVE))) == Lead(FIVE, 2, frozenset("cde"))
    assert succession("c", FIVE, Sight({"d": FIVE, "e": (SMALLER,)})) == Wait((), enough=False)
    assert succession("b", (SMALLER,), Sight({"c": FIVE})) == Lead((SMALLER,), 2, frozenset("bc"))


def test_a_roster_that_may_not_be_in_force_asks_for_more_than_half_as_well() -> None:
    both = (*FIVE, roster("ab", change=1))
    assert succession("c", FIVE, Sight({"d": FIVE, "e": FIVE, "b": both})) == Lead(FIVE, 2, frozenset("cde"))
    assert succession("b", both, Sight(waiting("cde", FIVE))) == Wait((), enough=False)
    assert succession("b", both, Sight({"a": both, "c": FIVE})) == Lead(both, 2, frozenset("abc"))


def test_all_wait_at_who_knows_of_the_newest_roster() -> None:
    both = (*FIVE, roster("ce", change=1, head="c"))
    assert succession("b", FIVE, Sight(seeking=seeking("ad") | seeking("e", both))) == Wait(("a", "e"), enough=False)
    assert succession("e", both, Sight(seeking=seeking("abd"))) == Wait((), enough=False)


def test_a_head_that_ends_its_part_takes_back_what_is_not_in_force() -> None:
    other = roster("abd", term=2, head="b")
    assert without_own("a", (*FIVE, SMALLER, other)) == (*FIVE, other)
    assert merged({"b": (*FIVE, SMALLER), "a": FIVE}) == FIVE
    assert merged({"b": (*FIVE, SMALLER), "c": FIVE}) == (*FIVE, SMALLER)
    assert merged({"b": (*FIVE, SMALLER), "a": (SMALLER,)}) == (SMALLER,)


def test_a_launcher_that_is_started_at_the_endpoint_plays_the_part_of_the_head_that_was_there() -> None:
    at_endpoint = tuple(Peer(key, key, "" if key == "a" else f"h{key}", 29400) for key in "ab")
    two = (Roster(1, 0, "a", at_endpoint, 1),)
    assert stands_for({"b": two}, "new") == "a"
    assert takes_over("a", (), {"b": two}) == Lead(two, 2, frozenset("ab"))
    elsewhere = (two[0]._replace(term=2, head="b"),)
    assert stands_for({"b": two, "c": elsewhere}, "new") == "new", "the head that was lost was another one"
    assert takes_over("new", (), {"a": elsewhere}) is None
    assert stands_for({"b": ()}, "new") == "new"


def test_who_plays_the_part_of_a_lost_head_knows_nothing_of_what_that_said_last() -> None:
    """It has the key of the head that made the last roster, which may be in force, and holds none."""
    used = roster("ab", change=1)._replace(restarts=1)
    held = {"b": (roster("ab"), used)}
    assert takes_over("a", (), held) == Lead(held["b"], 2, frozenset("ab"))
    more = {"b": (roster("ab"), roster("abcde", change=1))}
    assert takes_over("a", (), more) is None, "the other three may go on together"
    assert takes_over("new", (), {"c": ()}) is None, "nobody has lost a head"


def test_who_is_reached_by_too_few_can_not_lead() -> None:
    """Of the others, as the head is lost."""
    assert can_lead(5, 3, 1)
    assert not can_lead(5, 4, 1)
    assert not can_lead(5, 1, 2)
    assert not can_lead(3, 1, 1)


def test_the_first_roster_of_a_new_head_keeps_the_order_and_the_restarts() -> None:
    before = roster("cabd", term=4)._replace(attempt=7, restarts=2)
    peers = {key: Peer(key, key) for key in ("new", "d", "b", "c")}
    first = first_roster("b", Lead((before,), 5, frozenset(peers)), peers, 12.0)
    assert first.earlier == (EarlierHead("a", "", 12.0),)
    assert [peer.key for peer in first.peers] == ["c", "b", "d", "new"]
    assert (first.term, first.change, first.head, first.attempt, first.restarts) == (5, 0, "b", 8, 2)


def test_a_head_that_has_left_was_not_lost() -> None:
    """Its last roster says that it has led, and any of the others may lead by it, with more than half of them."""
    left = roster("bc", head="a")._replace(earlier=(EarlierHead("a", "1a2b", 11.0),))
    assert left.left_by_head
    assert not roster("ab").left_by_head
    assert succession("b", (left,), Sight({"c": (left,)})) == Lead((left,), 2, frozenset("bc"))
    alone = roster("b", head="a")
    assert succession("b", (alone,), Sight()) == Lead((alone,), 2, frozenset("b"))
    peers = {key: Peer(key, key) for key in "bc"}
    assert first_roster("b", Lead((left,), 2, frozenset("bc")), peers, 12.0).earlier == left.earlier


# Histories.

FAULTS = st.builds(
    Fault,
    st.sampled_from(("cut", "part", "heal", "kill", "power", "leave", "pause", "resume", "return")),
    st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple),
    st.sampled_from((0, 1, 2, SECOND, 2 * SECOND, 10, 4 * SECOND, 10 * SECOND)),
)


# A head that was stopped for long meets one of a later term as soon as it goes on.
STOPPED = [
    Fault("pause", (0, 2, 5, 6), 10),
    Fault("resume", (5,), 44),
    Fault("part", (0, 2, 5), 10),
    Fault("resume", (2,), 8),
]


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(nodes=7, least=1, seed=1169, faults=STOPPED)
@given(
    nodes=st.integers(2, 7),
    least=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
    faults=st.lists(FAULTS, min_size=1, max_size=14),
)
def test_never_two_heads_and_never_down_where_enough_nodes_reach_each_other(
    nodes: int, least: int, seed: int, faults: list[Fault]
) -> None:
    """Ranks of two heads run no longer than a lost node goes unnoticed; a job that can be led is led within a minute.

    LAUNCHPAD_HISTORIES: how many of them to play.
    """
    assert play(nodes, least, seed, faults) == ""
