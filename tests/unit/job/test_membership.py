"""job/membership.py: which nodes take part in the next attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.job.membership import Membership, Seat, seated
from tests.support.unhurried import UNHURRIED

FIXED = Membership(3, 3, changes=True)
ELASTIC = Membership(2, 4, changes=True)


def on(*nodes: int, ranks: int = 2) -> tuple[Seat, ...]:
    return tuple(Seat(node, ranks) for node in nodes)


def here(*nodes: int, ranks: int = 2) -> dict[int, int]:
    return dict.fromkeys(nodes, ranks)


@pytest.mark.parametrize(
    ("membership", "before", "nodes", "after"),
    [
        (FIXED, on(), here(0, 1, 2, 3), on(0, 1, 2)),
        (FIXED, on(), here(0, 1), ()),
        (FIXED, on(0, 1, 2), here(0, 1, 2, 3), on(0, 1, 2)),
        (FIXED, on(0, 1, 2), here(0, 2, 3), on(0, 3, 2)),
        (FIXED, on(0, 1, 2), here(1, 2, 4, 3), on(4, 1, 2)),
        (FIXED, on(0, 1, 2), here(2, 3, 4), on(3, 4, 2)),
        (FIXED, on(0, 1, 2), here(0, 2), ()),
        (ELASTIC, on(0, 1, 2), here(0, 2), on(0, 2)),
        (ELASTIC, on(0, 1, 2), here(2), ()),
        (ELASTIC, on(0, 1), here(0, 1, 2), on(0, 1, 2)),
        (ELASTIC, on(0, 1, 2, 3), here(0, 1, 2, 3, 4), on(0, 1, 2, 3)),
        (ELASTIC, on(0, 1, 2, 3), here(0, 2, 3, 4, 5), on(0, 4, 2, 3)),
    ],
)
def test_seats(
    membership: Membership, before: tuple[Seat, ...], nodes: dict[int, int], after: tuple[Seat, ...]
) -> None:
    assert seated(membership, before, nodes) == after


def test_a_spare_gets_the_ranks_of_the_lost_node_if_it_has_room_for_them() -> None:
    before = (Seat(0, 8), Seat(1, 4), Seat(2, 8))
    assert seated(FIXED, before, {0: 8, 2: 8, 3: 8}) == (Seat(0, 8), Seat(3, 4), Seat(2, 8))
    assert seated(FIXED, before, {1: 4, 2: 8, 3: 4}) == ()
    assert seated(FIXED, before, {1: 4, 2: 8, 3: 4, 4: 8}) == (Seat(4, 8), Seat(1, 4), Seat(2, 8))


def test_in_a_job_of_varying_size_each_node_has_its_own_number_of_ranks() -> None:
    assert seated(ELASTIC, (Seat(0, 8), Seat(1, 4)), {1: 4, 2: 1}) == (Seat(2, 1), Seat(1, 4))


NODES = st.sets(st.integers(0, 9))


@UNHURRIED
@given(least=st.integers(1, 5), more=st.integers(0, 4), before=NODES, nodes=NODES)
def test_whoever_comes_and_goes(least: int, more: int, before: set[int], nodes: set[int]) -> None:
    membership = Membership(least, least + more, changes=True)
    seats = on(*sorted(before)[: membership.most])
    if len(seats) < least:
        seats = ()
    after = seated(membership, seats, here(*nodes))
    assert not after or least <= len(after) <= membership.most
    taking_part = [seat.node for seat in after]
    assert len(set(taking_part)) == len(taking_part)
    assert set(taking_part) <= nodes
    assert bool(after) == (len(nodes) >= least), "whenever enough are here"
    if after:
        assert set(taking_part) >= {seat.node for seat in seats} & nodes, "nobody loses a place"
        assert len(after) == min(len(nodes), membership.most if membership.elastic else least)
    if after and not membership.elastic and seats:
        assert [seat for seat in after if seat in seats] == [seat for seat in seats if seat.node in nodes]
        assert all(after[place] == seat for place, seat in enumerate(seats) if seat.node in nodes)


@pytest.mark.parametrize(
    ("membership", "before", "nodes", "doubted", "after"),
    [
        (FIXED, on(0, 1, 2), here(0, 1, 2, 3), {1}, on(0, 3, 2)),
        (FIXED, on(0, 1, 2), here(0, 1, 2), {1}, on(0, 1, 2)),
        (FIXED, on(0, 1, 2), here(0, 1, 2, 3), {1, 3}, on(0, 1, 2)),
        (FIXED, on(0, 1, 2), here(0, 2, 3, 4), {3}, on(0, 4, 2)),
        (FIXED, on(0, 1, 2), here(0, 1, 2, 3), {1, 2}, on(0, 3, 2)),
        (FIXED, on(0, 1, 2), here(0, 1, 3), {1}, on(0, 3, 1)),
        (FIXED, on(0, 1, 2), {0: 2, 1: 2, 2: 2, 3: 1}, {1}, on(0, 1, 2)),
        (ELASTIC, on(0, 1, 2, 3), here(0, 1, 2, 3, 4), {1}, on(0, 4, 2, 3)),
        (ELASTIC, on(0, 1), here(0, 1, 2), {1}, on(0, 2, 1)),
    ],
)
def test_doubted_nodes_come_last(
    membership: Membership, before: tuple[Seat, ...], nodes: dict[int, int], doubted: set[int], after: tuple[Seat, ...]
) -> None:
    assert seated(membership, before, nodes, doubted) == after
