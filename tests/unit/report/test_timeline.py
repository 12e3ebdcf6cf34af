"""The report's timeline, trace and curves, from events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchpad.job.masking import masked_environ, masked_words
from launchpad.protocol.events import (
    JobOver,
    JobPlanned,
    PhaseChanged,
    RankExited,
    RanksSpawned,
    RankStarted,
    WorldRestarted,
    WorldStopping,
)
from launchpad.record.event_lines import line_of
from launchpad.report.output import cleaned
from launchpad.report.timeline import HOST, JOB, Curve
from launchpad.report.trace import trace_of
from launchpad.report.used import curves, used
from tests.support.report import EVENTS, second, timeline_of


def test_a_timeline_has_a_row_for_the_job_each_host_and_each_rank() -> None:
    timeline = timeline_of(EVENTS)
    rows = {(row.name, row.rank): row for row in timeline.rows}
    assert list(rows) == [("job", JOB), ("a", HOST), ("rank 0", 0), ("rank 1", 1), ("b", HOST), ("rank 2", 2)]
    attempts = [(one.start, one.end, one.outcome, one.text) for one in rows["job", JOB].spans]
    assert [(start, end, outcome) for start, end, outcome, _ in attempts] == [
        (0, second(3) - second(0), "failed"),
        (second(3) - second(0), second(6.5) - second(0), "failed"),
    ]
    assert "rank 1 on a, ValueError: no good" in attempts[0][3]
    assert "b was lost" in attempts[1][3]
    runs = {row.rank: [one.outcome for one in row.spans if one.kind == "run"] for row in timeline.rows if row.rank >= 0}
    assert runs == {0: ["stopped", "stopped"], 1: ["failed", "stopped"], 2: ["stopped", "lost"]}
    marks = [(one.kind, one.text) for one in rows["rank 1", 1].marks]
    assert marks[0] == ("exception", "ValueError: no good at /home/ann/train.py:6")
    assert [kind for kind, _ in marks] == ["exception", "exit", "signal", "exit"]
    assert [one.kind for one in rows["b", HOST].marks] == ["lost"]
    assert [(one.rank, one.host, one.pid, one.memory) for one in timeline.ranks] == [
        (0, "a", 20, 2 << 20),
        (1, "a", 21, 2 << 20),
        (2, "b", 22, 0),
    ]


def test_a_trace_has_a_process_for_each_host_and_a_thread_for_each_rank() -> None:
    events = trace_of(timeline_of(EVENTS), "job 0badcafe")["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M" and one["tid"]}
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert processes == {1: "job 0badcafe", 2: "a", 3: "b"}
    assert [(processes[process], name) for (process, _), name in names.items()][1:] == [
        ("a", "a"),
        ("a", "rank 0"),
        ("a", "rank 1"),
        ("b", "b"),
        ("b", "rank 2"),
    ]
    spans = [one for one in events if one["ph"] == "X" and one["cat"] == "run"]
    assert [(names[one["pid"], one["tid"]], one["ts"], one["dur"]) for one in spans[:2]] == [
        ("rank 0", 1e6, pytest.approx(1.3e6)),
        ("rank 0", 4e6, pytest.approx(2.1e6)),
    ]
    (lost,) = [one for one in events if one["ph"] == "i" and one["cat"] == "lost"]
    assert (processes[lost["pid"]], lost["ts"], lost["s"]) == ("b", 6e6, "p")


def test_what_ranks_use_is_a_curve_for_each() -> None:
    samples = [
        {
            "time": second(at),
            "ranks": [[0, "R", cpu, 2_000_000_000, 1, 0, 0]],
            "gpus": [[gpu, 50, 0, 0, {}] for gpu in "ab"],
        }
        for at, cpu in ((1, 10.0), (2, 10.5), (4, 13.5), (5, 0.1))  # it is started again before the last one
    ]
    samples[-1]["ranks"] += [[1, "S", -1, -1, -1, -1, -1]]  # nothing is known of it
    cores, memory, gpus = curves(samples, second(0))
    assert cores.by_rank == {0: ((second(2) - second(0), 0.5), (second(4) - second(0), 1.5))}
    assert [value for _, value in memory.by_rank[0]] == [2.0] * 4
    assert [value for _, value in gpus.by_rank[JOB]] == [1.0] * 4
    other_host = {"time": second(4) + 9, "ranks": [], "gpus": [["c", 100, 0, 0, {}]]}
    *_, gpus = curves([*samples[:3], other_host, samples[3]], second(0))
    assert [value for _, value in gpus.by_rank[JOB]] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert list(memory.by_rank) == [0]
    assert curves([], 0) == []


def test_of_many_samples_those_of_some_moments_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with a rank each; the job is started again every 100 s, and each rank uses one core from then on."""
    folder = str(tmp_path)
    (tmp_path / "events.jsonl").write_text(f"{line_of(EVENTS[0])}\n")
    lines = [
        json.dumps(
            {"time": second(at) + rank, "ranks": [[rank, "R", at % 100, 1 << 30, 1, 0, 0]], "gpus": []},
            separators=(",", ":"),
        )
        for at in range(5, 1000, 5)
        for rank in (0, 1)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, "{cut o"]))
    begins = [second(at) for at in range(100, 1000, 100)]
    (cores, memory), apart = used(folder, 2, begins)
    assert (len(memory.by_rank[1]), apart) == (199, 0.0)
    monkeypatch.setattr("launchpad.report.used.WHOLE_BYTES", len(lines[0]) * 20)
    monkeypatch.setattr("launchpad.report.used.MOMENTS", 25)
    (cores, memory), apart = used(folder, 2, begins)
    assert 37 < apart < 40
    assert [len(points) for points in memory.by_rank.values()] == [25, 25]
    assert all(0.9 < value < 1.1 for _, value in cores.by_rank[0])  # also where it was started again in between
    assert len(cores.by_rank[0]) == 24


