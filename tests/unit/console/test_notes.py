"""console/notes, diagnosis/diagnosis: what the user reads about a job, from its events alone."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest

from launchpad.console.notes import Notes
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.output_tail import TAIL_BYTES
from launchpad.diagnosis.verdict_text import MOST_LINES
from launchpad.protocol.events import (
    STDERR,
    STDOUT,
    AtPrompt,
    ConsoleClosed,
    ExceptionRaised,
    FaultInjected,
    FaultMissed,
    JobPlanned,
    LeftoversAwaited,
    LogFailed,
    NodeJoined,
    NodeLost,
    NodeRefused,
    NodeUnwell,
    NoMpi,
    NotForked,
    OrphansKilled,
    Output,
    OwnWorld,
    PhaseChanged,
    RankExited,
    RankFailed,
    RankRaised,
    RanksHeld,
    RanksSpawned,
    RankStarted,
    Restarted,
    StartFailed,
    StdinUnused,
    StopRequested,
)

SECOND = 10**9


def planned(*nodes: int, timeout: float = 0.0) -> JobPlanned:
    """A job with these numbers of ranks on nodes h0, h1 …, planned at 100 s."""
    numbers = iter(range(sum(nodes)))
    placed = [[f"h{place}", [next(numbers) for _ in range(count)]] for place, count in enumerate(nodes)]
    return JobPlanned(100 * SECOND, 1.7e9, "0a1b", 1, "id", ["true"], "/work", placed, {}, timeout, "")


class Job:
    """A job that started at 101 s: its diagnosis, and the notes."""

    def __init__(self, ranks: int = 4, *, quiet: bool = False, nodes: tuple[int, ...] = (), timeout: float = 0) -> None:
        self.notes: list[str] = []
        self.diagnosis = Diagnosis()
        self.sinks = [Notes(self.diagnosis, self.notes.append, quiet), self.diagnosis]
        self.on(planned(*(nodes or (ranks,)), timeout=timeout))
        self.on(*(RankStarted(101 * SECOND, rank, 4000 + rank) for rank in range(ranks)))

    def on(self, *events: Any) -> None:
        for event in events:
            assert [sink.on(event) for sink in self.sinks] == [False, False]

    def report(self) -> list[str]:
        return self.diagnosis.report(self.diagnosis.verdict())

    def fails(self, rank: int, code: int, *before: Any, killed: bool = False) -> list[str]:
        """The report of the rank's failure at 103.5 s, after these events."""
        self.on(*before, RankExited(int(103.5 * SECOND), rank, code, 512 << 20, killed))
        self.on(stopping("failure", 15, 5.0, []))
        return self.report()


def stderr(rank: int, data: bytes) -> Output:
    return Output(0, rank, STDERR, data)


def stopping(cause: str, signum: int, seconds: float, ranks: list[int], at: int = 104) -> PhaseChanged:
    return PhaseChanged(at * SECOND, "stopping", cause, signum, seconds, ranks)


def test_the_first_line_says_which_rank_failed_and_how_and_when() -> None:
    (line,) = Job().fails(2, 7)
    when = r"\d\d:\d\d:\d\d"
    assert re.fullmatch(rf"rank 2 failed first: exit code 7 \(pid 4002, 2\.50 s after the start, {when}\)", line)


def test_the_time_of_day_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    assert "22:13:23)" in Job().fails(2, 7)[0]


def test_the_failed_ranks_last_error_output_follows() -> None:
    lines = Job().fails(
        2, 1, stderr(2, b"Trace"), stderr(1, b"mine\n"), Output(0, 2, STDOUT, b"out\n"), stderr(2, b"back\nboom\n")
    )
    assert lines[1:] == ["    Traceback", "    boom"]


def test_only_the_last_lines_of_a_long_tail_are_shown() -> None:
    lines = Job().fails(0, 1, stderr(0, b"".join(b"line %d\n" % i for i in range(100))))
    assert lines[1] == f"    … ({101 - MOST_LINES} earlier lines)"
    assert lines[2:] == [f"    line {i}" for i in range(101 - MOST_LINES, 100)]


def test_a_flood_of_error_output_does_not_fill_memory() -> None:
    job = Job()
    for _ in range(50):
        job.on(stderr(0, b"x" * TAIL_BYTES))
    assert job.fails(0, 1, stderr(0, b"\nlast words"))[-1] == "    last words"
    assert sum(len(one.errors) for one in job.diagnosis.history.ranks.values()) <= TAIL_BYTES


