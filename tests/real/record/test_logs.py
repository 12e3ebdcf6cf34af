"""launchpad logs: which of the recorded lines it prints, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.protocol.events import Output
from launchpad.record.replay import by_time
from tests.support.command import Launchpad
from tests.support.logs import logs, record
from tests.support.unhurried import UNHURRIED


@pytest.fixture
def recorded(launchpad: Launchpad) -> Launchpad:
    record(launchpad)
    return launchpad


def test_all_in_the_order_of_arrival(recorded: Launchpad) -> None:
    first = "[0] up|[0] loss 0.5|[1] up|[1] loss 0.7|[2] up|[0] step 1|[1] a warning"
    assert logs(recorded) == [*first.split("|"), "launchpad: restart 1", "[0] again", "[2] again", "[1] again"]


def test_grep_looks_at_whole_lines(recorded: Launchpad) -> None:
    assert logs(recorded, "--grep", "warning|^step") == ["[0] step 1", "[1] a warning", "launchpad: restart 1"]
    assert logs(recorded, "--grep", r"\[1\]") == ["launchpad: restart 1"]  # the prefix is no part of the line


def test_since_and_attempt(recorded: Launchpad) -> None:
    again = ["[0] again", "[2] again", "[1] again"]
    assert logs(recorded, "--attempt", 1) == logs(recorded, "--attempt", 1, "--since", "10m") == again
    assert logs(recorded, "--since", "10m") == ["launchpad: restart 1", *again]
    assert logs(recorded, "--attempt", 0, "--since", "10m") == []
    assert len(logs(recorded, "--attempt", 0, "--since", "start")) == 7


def test_output_without_a_time_has_that_of_its_file(launchpad: Launchpad) -> None:
    folder = record(launchpad)
    end = folder / "attempt_1" / "0" / "stdout.1.log"
    end.write_text("the end\n")
    assert logs(launchpad, "--since", "1m") == ["launchpad: restart 1", "[0] the end"]
    assert logs(launchpad, "--merge", "time", "--rank", 0, "--attempt", 1) == ["[0] again", "[0] the end"]


def test_folded_by_the_times_at_which_it_was_written(recorded: Launchpad) -> None:
    assert logs(recorded, "--fold", "equal") == [
        *("[0-1] up", "[0] loss 0.5", "[1] loss 0.7", "[2] up", "[0] step 1", "[1] a warning"),
        *("launchpad: restart 1", "[0-1] again", "[2] again"),  # that of rank 2 is on stderr
    ]
    assert logs(recorded, "--fold", "numbers", "--grep", "loss", "--attempt", 0) == ["[0-1] loss 0.5…0.7"]


def test_merged_by_time(recorded: Launchpad) -> None:
    merged = logs(recorded, "--merge", "time", "--attempt", 0)
    assert merged[-3:] == ["[2] up", "[0] step 1", "[1] a warning"]
    done = recorded.run("logs", "--merge", "time", "--follow")
    assert done.returncode == 2
    assert (
        "--merge time sorts output that already exists, and --follow waits for more; leave one of them out"
        in done.stderr
    )


@UNHURRIED
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30))
def test_merging_keeps_the_order_of_each_rank(said: list[tuple[int, int]]) -> None:
    """Also if its clock was set back in between, or if it has no time from some point on."""
    outputs = [Output(at, rank, 1, b"%d" % number) for number, (rank, at) in enumerate(said)]
    merged = by_time(outputs)
    for rank in range(4):
        assert [one for one in merged if one.rank == rank] == [one for one in outputs if one.rank == rank]
    assert len(merged) == len(outputs)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--grep", "("), "--grep (: missing ), unterminated subpattern at position 0; write a regular expression"),
        (("--attempt", 2), "--attempt 2: the job has attempts 0 to 1"),
    ],
)
def test_what_can_not_be_shown_is_refused(recorded: Launchpad, words: tuple[object, ...], why: str) -> None:
    done = recorded.run("logs", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
