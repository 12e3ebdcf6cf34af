"""--stall-timeout with roles: which world hangs, by numbers."""

from __future__ import annotations

from math import inf

from launchpad.head.world_stalls import WorldStalls
from tests.unit.head.test_stall import GLOO, SLEEPS, look

WORLDS = {"train.0": [1, 2], "train.1": [3]}


def watch_of(*worlds: str) -> WorldStalls:
    names = {rank: name for name, ranks in WORLDS.items() for rank in ranks}
    return WorldStalls(10.0, worlds, lambda rank: names.get(rank, ""), 0.0)


def test_a_world_that_hangs_while_another_one_moves_has_stalled() -> None:
    watch = watch_of(*WORLDS)
    for now in (5.0, 10.0):
        assert watch.deadline <= now
        watch.moved(now, 3)
        watch.asked(now)
        sample = {rank: look(GLOO, rank=rank, beats=5) for rank in (1, 2)} | {3: look(SLEEPS, rank=3, cpu=now)}
        assert watch.sampled(now, sample, [0, 1, 2, 3]) == (now == 10.0)
    assert (watch.found, watch.quiet(10.0)) == ("train.0", 10.0)


def test_what_moves_a_rank_says_nothing_of_other_worlds() -> None:
    watch = watch_of(*WORLDS)
    watch.moved(4.0, 0)  # a service's
    assert watch.deadline == 5.0
    watch.moved(4.0, 2)
    watch.asked(5.0)
    assert watch.deadline == 9.0
    watch.moved(6.0, -1)
    assert watch.deadline == 11.0


def test_a_sample_that_was_taken_for_another_world_is_no_second_one() -> None:
    watch = watch_of(*WORLDS)
    sample = {rank: look(GLOO, rank=rank, beats=5) for rank in (1, 2, 3)}
    watch.moved(4.9, 3)
    watch.asked(5.0)
    assert not watch.sampled(5.0, sample, [1, 2, 3])
    watch.asked(9.9)  # that of train.1 is due
    assert not watch.sampled(9.9, sample, [1, 2, 3])
    assert watch.found == ""


def test_a_world_that_has_ended_does_not_stall_nor_does_a_job_of_services() -> None:
    watch = watch_of(*WORLDS)
    for now in (5.0, 10.0, 15.0):
        watch.asked(now)
        assert not watch.sampled(now, {}, [0])
    assert watch_of().deadline == inf