def test_a_progress_bar_shows_its_last_state_and_invalid_bytes_are_replaced() -> None:
    lines = Job().fails(0, 1, stderr(0, b"\r 10%\r 20%\r 30%\nwindows\r\n\nbad \xff byte\n"))
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
def test_a_recorded_error_is_shown_instead_of_the_error_output(message: Any, lines: list[str]) -> None:
    assert Job().fails(2, 1, stderr(2, b"noise at exit\n"), recorded(message))[1:] == lines


@pytest.mark.parametrize(
    "error", ["", "{", "[]", "null", "5", '"text"', "{}", '{"message": {}}', '{"message": ""}', '{"message": null}']
)
def test_an_error_file_without_a_message_leaves_the_error_output(error: str) -> None:
    assert Job().fails(2, 1, stderr(2, b"boom\n"), RankRaised(0, 2, error))[1:] == ["    boom"]


def test_a_rank_killed_by_the_oom_killer_is_reported_with_its_size() -> None:
    (line,) = Job().fails(0, -9, killed=True)
    assert "killed by SIGKILL (Killed), by the kernel's OOM killer; it used 512 MiB (pid" in line


def test_a_sigkill_that_was_not_the_oom_killers_is_reported_as_such() -> None:
    (line,) = Job().fails(0, -9)
    assert "killed by SIGKILL (Killed); the kernel's OOM-kill counters did not rise, so a process sent the sig" in line


def test_ranks_that_were_stopped_are_distinguished_from_those_that_failed_too() -> None:
    job = Job(6)
    job.on(RankExited(103 * SECOND, 2, 7, 0, False), RankExited(int(103.2 * SECOND), 4, 1, 0, False))
    job.on(stopping("failure", 15, 5.0, [0, 1, 3]))
    job.on(*(RankExited(104 * SECOND, rank, -15, 0, False) for rank in (0, 1, 3)))
    job.on(RankExited(104 * SECOND, 5, 0, 0, False))
    lines = job.report()
    assert lines[1:] == ["stopped because of it: ranks 0-1, 3", "failed too: rank 4"]


@pytest.mark.parametrize(
    ("kind", "event", "line"),
    [
        ("timeout", None, "the job was stopped: it ran longer than --timeout 90 s"),
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
        ("signal", StopRequested(103 * SECOND, 2), "the job was stopped by SIGINT"),
        (
            "console",
            ConsoleClosed(103 * SECOND, "Broken pipe"),
            "the job was stopped: standard output can't be written to (Broken pipe)",
        ),
    ],
)
def test_each_cause_has_its_sentence(kind: str, event: Any, line: str) -> None:
    job = Job(timeout=90.0)
    job.on(*([event] if event else []))
    job.on(stopping(kind, 15, 5.0, [] if kind == "lost" else [0, 2]))
    assert job.report() == [line, *(["stopped because of it: ranks 0, 2"] if kind != "lost" else [])]


def test_a_stop_by_signal_is_announced_with_what_comes_next() -> None:
    job = Job()
    job.on(StopRequested(100 * SECOND, 2), stopping("signal", 2, 30.0, [0, 1, 2, 3]))
    assert job.notes == ["sent SIGINT to ranks 0-3; they have 30 s to exit; Ctrl-C kills them at once"]
    job.on(stopping("signal", 15, 5.0, [1], at=134))
    job.on(PhaseChanged(135 * SECOND, "over", "signal", 0, 0.0, []))
    assert job.notes[1:] == ["rank 1 still running: sent SIGTERM"]


def test_injected_faults_are_told_when_they_happen_and_in_the_report() -> None:
    job = Job(nodes=(2, 2))
    job.on(FaultInjected(103 * SECOND, 9, 3, 1), FaultInjected(103 * SECOND, 0, -1, 1), FaultMissed(0, "kill:0@9s"))
    told = ["SIGKILL to rank 3 on h1", "the link to h1 cut"]
    assert job.notes == [*(f"injected: {one}" for one in told), "not injected: kill:0@9s; the job ended first"]
    first, second = job.fails(3, -9)
    assert first.startswith("rank 3 on h1 failed first: killed by SIGKILL (Killed), by --inject (pid 4003, 2.50 s")
    assert re.sub(r" \([0-9:]+\)", "", second) == f"injected: {'; '.join(told)}"


def test_the_failure_of_a_rank_that_got_no_fault_is_its_own() -> None:
    job = Job()
    job.on(FaultInjected(103 * SECOND, 9, 3, 0), FaultInjected(103 * SECOND, 15, 2, 0))
    assert "inject" not in job.fails(2, -9)[0]


