from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launchpad.protocol.events import JobOver, JobPlanned, RankExited, RanksSpawned, RankStarted, Restarted
from launchpad.record import attempts, replay, scanner
from launchpad.record.event_lines import line_of
from launchpad.record.recorded_verdict import in_words, look_at


def record(folder: Path, restarts: int, *, counted: bool = True) -> None:
    planned = JobPlanned(1, 1.7e9, "j", 1, "id", ["train.py"], "/w", [("a", [0, 1])], {}, 0.0, "")
    events: list[Any] = [planned]
    for number in range(restarts + 1):
        at = 10**9 * (number + 1)
        if number:
            events.append(Restarted(at, number, 99, (number - 1) % 2, 3, -1, number, counted))
        if number == 1:
            events.append(RanksSpawned(at, 0, 0, [2], []))
        events += [RankStarted(at, rank, 100 + rank) for rank in (0, 1)]
        events.append(RankExited(at + 5, number % 2, 3, 0, None))
    events.append(JobOver(10**12, 3))
    (folder / "events.jsonl").write_text("".join(f"{line_of(event)}\n" for event in events))


@pytest.mark.parametrize("block", [7, 300, 1 << 20])
def test_the_layout_is_found_whatever_a_block_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    record(tmp_path, 3)
    monkeypatch.setattr(scanner, "_BLOCK_BYTES", block)
    found = list(attempts.layout(str(tmp_path)))
    assert [type(event).__name__ for _, event in found] == [
        *("JobPlanned", "Restarted", "RanksSpawned", "Restarted", "Restarted")
    ]
    text = (tmp_path / "events.jsonl").read_bytes()
    for offset, event in found:
        assert text[:offset].splitlines()[-1].decode() == line_of(event)


def test_a_short_record_is_read_as_a_whole(tmp_path: Path) -> None:
    record(tmp_path, 20)
    assert attempts.passed(str(tmp_path)) == attempts.NONE


def test_of_a_long_record_the_last_attempts_are_judged_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 20)
    folder = str(tmp_path)
    whole = look_at(folder)
    extent = replay.extent(folder)
    monkeypatch.setattr(attempts, "WHOLE_BYTES", 1)
    history, verdict, earlier = look_at(folder)
    assert in_words(folder, history, verdict, earlier) == in_words(folder, *whole)
    assert len(earlier) == 20
    assert earlier[0] == "rank 0, exit code 3"
    assert earlier[-5:] == whole[2][-5:]
    assert history.names == whole[0].names
    assert replay.extent(folder) == extent == ({0, 1, 2}, 20)


def test_attempts_that_only_changed_the_nodes_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, 20, counted=False)
    monkeypatch.setattr(attempts, "WHOLE_BYTES", 1)
    assert attempts.passed(str(tmp_path)).earlier == []