def test_lines_are_as_a_terminal_would_leave_them() -> None:
    assert cleaned(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\r\n10%\r20%\rdone\n") == b"red x\ndone\n"
    assert cleaned(b"one\na\x1b]0;x\ntwo\n") == b"one\na\ntwo\n"  # the sequence has no end
    long = b"x" * (1 << 20)
    assert cleaned(b"10%\r20%\n" + long + b"\n") == b"20%\n" + long + b"\n"


def test_a_job_without_an_end_lasts_until_its_last_sample() -> None:
    events = EVENTS[:2]
    curve = Curve("CPU", "cores", {0: ((10, 1.0), (9_000_000_000, 1.0))})
    assert timeline_of(events, [curve]).end == 9_000_000_000
    assert timeline_of([*events, JobOver(second(3), 0)], [curve]).end == second(3) - second(0)


SECRET = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "WANDB_API_KEY", "MYSQL_PWD")


def test_secrets_are_masked() -> None:
    shown = masked_environ(
        {
            **dict.fromkeys(SECRET, "hunter2"),
            "PWD": "/home",
            "TOKENIZERS_PARALLELISM": "1",
            "URL": "redis://ann:f@host/0",
            "EMPTY_TOKEN": "",
        }
    )
    assert {name for name, value in shown.items() if value == "***"} == set(SECRET)
    assert (shown["PWD"], shown["TOKENIZERS_PARALLELISM"], shown["URL"]) == ("/home", "1", "redis://ann:***@host/0")
    assert masked_environ({"HOOK": "hunter2", "B": "2"}, {"HOOK"}) == {"HOOK": "***", "B": "2"}
    assert masked_words(["-qx", "A=1", "-vxB=2", "-qv", "C=3"]) == ["-qx", "A=***", "-vxB=***", "-qv", "C=3"]
    words = "run -x A=1 --env B=2 -xC=3 --env=D=4 t.py --api-key 5 --lr 0.1 --password=6 API_TOKEN=7 --token --quiet"
    assert " ".join(masked_words(words.split())) == (
        "run -x A=*** --env B=*** -xC=*** --env=*** t.py --api-key *** --lr 0.1 --password=*** API_TOKEN=*** "
        "--token --quiet"
    )


def test_a_world_that_started_again_alone() -> None:
    worlds = [("a", [0]), ("b", [1, 2])]
    timeline = timeline_of(
        [
            JobPlanned(second(0), 0.0, "j", 1, "", [], "", worlds, {}, 0.0, "", roles=worlds),
            *(RankStarted(second(1), rank, 20 + rank) for rank in range(3)),
            RankExited(second(2), 1, 7, 0, False),
            WorldStopping(second(2), "b", 15, 5.0, [2]),
            RankExited(second(2.1), 2, -15, 0, False),
            WorldRestarted(second(3), "b", [1, 2], 1, 2),
            *(RankStarted(second(3.5), rank, 30 + rank) for rank in (1, 2)),
            *(RankExited(second(4), rank, 0, 0, False) for rank in range(3)),
            JobOver(second(4), 0),
        ]
    )
    rows = {row.name: row for row in timeline.rows}
    runs = {name: [one.outcome for one in row.spans if one.kind == "run"] for name, row in rows.items()}
    assert (runs["a rank 0"], runs["b rank 0"], runs["b rank 1"]) == (["well"], ["failed", "well"], ["stopped", "well"])
    (mark,) = [one for one in rows["job"].marks if one.kind == "restart"]
    assert mark.text == "b started again: b rank 0, exit code 7 after 1.00 s"
    starts = [one for one in rows["b rank 1"].spans if one.kind == "start"]
    assert [one.end - one.start for one in starts] == [second(1) - second(0), second(0.5) - second(0)]


def test_what_a_world_had_spawned_before_it_started_again() -> None:
    """It stays in the timeline, and says nothing about the end."""
    worlds = [("a", [0])]
    timeline = timeline_of(
        [
            JobPlanned(second(0), 0.0, "j", 1, "", [], "", worlds, {}, 0.0, "", roles=worlds),
            RankStarted(second(1), 0, 20),
            RanksSpawned(second(1), 0, 0, [1], ["s.py"]),
            RankStarted(second(1.5), 1, 21),
            RankExited(second(2), 1, 7, 0, False),
            WorldStopping(second(2), "a", 15, 5.0, [0]),
            RankExited(second(2.1), 0, -15, 0, False),
            WorldRestarted(second(3), "a", [0], 1, 2),
            RankStarted(second(3.5), 0, 30),
            RankExited(second(4), 0, 0, 0, False),
            PhaseChanged(second(4), "over", "", 0, 0.0, []),
            JobOver(second(4), 0),
        ]
    )
    runs = {row.name: [one.outcome for one in row.spans if one.kind == "run"] for row in timeline.rows}
    assert (runs["a rank 0"], runs["a rank 1"]) == (["stopped", "well"], ["failed"])
    (attempt,) = [one for one in timeline.rows[0].spans if one.kind == "attempt"]
    assert (attempt.text, attempt.outcome) == ("attempt 0: every rank exited with code 0", "well")
