"""agent/backlog: frames that are kept until the head has them. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.agent import backlog
from launchpad.agent.backlog import Backlog
from tests.support.unhurried import UNHURRIED


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Backlog]:
    one = Backlog(str(tmp_path))
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_frames_come_out_whole_and_in_order(kept: Backlog) -> None:
    for frame in (b"one", b"two", b"three"):
        kept.add(frame)
    assert kept.take(7) == b"onetwo"
    assert kept.take(1) == b"three", "one is always taken"
    assert not kept.waiting
    assert kept.take(7) == b""


def test_what_is_not_acknowledged_comes_out_again(kept: Backlog) -> None:
    for frame in (b"one", b"two", b"three"):
        kept.add(frame)
    kept.take(100)
    kept.acknowledge(1)
    kept.rewind(1)
    kept.add(b"four")
    assert kept.take(100) == b"twothreefour"
    kept.acknowledge(4)
    assert (kept.size, kept.first) == (0, 4)


@pytest.mark.parametrize("count", [0, 3])
def test_nobody_acknowledges_what_never_was(kept: Backlog, count: int) -> None:
    kept.add(b"one")
    kept.add(b"two")
    kept.acknowledge(1)
    with pytest.raises(ValueError, match="not between 1 and 2"):
        kept.acknowledge(count)


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("take"), st.integers(1, 100)),
        st.tuples(st.just("acknowledge"), st.integers(0, 5)),
        st.tuples(st.just("rewind"), st.integers(0, 5)),
    ),
    max_size=60,
)


@UNHURRIED
@given(steps=Steps)
def test_like_a_list(steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    stale, backlog.STALE_BYTES = backlog.STALE_BYTES, 64  # so that the file is replaced often
    kept = Backlog(str(tmp_path_factory.getbasetemp()))
    frames: list[bytes] = []
    out = done = 0
    try:
        for step, number in steps:
            if step == "add":
                frames.append(bytes([len(frames) % 256]) * number)
                kept.add(frames[-1])
            elif step == "take":
                upto = out
                while upto < len(frames) and (upto == out or sum(map(len, frames[out : upto + 1])) <= number):
                    upto += 1
                assert kept.take(number) == b"".join(frames[out:upto])
                out = upto
            elif step == "acknowledge":
                done = min(len(frames), done + number)
                out = max(out, done)
                kept.acknowledge(done)
            else:
                out = min(len(frames), done + number)
                kept.rewind(out)
            assert kept.size == sum(map(len, frames[done:]))
            assert kept.waiting == (out < len(frames))
    finally:
        backlog.STALE_BYTES = stale
        kept.close()