def test_a_host_that_was_cut_off_may_be_lost_in_the_next_attempt() -> None:
    job = Job(nodes=(2, 2))
    job.on(FaultInjected(103 * SECOND, 0, -1, 1), FaultInjected(103 * SECOND, 9, 1, 0))
    job.on(Restarted(104 * SECOND, 1, 9, 1, -9, -1, 1), NodeLost(105 * SECOND, 1, "silent", [2, 3]))
    assert job.notes[-1].endswith("restarting all ranks (restart 1 of 9)")
    job.on(Restarted(106 * SECOND, 2, 9, -1, 0, 1))
    assert "failed: h1 was lost (silent, by --inject); restarting" in job.notes[-1]
    assert job.diagnosis.history.injected == []


def test_a_stop_by_failure_is_announced_only_if_ranks_do_not_exit() -> None:
    job = Job()
    job.on(stopping("failure", 15, 5.0, [0, 1]))
    assert job.notes == []
    job.on(stopping("failure", 9, 10.0, [0, 1], at=109))
    assert job.notes == ["ranks 0-1 still running: sent SIGKILL"]


def test_orphans_and_failed_logs_are_announced() -> None:
    job = Job()
    job.on(OrphansKilled(0, ["71 python", "72 sleep"]), LogFailed(0, "/logs/0/stdout.log", "No space left on device"))
    assert job.notes == [
        "killed 2 processes that ranks left behind: 71 python, 72 sleep",
        "/logs/0/stdout.log: No space left on device; the rank's output is missing there from now on",
    ]


def test_a_note_on_one_of_several_nodes_names_it() -> None:
    job = Job(nodes=(2, 2))
    job.on(OrphansKilled(0, ["71 python"], 1), NotForked(0, "no room", 0), NoMpi(0, "mpich", "no library", 1))
    assert job.notes == [
        "killed 1 process that ranks left behind on h1: 71 python",
        "ranks on h0 can't be forked, so each imports everything itself: no room",
        "each rank on h1 is a world of its own: no library",
    ]


@pytest.mark.parametrize(
    ("option", "remedy"), [("--local-ranks-filter", "add 1 to it"), ("--redirects", "--tee 1 shows it")]
)
def test_a_prompt_that_is_not_shown_is_told_once(option: str, remedy: str) -> None:
    job = Job(nodes=(2, 2))
    job.sinks[0] = Notes(job.diagnosis, job.notes.append, quiet=False, hides=lambda local: option if local else "")
    job.on(AtPrompt(0, 2, True))
    assert job.notes == []
    job.on(AtPrompt(0, 3, True), AtPrompt(1, 3, False), AtPrompt(2, 3, True))
    assert job.notes == [f"rank 3 waits at a prompt that {option} hides; {remedy}"]


def test_input_that_was_read_in_vain_is_told() -> None:
    job = Job()
    job.on(StdinUnused(0, 4), StdinUnused(0, 1))
    rest = "of standard input that no rank used; run it with < /dev/null to leave standard input to other commands"
    assert job.notes == [f"read 4 bytes {rest}", f"read 1 byte {rest}"]


def test_many_orphans_are_cut_visibly() -> None:
    job = Job()
    job.on(OrphansKilled(0, [f"{pid} x" for pid in range(71, 80)]))
    assert job.notes == ["killed 9 processes that ranks left behind: 71 x, 72 x, 73 x, 74 x, 75 x, 76 x, 77 x, …, 79 x"]


def test_the_user_is_told_who_is_waited_for() -> None:
    job = Job()
    job.on(LeftoversAwaited(0, ["71 python up.py"], 30.0))
    assert job.notes == [
        "waiting up to 30 s for 1 process that ranks left behind: 71 python up.py; Ctrl-C kills it at once"
    ]


def test_what_is_quoted_of_the_user_stays_on_one_line() -> None:
    job = Job()
    job.on(
        OrphansKilled(0, ["71 python -c import signal\nprint(1)\x1b[2J"]),
        RanksSpawned(0, 0, 0, [4], ["python", "-c", "a\nb"]),
        LogFailed(0, "/logs\n/0", "No space left on device"),
    )
    assert job.notes == [
        r"killed 1 process that ranks left behind: 71 python -c import signal\nprint(1)\x1b[2J",
        r"rank 0 spawned rank 4: python -c a\nb",
        r"/logs\n/0: No space left on device; the rank's output is missing there from now on",
    ]


def test_quiet_silences_the_notes_but_not_the_report() -> None:
    job = Job(quiet=True)
    job.on(
        StopRequested(103 * SECOND, 2),
        stopping("signal", 2, 30.0, [0]),
        OrphansKilled(0, ["71 python"]),
        LogFailed(0, "x", "y"),
    )
    assert job.notes == []
    assert job.report()[0] == "the job was stopped by SIGINT"


