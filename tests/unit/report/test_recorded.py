"""What the report reads of a record, and what of a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.protocol.events import JobOver, JobPlanned, RankExited, RankStarted, Restarted
from launchpad.record import attempts
from launchpad.record.event_lines import line_of
from launchpad.report import page, recorded
from tests.support.report import second

RESTARTS = 12


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The record of a job with two ranks, of which one prints and fails in each attempt."""
    events = [JobPlanned(second(0), 1.7e9, "j", 1, "id", ["t.py"], "/w", [("a", [0, 1])], {}, 0.0, "")]
    for number in range(RESTARTS + 1):
        at = 100 * number
        if number:
            events.append(Restarted(second(at), number, 99, 1, 3, -1, number))
        events += [RankStarted(second(at + 1), rank, 100 + rank) for rank in (0, 1)]
        events += [RankExited(second(at + 90), rank, 3 * rank, 0, None) for rank in (1, 0)]
        (tmp_path / f"attempt_{number}" / "1").mkdir(parents=True)
        (tmp_path / f"attempt_{number}" / "1" / "stdout.log").write_text(f"number {number}\n")
    events.append(JobOver(second(2000), 3))
    (tmp_path / "events.jsonl").write_text("".join(f"{line_of(event)}\n" for event in events))
    return str(tmp_path)


def runs(said: recorded.Recorded) -> list[int]:
    """How many attempts the row of each rank tells of."""
    return [len([one for one in row.spans if one.kind == "run"]) for row in said.timeline.rows if row.rank >= 0]


def test_a_short_record_is_on_the_page_as_a_whole(folder: str) -> None:
    said = recorded.read(folder)
    assert (runs(said), said.output.lines, said.passed) == ([RESTARTS + 1] * 2, RESTARTS + 1, 0)
    assert "in the first row only" not in page.page(said)


def test_of_a_long_record_the_last_attempts_are_told(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded.read(folder)
    monkeypatch.setattr(attempts, "WHOLE_BYTES", 1)
    said = recorded.read(folder)
    assert (runs(said), said.output.lines, said.passed) == ([8, 8], 8, 5)
    assert said.lines == whole.lines
    job, before = said.timeline.rows[0], whole.timeline.rows[0]
    assert [(one.start, one.end, one.outcome) for one in job.spans] == [
        (one.start, one.end, one.outcome) for one in before.spans
    ]
    assert [one.text for one in job.spans[:2]] == ["attempt 0: rank 1, exit code 3", "attempt 1: rank 1, exit code 3"]
    assert "Attempts 0 to 4 are in the first row only" in page.page(said)
