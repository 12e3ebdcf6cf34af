"""report/summary: what a failed job's user reads, from the events alone."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest

from launchpad.events import (
    STDERR,
    STDOUT,
    ConsoleClosed,
    LogFailed,
    NodeLost,
    Output,
    PeerFailed,
    PhaseChanged,
    RankExited,
    RankRaised,
    RankStarted,
    StartFailed,
    StopRequested,
    StraysEnded,
)
from launchpad.failures import JobPlanned
from launchpad.report.story import TAIL_BYTES
from launchpad.report.summary import Summary
from launchpad.report.telling import MOST_LINES

SECOND = 10**9


def planned(*nodes: int, timeout: float = 0.0) -> JobPlanned:
    """A job with so many ranks on each node; they are called h0, h1 …; it was planned at 100 s."""
    numbers = iter(range(sum(nodes)))
    placed = [[f"h{place}", [next(numbers) for _ in range(count)]] for place, count in enumerate(nodes)]
    return JobPlanned(100 * SECOND, 1.7e9, "0a1b", 1, "id", ["true"], "/work", placed, {}, timeout, "")


class Told:
    """A summary of a job that started at 101 s, and the notes that it made."""

    def __init__(self, ranks: int = 4, *, quiet: bool = False, nodes: tuple[int, ...] = (), timeout: float = 0) -> None:
        self.notes: list[str] = []
        self.summary = Summary(self.notes.append, quiet)
        self.on(planned(*(nodes or (ranks,)), timeout=timeout))
        self.on(*(RankStarted(101 * SECOND, rank, 4000 + rank) for rank in range(ranks)))

    def on(self, *events: Any) -> None:
        for event in events:
            assert self.summary.on(event) is False

    def report(self) -> list[str]:
        return self.summary.report(self.summary.verdict())

    def fails(self, rank: int, code: int, *before: Any, killed: bool = False) -> list[str]:
        """The report of the rank's failure at 103.5 s, after these events."""
        self.on(*before, RankExited(int(103.5 * SECOND), rank, code, 512 << 20, killed))
        self.on(stopping("failure", 15, 5.0, []))
        return self.report()


def stderr(rank: int, data: bytes) -> Output:
    return Output(0, rank, STDERR, data)


def stopping(cause: str, signum: int, seconds: float, ranks: list[int], at: int = 104) -> PhaseChanged:
    return PhaseChanged(at * SECOND, "stopping", cause, signum, seconds, ranks)


def test_the_first_line_says_which_rank_and_how_and_when() -> None:
    (line,) = Told().fails(2, 7)
    when = r"\d\d:\d\d:\d\d"
    assert re.fullmatch(rf"rank 2 failed first: exit code 7 \(pid 4002, 2\.50 s after the start, {when}\)", line)


def test_the_time_of_day_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    assert "22:13:23)" in Told().fails(2, 7)[0]


def test_the_failed_ranks_last_error_output_follows() -> None:
    lines = Told().fails(
        2, 1, stderr(2, b"Trace"), stderr(1, b"mine\n"), Output(0, 2, STDOUT, b"out\n"), stderr(2, b"back\nboom\n")
    )
    assert lines[1:] == ["    Traceback", "    boom"]


def test_a_long_tail_is_cut_to_its_last_lines_and_says_so() -> None:
    lines = Told().fails(0, 1, stderr(0, b"".join(b"line %d\n" % i for i in range(100))))
    assert lines[1] == f"    … ({100 - MOST_LINES} lines above)"
    assert lines[2:] == [f"    line {i}" for i in range(101 - MOST_LINES, 100)]


def test_a_flood_of_error_output_does_not_fill_the_memory() -> None:
    told = Told()
    for _ in range(50):
        told.on(stderr(0, b"x" * TAIL_BYTES))
    assert told.fails(0, 1, stderr(0, b"\nlast words"))[-1] == "    last words"
    assert sum(len(one.tail) for one in told.summary.story.ranks.values()) <= TAIL_BYTES


def test_of_a_bar_only_the_last_state_is_told_and_odd_bytes_do_not_matter() -> None:
    lines = Told().fails(0, 1, stderr(0, b"\r 10%\r 20%\r 30%\nwindows\r\n\nbad \xff byte\n"))
    assert lines[1:] == ["     30%", "    windows", "    bad \ufffd byte"]


def recorded(message: Any) -> RankRaised:
    return RankRaised(0, 2, json.dumps({"message": message}))


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        (
            {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback:\n  f()\nValueError: x\n"}},
            ["    Traceback:", "      f()", "    ValueError: x"],
        ),
        ({"message": "ValueError: x", "extraInfo": {}}, ["    ValueError: x"]),
        ({"message": "ValueError: x"}, ["    ValueError: x"]),
        ("core dumped", ["    core dumped"]),
    ],
)
def test_a_recorded_error_is_told_instead_of_the_error_output(message: Any, lines: list[str]) -> None:
    assert Told().fails(2, 1, stderr(2, b"noise at exit\n"), recorded(message))[1:] == lines


@pytest.mark.parametrize(
    "error", ["", "{", "[]", "null", "5", '"text"', "{}", '{"message": {}}', '{"message": ""}', '{"message": null}']
)
def test_an_error_file_that_says_nothing_leaves_the_error_output(error: str) -> None:
    assert Told().fails(2, 1, stderr(2, b"boom\n"), RankRaised(0, 2, error))[1:] == ["    boom"]