def test_with_several_nodes_each_rank_is_named_with_its_node() -> None:
    job = Job(nodes=(2, 2))
    lines = job.fails(3, 7)
    assert lines[0].startswith("rank 3 on h1 failed first: exit code 7 (pid 4003")


def test_a_lost_node_is_named_with_its_ranks() -> None:
    job = Job(nodes=(2, 2))
    job.on(NodeLost(103 * SECOND, 1, "no heartbeat for 10 s", [2, 3]))
    job.on(stopping("lost", signal.SIGTERM, 5, [0, 1]))
    assert job.report() == [
        "h1 was lost: no heartbeat for 10 s; it was running ranks 2-3",
        "stopped because of it: ranks 0-1",
    ]


def test_a_node_lost_while_stopping_is_in_the_report_too() -> None:
    job = Job(nodes=(2, 2))
    job.on(RankExited(102 * SECOND, 0, 7, 0, False), stopping("failure", signal.SIGTERM, 5, [1, 2, 3]))
    job.on(NodeLost(105 * SECOND, 1, "its agent hung up", [2, 3]))
    lines = job.report()
    assert lines[-2:] == ["h1 was lost: its agent hung up; it was running ranks 2-3", "stopped because of it: rank 1"]


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (1, "earlier attempt: 1"),
        (2, "earlier attempts: 1; 2"),
        (6, "earlier attempts (the last 5 of 6): 2; 3; 4; 5; 6"),
    ],
)
def test_the_last_earlier_attempts_are_listed(count: int, line: str) -> None:
    job = Job()
    job.diagnosis.earlier = [str(number) for number in range(1, count + 1)]
    assert job.fails(2, 7)[-1] == line


HOSTILE = "odd\x1b]0;title\x07\x9b2J\n::error::forged\nlaunchpad: all well\u2028"


def test_worlds_of_one_are_said_once() -> None:
    job = Job()
    for count, rank in ((0, 3), (0, 3), (1, 1), (1, 0)):
        job.on(OwnWorld(0, rank))
        assert len(job.notes) == count
    assert job.notes[0].startswith("ranks 1, 3 use MPI, each in a world of its own; ")


@pytest.mark.parametrize(
    "event",
    [
        NotForked(0, HOSTILE),
        NodeRefused(0, HOSTILE, HOSTILE),
        OrphansKilled(0, [f"17 {HOSTILE}"]),
        NoMpi(0, "", HOSTILE),
        LogFailed(0, HOSTILE, HOSTILE),
        NodeJoined(0, 1, HOSTILE, 2),
        NodeUnwell(0, 0, "", [HOSTILE]),
        RanksSpawned(0, 0, 0, [4], [HOSTILE]),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_a_note_quotes_stays_within_its_line(event: Any) -> None:
    job = Job()
    job.on(event)
    assert "odd\\x1b" in job.notes[-1]
    assert all(note.isprintable() for note in job.notes)


def test_an_agent_may_make_up_the_number_of_its_node() -> None:
    job = Job()
    job.on(NoMpi(0, "mpich", "no library", 1 << 40))
    assert len(job.notes) == 1


@pytest.mark.parametrize(
    "events",
    [
        [RankFailed(103 * SECOND, 2, 7, HOSTILE)],
        [StartFailed(103 * SECOND, 2, HOSTILE)],
        [NodeLost(103 * SECOND, 0, HOSTILE, [0, 1, 2, 3])],
        [ExceptionRaised(103 * SECOND, 2, 4002, HOSTILE, {"type": HOSTILE, "message": "", "frames": []})],
        [
            ExceptionRaised(
                *(103 * SECOND, 2, 4002, ""),
                {"type": "E", "message": HOSTILE, "frames": [[HOSTILE, 1, HOSTILE, HOSTILE]], "notes": [HOSTILE]},
            )
        ],
    ],
    ids=["failed", "not started", "lost", "type", "exception"],
)
def test_the_report_has_no_control_characters_and_forges_no_line(events: list[Any]) -> None:
    job = Job()
    job.on(*events)
    lines = [*job.fails(2, 1), job.diagnosis.summary()]
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(("::", "launchpad:")) for line in lines)


def test_ranks_that_are_quiet_are_not_said_to_have_been_asked_in_vain() -> None:
    job = Job(2)
    job.on(RanksHeld(170 * SECOND, "idle", [0, 1], ["ranks 0-1 are sleeping in pipe_read (it did not answer)"]))
    (said,) = job.notes
    assert said.startswith(
        "no output or progress for 60 s: ranks 0-1 are sleeping in pipe_read; launchpad stacks shows"
    )
