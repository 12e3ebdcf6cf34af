"""diagnosis/output_tail: what is kept of a rank's output."""

from __future__ import annotations

import random

import pytest

from launchpad.diagnosis.output_tail import _MOST_RUNS, TAIL_BYTES, OutputTail
from launchpad.protocol.events import STDERR, STDOUT


def test_streams_are_kept_apart_and_their_order_is_known() -> None:
    tail = OutputTail()
    for stream, data in ((STDOUT, b"a"), (STDERR, b"1"), (STDERR, b"2\n"), (STDOUT, b"b\n")):
        tail.add(stream, data)
    assert (tail.of(STDOUT), tail.of(STDERR), tail.written) == (b"ab\n", b"12\n", 6)
    assert [tail.last(most) for most in (0, 2, 3, 9)] == [b"", b"b\n", b"\nb\n", b"a12\nb\n"]


def test_nothing_is_kept_of_a_rank_that_writes_nothing() -> None:
    assert (OutputTail().last(9), OutputTail().of(STDERR), OutputTail().written) == (b"", b"", 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_end_is_what_was_written_last(seed: int) -> None:
    chance = random.Random(seed)
    tail, both, single = OutputTail(), b"", {STDOUT: b"", STDERR: b""}
    for _ in range(_MOST_RUNS):
        stream = chance.choice((STDOUT, STDOUT, STDERR))
        data = chance.randbytes(chance.choice((1, 40, 3000, 2 * TAIL_BYTES)))
        tail.add(stream, data)
        both += data
        single[stream] += data
    assert tail.last(TAIL_BYTES) == both[-TAIL_BYTES:]
    assert all(tail.of(stream) == data[-TAIL_BYTES:] for stream, data in single.items())
    assert tail.written == len(both)


def test_of_many_changes_between_the_streams_the_last_are_known() -> None:
    tail = OutputTail()
    for number in range(_MOST_RUNS):
        tail.add(STDOUT, b"o%d\n" % number)
        tail.add(STDERR, b"e%d\n" % number)
    assert tail.last(TAIL_BYTES).startswith(b"o%d\n" % (_MOST_RUNS // 2))
    assert tail.last(TAIL_BYTES).endswith(b"e%d\n" % (_MOST_RUNS - 1))
