"""The journal: what is read from the events of a job."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import verdict_on
from launchpad.diagnosis.verdict_text import describe
from launchpad.output.mark import Resumed
from launchpad.protocol.events import (
    HeadResumed,
    JobOver,
    JobPlanned,
    NodeLost,
    Output,
    PhaseChanged,
    RankExited,
    RanksSpawned,
    RankStarted,
    Restarted,
)
from launchpad.record import job_store, replay
from launchpad.record.event_lines import event_of, line_of
from launchpad.record.journal import JournalState, unfinished
from launchpad.record.recorded_verdict import in_words, look_at


@pytest.mark.parametrize(("cause", "earlier"), [("joined", 0), ("left", 0), ("failure", 1)])
def test_only_attempts_that_failed_are_listed_as_earlier_ones(cause: str, earlier: int, tmp_path: Path) -> None:
    """Nodes that join or leave start the ranks again, too."""
    events = [
        JobPlanned(0, 1.7e9, "0a1b", 1, "id", ["true"], "/work", [["a", [0]]], {}, 0.0, ""),
        *([RankExited(1, 0, 3, 0, False)] if cause == "failure" else []),
        PhaseChanged(2, "stopping", cause, 15, 5.0, []),
        PhaseChanged(3, "over", cause, 0, 0.0, []),
        Restarted(4, 1, 0, -1, 0, 1, counted=False),
        RankExited(5, 0, 7, 0, False),
        PhaseChanged(6, "stopping", "failure", 15, 5.0, []),
    ]
    (tmp_path / job_store.EVENTS).write_text("".join(f"{line_of(event)}\n" for event in events))
    history, verdict, found = look_at(str(tmp_path))
    assert len(found) == earlier
    assert any("earlier" in line for line in in_words(str(tmp_path), history, verdict, found)) == bool(earlier)


def test_output_that_is_read_before_its_place_is_known_is_shown_once(tmp_path: Path) -> None:
    """As `logs -f` does, if it reads after the output was written and before its place was."""
    planned = JobPlanned(0, 0.0, "0a1b", 1, "", [], "/", [["n", [0]]], {"0": "0"}, 0.0, "")
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    log, events = tmp_path / "attempt_0" / "0" / "stdout.log", tmp_path / "events.jsonl"
    events.write_text(json.dumps({"event": "JobPlanned", **planned._asdict()}) + "\n")
    reader = replay.OutputReader(str(tmp_path), None)
    try:
        list(reader.more())
        log.write_text("one\n")
        assert [event.data for event in reader.rest()] == [b"one\n"]
        log.write_text("one\ntwo\n")
        with events.open("a") as file:
            for offset in (0, 4):
                said = {"event": "Output", "time": 0, "rank": 0, "stream": 1, "file": "attempt_0/0/stdout.log"}
                file.write(json.dumps({**said, "offset": offset, "length": 4}) + "\n")
        assert [event.data for event in reader.more()] == [b"two\n"]
        assert not list(reader.rest())
    finally:
        reader.close()


def test_output_that_comes_later_than_its_place_is_not_lost(tmp_path: Path) -> None:
    """With --log-dir, another thread writes the bytes, perhaps to a slow disk."""
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    said = {"event": "Output", "time": 0, "rank": 0, "stream": 1, "file": "attempt_0/0/stdout.log"}
    with (
        (tmp_path / "events.jsonl").open("w") as events,
        contextlib.closing(replay.OutputReader(str(tmp_path), None)) as reader,
    ):
        print(json.dumps({**said, "offset": 0, "length": 4}), file=events, flush=True)
        assert not list(reader.more())
        (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("one\ntwo\n")
        print(json.dumps({**said, "offset": 4, "length": 4}), file=events, flush=True)
        assert b"".join(event.data for event in reader.more()) == b"one\ntwo\n"


def test_ranks_that_came_later_are_in_the_record_too(tmp_path: Path) -> None:
    """Spawned ones, and those of a node that joined."""
    planned = JobPlanned(0, 0.0, "0a1b", 1, "", [], "/", [["n", [0]]], {"0": "0"}, 0.0, "")
    spawned = RanksSpawned(1, 0, 0, [1], ["true"])
    restarted = Restarted(2, 1, 1, 0, 1, -1, nodes=[["n", [0]], ["m", [1, 2]]])
    folders = {"attempt_0/1": "spawned", "attempt_1/2": "joined"}
    for folder, text in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "stdout.log").write_text(text)
    with (tmp_path / "events.jsonl").open("w") as events:
        for event in (planned, spawned, restarted):
            print(json.dumps({"event": type(event).__name__, **event._asdict()}), file=events)
    assert replay.extent(str(tmp_path)) == ({0, 1, 2}, 1)
    found = [(one.rank, one.data) for one in replay.read_events(str(tmp_path)) if isinstance(one, Output)]
    assert found == [(1, b"spawned"), (2, b"joined")]
    with contextlib.closing(replay.OutputReader(str(tmp_path), None)) as reader:
        read = [one.data for one in (*reader.more(), *reader.rest()) if isinstance(one, Output)]
    assert read == [b"spawned", b"joined"]


def test_the_traceback_of_an_agent_that_broke_down_is_on_record() -> None:
    lost = NodeLost(5, 0, "its agent broke down, by a bug of launchpad's: KeyError: 'x'", [0, 1], "Traceback …")
    assert event_of(line_of(lost)) == lost
    before = {"event": "NodeLost", "time": 5, "node": 0, "reason": "it hung up", "ranks": [0, 1]}  # an older version's
    assert event_of(json.dumps(before)) == NodeLost(5, 0, "it hung up", [0, 1], "")
    history = History([JobPlanned(0, 0.0, "", 1, "", [], "", [["here", [0, 1]]], {}, 0.0, "/logs"), lost])
    assert describe(history, verdict_on(history)) == [
        "the job's node was lost: its agent broke down, by a bug of launchpad's: KeyError: 'x'; its ranks were killed; "
        "the traceback is in events.jsonl"
    ]


def test_times_are_by_one_clock_though_launchpad_was_resumed_after_a_reboot(tmp_path: Path) -> None:
    events = [
        JobPlanned(1_000, 1.7e9, "0a1b", 1, "id", ["true"], "/work", [["a", [0]]], {"0": "0"}, 0.0, ""),
        RankStarted(2_000, 0, 10),
        HeadResumed(300, 1.7e9, 20, "other", "", "", 0.0, 1.0, ahead=-5_000),
        RankExited(400, 0, 0, 0, False),
        HeadResumed(500, 1.7e9, 30, "other", "", "", 0.0, 1.0, ahead=0),
        JobOver(600, 0),
    ]
    (tmp_path / job_store.EVENTS).write_text("".join(f"{line_of(event)}\n" for event in events))
    assert [event.time for event in replay.read_events(str(tmp_path))] == [1_000, 2_000, 5_300, 5_400, 5_500, 5_600]
    history = look_at(str(tmp_path))[0]
    assert (history.planned.pid, history.planned.host) == (30, "other")
    said = {"event": "Output", "time": 450, "rank": 0, "stream": 1, "file": "attempt_0/0/stdout.log"}
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("one\n")
    with (tmp_path / job_store.EVENTS).open("a") as file:
        file.write(json.dumps({**said, "offset": 0, "length": 4}) + "\n")
    reader = replay.OutputReader(str(tmp_path), None)
    try:
        assert [event.time for event in reader.more() if isinstance(event, Output)] == [5_450]
    finally:
        reader.close()


def test_the_lines_that_a_record_ends_in_are_found(tmp_path: Path) -> None:
    """For a console that goes on with them."""
    folder = "attempt_0/0"
    streams = {
        (0, 1): (folder, "stdout", False, 9, False),
        (0, 2): (folder, "stderr", False, 4, False),
        (1, 1): ("attempt_0/1", "stdout", False, 3, True),
    }
    segments = {"attempt_0/1/stdout": [2, 8]}
    for name, text in {"0/stdout.log": "one\ntwo, ", "0/stderr.log": "all\n", "1/stdout.2.log": "last\nend"}.items():
        (tmp_path / "attempt_0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "attempt_0" / name).write_text(text)
    resumed = Resumed(str(tmp_path), {"journal": JournalState(0, streams, 0, set(), {}), "segments": segments})
    assert list(unfinished(resumed)) == [Output(0, 0, 1, b"two, "), Output(0, 1, 1, b"end")]