def test_a_rank_killed_for_memory_is_told_so_with_its_size() -> None:
    (line,) = Told().fails(0, -9, killed=True)
    assert "killed by SIGKILL (Killed), by the kernel for want of memory: it had 512 MiB (pid" in line


def test_a_kill_that_was_not_for_memory_is_told_apart() -> None:
    (line,) = Told().fails(0, -9)
    assert "killed by SIGKILL (Killed); the kernel's memory counters did not rise, so somebody sent the signal" in line


def test_the_ranks_that_were_stopped_are_told_apart_from_those_that_failed_too() -> None:
    told = Told(6)
    told.on(RankExited(103 * SECOND, 2, 7, 0, False), RankExited(int(103.2 * SECOND), 4, 1, 0, False))
    told.on(stopping("failure", 15, 5.0, [0, 1, 3]))
    told.on(*(RankExited(104 * SECOND, rank, -15, 0, False) for rank in (0, 1, 3)))
    told.on(RankExited(104 * SECOND, 5, 0, 0, False))
    lines = told.report()
    assert lines[1:] == ["stopped because of it: ranks 0-1, 3", "failed too: rank 4"]


@pytest.mark.parametrize(
    ("kind", "event", "line"),
    [
        ("timeout", None, "the job was ended: it ran longer than --timeout 90 s"),
        (
            "lost",
            NodeLost(103 * SECOND, 0, "its agent hung up", [0, 1]),
            "the job's node was lost: its agent hung up; its ranks were killed",
        ),
        (
            "start",
            StartFailed(103 * SECOND, 1, "can't execute x: no"),
            "rank 1 could not be started: can't execute x: no",
        ),
        ("signal", StopRequested(103 * SECOND, 2), "the job was ended by SIGINT"),
        (
            "console",
            ConsoleClosed(103 * SECOND, "Broken pipe"),
            "the job was ended: standard output takes no more (Broken pipe)",
        ),
        (
            "peer",
            PeerFailed(103 * SECOND, "rank 7 on b failed", 9),
            "the world failed on another node: rank 7 on b failed",
        ),
    ],
)
def test_every_cause_has_its_sentence(kind: str, event: Any, line: str) -> None:
    told = Told(timeout=90.0)
    told.on(*([event] if event else []))
    told.on(stopping(kind, 15, 5.0, [] if kind == "lost" else [0, 2]))
    assert told.report() == [line, *(["stopped because of it: ranks 0, 2"] if kind != "lost" else [])]


def test_a_stop_by_signal_is_noted_at_once_with_what_comes_next() -> None:
    told = Told()
    told.on(stopping("signal", 2, 30.0, [0, 1, 2, 3]))
    assert told.notes == ["sent SIGINT to ranks 0-3; they have 30 s, Ctrl-C kills them at once"]
    told.on(stopping("signal", 15, 5.0, [1], at=134))
    told.on(PhaseChanged(135 * SECOND, "over", "signal", 0, 0.0, []))
    assert told.notes[1:] == ["rank 1 still running: sent SIGTERM"]


def test_a_stop_by_failure_is_noted_only_where_ranks_do_not_leave() -> None:
    told = Told()
    told.on(stopping("failure", 15, 5.0, [0, 1]))
    assert told.notes == []
    told.on(stopping("failure", 9, 10.0, [0, 1], at=109))
    assert told.notes == ["ranks 0-1 still running: sent SIGKILL"]


def test_strays_and_failed_logs_are_noted() -> None:
    told = Told()
    told.on(StraysEnded(0, ["71 python", "72 sleep"]), LogFailed(0, "/logs/0/stdout.log", "No space left on device"))
    assert told.notes == [
        "ended 2 processes that ranks left behind: 71 python, 72 sleep",
        "/logs/0/stdout.log: No space left on device; what the rank writes from here on is missing there",
    ]


def test_quiet_silences_the_notes_and_not_the_report() -> None:
    told = Told(quiet=True)
    told.on(
        StopRequested(103 * SECOND, 2),
        stopping("signal", 2, 30.0, [0]),
        StraysEnded(0, ["71 python"]),
        LogFailed(0, "x", "y"),
    )
    assert told.notes == []
    assert told.report()[0] == "the job was ended by SIGINT"


def test_with_several_nodes_each_rank_is_named_with_its_own() -> None:
    told = Told(nodes=(2, 2))
    lines = told.fails(3, 7)
    assert lines[0].startswith("rank 3 on h1 failed first: exit code 7 (pid 4003")


def test_a_lost_node_is_named_with_what_it_ran() -> None:
    told = Told(nodes=(2, 2))
    told.on(NodeLost(103 * SECOND, 1, "nothing was heard of it for 10 s", [2, 3]))
    told.on(stopping("lost", signal.SIGTERM, 5, [0, 1]))
    assert told.report() == [
        "h1 was lost: nothing was heard of it for 10 s; it ran ranks 2-3",
        "stopped because of it: ranks 0-1",
    ]


def test_a_node_lost_while_stopping_stands_in_the_report_too() -> None:
    told = Told(nodes=(2, 2))
    told.on(RankExited(102 * SECOND, 0, 7, 0, False), stopping("failure", signal.SIGTERM, 5, [1, 2, 3]))
    told.on(NodeLost(105 * SECOND, 1, "its agent hung up", [2, 3]))
    lines = told.report()
    assert lines[-2:] == ["h1 was lost: its agent hung up; it ran ranks 2-3", "stopped because of it: rank 1"]
