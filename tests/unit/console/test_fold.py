"""console/fold: equal lines of several ranks are one, nothing is lost, the order within a rank is kept."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.console.fold import HOLD_SECONDS, MOST_LINES_A_SECOND, Fold, FoldedLine, FoldingDevice, merged
from launchpad.console.lines import QUIET_SECONDS_TERMINAL, Device, LineStream
from launchpad.console.prefix import of_several
from tests.support.fold import Said, by_rank, folded
from tests.support.unhurried import UNHURRIED

WORDS = st.sampled_from([b"", b"a", b"b", b"c", b"d", b"step 1", b"step 2", b"x -3.5 of 7"])
TALK = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from([1, 2]),
        st.lists(WORDS, min_size=1, max_size=6),
        st.sampled_from([0.0, 0.0, 0.02, 0.06]),
    ),
    max_size=40,
)


def of_rank(talk: list[Said], rank: int) -> list[tuple[int, bytes]]:
    return [(stream, line) for own, stream, lines, _ in talk for line in lines if own == rank]


@UNHURRIED
@given(talk=TALK)
def test_what_is_folded_unfolds_to_the_lines_of_each_rank(talk: list[Said]) -> None:
    shown = folded(talk, Fold(5))
    for rank in range(5):
        assert [(line.stream, line.text) for line in shown if rank in line.ranks] == of_rank(talk, rank)


@UNHURRIED
@given(talk=TALK)
def test_a_line_with_spans_stands_for_lines_whose_numbers_are_within(talk: list[Said]) -> None:
    shown = folded(talk, Fold(5, numbers=True))
    for rank in range(5):
        own = [line for line in shown if rank in line.ranks]
        assert len(own) == len(of_rank(talk, rank))
        for line, (stream, text) in zip(own, of_rank(talk, rank), strict=True):
            assert line.stream == stream
            spans = re.split(rb"(-?[\d.]*\d(?:\xe2\x80\xa6-?[\d.]*\d)?)", line.text)
            pattern = b"".join(b"(.*)" if at % 2 else re.escape(span) for at, span in enumerate(spans))
            found = re.fullmatch(pattern, text)
            assert found, (line.text, text)
            for span, number in zip(spans[1::2], found.groups(), strict=True):
                low, _, high = span.partition("…".encode())
                assert float(low) <= float(number) <= float(high or low)


@UNHURRIED
@given(talk=TALK)
def test_no_line_is_held_for_longer_than_it_may_be(talk: list[Said]) -> None:
    fold = Fold(5)
    now, waiting = 100.0, 0
    for rank, stream, lines, pause in talk:
        waiting += len(lines) - sum(len(line.ranks) for line in fold.add(rank, stream, lines, now))
        since = now
        now += pause
        waiting -= sum(len(line.ranks) for line in fold.tick(now))
        assert (fold.deadline is None) == (waiting == 0)
        assert fold.deadline is None or now < fold.deadline <= since + HOLD_SECONDS


@UNHURRIED
@given(talk=TALK, shared=st.booleans(), columns=st.sampled_from([None, 80]))
def test_a_device_that_folds_shows_what_one_that_does_not_shows(
    talk: list[Said], shared: bool, columns: int | None
) -> None:
    """Lines that come in pieces too, and on one descriptor or two."""
    plain, device = Device(10, columns), folding(5, columns)
    streams = [
        {
            (rank, number): LineStream(1 if shared else number, b"[%d] " % rank, 4, rank, number)
            for rank in range(5)
            for number in (1, 2)
        }
        for _ in range(2)
    ]
    shown: list[list[tuple[int, bytes]]] = [[], []]
    now = 100.0
    for rank, number, lines, pause in talk:
        data = b"\n".join(lines)  # the last one is left unfinished
        for own, which, out in zip((plain, device), streams, shown, strict=True):
            out += own.feed(which[rank, number], data, now)
            out += own.tick(now + pause)
        now += pause
    for own, which, out in zip((plain, device), streams, shown, strict=True):
        out += own.close(list(which.values()))
    for fd in (1, 2):
        one, two = (b"".join(data for to, data in out if to == fd) for out in shown)
        for rank in range(5):
            texts = b"".join(by_rank(one)[rank]), b"".join(by_rank(two)[rank])
            if shared:  # which of a rank's two unfinished lines is continued first depends on the lines of others
                assert sorted(texts[0]) == sorted(texts[1])
            else:
                assert texts[0] == texts[1]


def _prefix(ranks: tuple[int, ...], _: int) -> tuple[bytes, int]:
    return of_several(ranks).encode(), len(of_several(ranks))


def folding(ranks: int, columns: int | None = None) -> FoldingDevice:
    return FoldingDevice(2 * ranks, columns, Fold(ranks), _prefix)


# Examples.


def one_block_each(*blocks: bytes, numbers: bool = False) -> list[tuple[str, bytes]]:
    fold = Fold(len(blocks), numbers=numbers)
    shown = [line for rank, block in enumerate(blocks) for line in fold.add(rank, 1, block.split(), 0.0)]
    return [(",".join(map(str, line.ranks)), line.text) for line in shown + fold.rest()]


def test_equal_blocks_are_one() -> None:
    assert one_block_each(b"a b c", b"a b c", b"a b c") == [("0,1,2", b"a"), ("0,1,2", b"b"), ("0,1,2", b"c")]


def test_ranks_that_differ_in_one_line_share_the_rest() -> None:
    assert one_block_each(b"a x b c", b"a y b c") == [
        ("0,1", b"a"),
        ("0", b"x"),
        ("1", b"y"),
        ("0,1", b"b"),
        ("0,1", b"c"),
    ]


def test_a_line_of_its_own_at_first_does_not_keep_a_rank_from_the_others() -> None:
    greeted = one_block_each(b"i0 load go", b"i1 load go", b"i2 load go")
    assert greeted == [("0", b"i0"), ("1", b"i1"), ("2", b"i2"), ("0,1,2", b"load"), ("0,1,2", b"go")]


def test_lines_in_another_order_are_not_folded() -> None:
    assert one_block_each(b"a b", b"b a") == [("0", b"a"), ("0,1", b"b"), ("1", b"a")]


def test_lines_that_differ_only_in_numbers() -> None:
    assert one_block_each(b"step:1 loss=0.71", b"step:1 loss=-2e-3", b"step:1 loss=nan", numbers=True) == [
        ("0,1,2", b"step:1"),
        ("0,1", "loss=-2e-3…0.71".encode()),
        ("2", b"loss=nan"),
    ]


@pytest.mark.parametrize(
    ("texts", "one"),
    [
        ([b"rank 3 of 8", b"rank 12 of 8", b"rank 4 of 8"], "rank 3…12 of 8"),
        ([b"cuda:0", b"cuda:7"], "cuda:0…7"),
        ([b"a-1 1-2", b"a-2 1-3"], "a-1…2 1-2…3"),
        ([b"-1 (-4)", b"1 (-3)"], "-1…1 (-4…-3)"),
        ([b"no number", b"no number"], "no number"),
        ([b"1.0", b"1.00"], "1.0"),
    ],
)
def test_the_smallest_and_the_largest_number_stand_for_all(texts: list[bytes], one: str) -> None:
    assert merged(texts).decode() == one


def test_stdout_and_stderr_are_not_mixed() -> None:
    fold = Fold(2)
    shown = fold.add(0, 1, [b"x"], 0.0) + fold.add(1, 2, [b"x"], 0.0) + fold.rest()
    assert [(line.stream, line.ranks) for line in shown] == [(1, (0,)), (2, (1,))]


def test_a_line_of_all_ranks_waits_for_nobody_and_others_until_they_are_due() -> None:
    fold = Fold(2)
    assert fold.add(0, 1, [b"x", b"y"], 1.0) == []
    assert fold.add(1, 1, [b"x"], 1.01) == [FoldedLine(1, (0, 1), b"x")]
    assert fold.deadline == 1.0 + HOLD_SECONDS
    assert fold.tick(1.04) == []
    assert fold.tick(1.0 + HOLD_SECONDS) == [FoldedLine(1, (0,), b"y")]
    assert fold.add(1, 1, [b"y"], 1.1) == []
    assert fold.rest() == [FoldedLine(1, (1,), b"y")]
    assert fold.deadline is None


def test_a_rank_that_prints_more_than_anybody_reads_is_not_held() -> None:
    device = folding(2)
    own, other = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    flood = b"".join(b"%d\n" % number for number in range(MOST_LINES_A_SECOND * 2 // 3))
    assert device.feed(other, b"quiet\n", 5.0) == []
    assert device.feed(own, flood, 5.0) == []
    assert device.tick(5.01) == []
    shown = device.feed(own, flood, 5.01) + device.feed(own, b"end\n", 5.9)
    lines = [*flood.split(), *flood.split(), b"end"]
    assert b"".join(data for _, data in shown) == b"[1] quiet\n" + b"".join(b"[0] %s\n" % line for line in lines)
    assert device.feed(own, b"in the next second\n", 6.0) == []


def test_a_prompt_comes_after_all_that_is_held() -> None:
    device = folding(2, 80)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    device.feed(one, b"hello\nname? ", 1.0)
    device.feed(two, b"hello\nwaits\n", 1.0 + QUIET_SECONDS_TERMINAL - 0.01)
    shown = b"".join(data for _, data in device.tick(1.0 + QUIET_SECONDS_TERMINAL))
    assert shown == b"[1] waits\n[0] name? "


def test_notes_and_bars_come_after_all_that_is_held() -> None:
    device = folding(2)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    device.feed(one, b"a\n", 1.0)
    assert device.note(b"launchpad: note", 2) == [(1, b"[0] a\n"), (2, b"launchpad: note\n")]
    device.feed(one, b"b\n", 1.0)
    device.feed(two, b"c\n", 1.0)
    shown = device.feed(two, b"10%\r20%\n", 1.0)
    assert shown == [(1, b"[0] b\n"), (1, b"[1] c\n"), (1, b"[1] 10%\r20%\n")]
    assert device.close([one, two]) == []


def test_many_moves_do_not_lose_the_order() -> None:
    """Each rank's own line is moved in front of the one that all share: the numbers between two rows run out."""
    fold = Fold(301)
    for rank in range(300):
        fold.add(rank, 1, [b"own %d" % rank, b"shared"], 0.0)
    assert [line.text for line in fold.rest()] == [*(b"own %d" % rank for rank in range(300)), b"shared"]


def test_what_was_fed_is_done_when_its_lines_are_shown() -> None:
    device = folding(2)
    one, two = (LineStream(1, b"[%d] " % rank, 4, rank) for rank in range(2))
    for own, data, now in ((one, b"a\nb\n", 1.0), (two, b"c\n", 1.01), (two, b"d\n", 1.02), (one, b"c\n", 1.02)):
        device.feed(own, data, now)
        device.keep(data)
    assert device.done() == [b"a\nb\n", b"c\n"]  # c was everybody's
    device.tick(1.02 + HOLD_SECONDS)
    assert device.done() == [b"d\n", b"c\n"]  # what came at the same time as d is only now known to be shown
