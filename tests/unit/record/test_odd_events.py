"""A record whose events hold what they may, but make no sense, and one with events that hold what they can't."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launchpad.diagnosis.verdict_json import as_json
from launchpad.protocol.events import JobOver, JobPlanned, RankExited, RankStarted, Sampled
from launchpad.record import job_store, replay
from launchpad.record.event_lines import RECORDED, OutputPlace, event_of, line_of
from launchpad.record.files import Unreadable
from launchpad.record.recorded_verdict import in_words, look_at
from launchpad.report import page, recorded
from launchpad.report.trace import trace_of
from tests.support.declared import declared
from tests.support.unhurried import UNHURRIED

PLANNED = JobPlanned(1, 1.7e9, "0a1b", 1, "", ["t.py"], "/", [("n", [0, 1])], {"0": "0"}, 0.0, "")


def show(folder: str) -> None:
    """All that is made of a record."""
    history, verdict, earlier = look_at(folder)
    json.dumps(as_json(history, verdict, in_words(folder, history, verdict, earlier), earlier))
    said = recorded.read(folder)
    page.page(said)
    json.dumps(trace_of(said.timeline, "job"))
    replay.extent(folder)


def lines(events: list[Any]) -> str:
    return "".join(
        f"{json.dumps({'event': 'Output', **one._asdict()}) if isinstance(one, OutputPlace) else line_of(one)}\n"
        for one in events
    )


@settings(UNHURRIED, derandomize=True, max_examples=20)
@given(
    declared(JobPlanned),
    st.lists(st.sampled_from([*RECORDED.values(), OutputPlace]).flatmap(declared), max_size=8),
)
def test_whatever_the_declared_fields_hold_can_be_shown(planned: JobPlanned, events: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, job_store.EVENTS).write_text(lines([planned, *events]))
        show(folder)


SAMPLES = declared(Sampled).map(Sampled._asdict) | st.fixed_dictionaries(
    {}, optional={"time": declared(int), "ranks": declared(Any), "gpus": declared(Any)}
)


@settings(UNHURRIED, derandomize=True, max_examples=20)
@given(st.lists(SAMPLES, max_size=8))
def test_samples_may_be_anything(samples: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, job_store.EVENTS).write_text(lines([PLANNED]))
        Path(folder, job_store.SAMPLES).write_text("".join(f"{json.dumps(one)}\n" for one in samples))
        show(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("wall", wall) for wall in (1e300, -1.0, "now", float("nan"))),
        *(("nodes", nodes) for nodes in (5, [5], [["n"]], [["n", ["0"]]], [[1, [0]]], [["n", [-2]]])),
        *(("words", words) for words in ("t.py", [1])),
        ("folders", [0]),
        ("time", 1 << 63),
    ],
)
def test_a_plan_of_wrong_types_is_none(field: str, value: Any, tmp_path: Path) -> None:
    said = {"event": "JobPlanned", **PLANNED._asdict(), field: value}
    (tmp_path / job_store.EVENTS).write_text(json.dumps(said) + "\n")
    with pytest.raises(Unreadable, match=r"events\.jsonl does not begin with a job"):
        look_at(str(tmp_path))


@pytest.mark.parametrize(
    "said",
    [
        {"event": "RankExited", "time": float("nan"), "rank": 0, "code": 1, "memory": 0, "memory_killed": None},
        {"event": "RankExited", "time": 3, "rank": "0", "code": 1, "memory": 0, "memory_killed": None},
        {"event": "RankExited", "time": 3, "rank": 0, "code": 1 << 40, "memory": 0, "memory_killed": None},
        {"event": "CollectivesEntered", "time": 3, "rank": 0, "entries": [1]},
        {"event": "JobOver", "time": 3, "code": 256},
        {"event": "Output", "time": 1e999, "rank": 0, "stream": 1, "file": "a", "offset": 0, "length": 1},
        {"event": ["JobOver"]},
        {"event": "JobOver"},
        [],
    ],
)
def test_an_event_of_wrong_types_is_skipped(said: Any, tmp_path: Path) -> None:
    well = [PLANNED, RankStarted(2, 0, 7), RankExited(3, 0, 0, 0, None), RankExited(3, 1, 0, 0, None), JobOver(4, 0)]
    assert event_of(json.dumps(said)) is None
    (tmp_path / job_store.EVENTS).write_text(f"{line_of(well[0])}\n{json.dumps(said)}\n{lines(well[1:])}")
    history, _, _ = look_at(str(tmp_path))
    assert [one.exited for one in history.ranks.values()] == well[2:4]
    assert history.over == well[-1]


def test_output_that_is_longer_than_memory_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    os.truncate(tmp_path / "out", 3 << 20)
    place = OutputPlace(2, 0, 1, "out", 0, (1 << 63) - 1)
    (tmp_path / job_store.EVENTS).write_text(lines([PLANNED, place]))
    reader = replay.OutputReader(str(tmp_path), None)
    try:
        assert sum(len(one.data) for one in reader.more() if one is not None and hasattr(one, "data")) == 3 << 20
    finally:
        reader.close()
