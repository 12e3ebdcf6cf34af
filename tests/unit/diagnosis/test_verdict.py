"""diagnosis/verdict: who failed first, why, and what that did to the others; from events alone."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from launchpad.agent.host import ports, procfs
from launchpad.diagnosis import tracebacks
from launchpad.diagnosis.history import History
from launchpad.diagnosis.secondary import secondary_in, secondary_kind
from launchpad.diagnosis.verdict import Verdict, judge, verdict_on
from launchpad.diagnosis.verdict_json import as_json
from launchpad.diagnosis.verdict_text import describe, summarize
from launchpad.protocol.events import (
    STDERR,
    STDOUT,
    ClocksSeen,
    Crashed,
    ExceptionRaised,
    NodeLost,
    Output,
    RankFailed,
    RanksHeld,
    RankStarted,
    Restarted,
    SignalPassedOn,
    Stalled,
    StopRequested,
)
from launchpad.protocol.printable import printable
from tests.support.failures import GLOO, MS, at, exits, job, over, raises, recorded, stopping

LATE = "[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"


def blamed(verdict: Verdict) -> tuple[str, int, str]:
    assert verdict.cause is not None
    return verdict.kind, verdict.cause.rank, verdict.cause.kind


def test_a_victim_that_is_reported_first_is_not_blamed() -> None:
    """Rank 0 dies of its own accord, which is noticed late, and rank 1 fails because of it."""
    events = [*job(3), *raises(10, 1, "RuntimeError", GLOO), stopping(16, [0, 2]), exits(16.5, 0, -9, True)]
    verdict = judge([*events, exits(17, 2, -15), over(18)])
    assert blamed(verdict) == ("failure", 0, "memory")
    assert [one.rank for one in verdict.victims] == [1]
    assert (verdict.stopped, verdict.exit_code) == ((2,), 137)


def test_the_time_of_the_exception_counts_and_not_that_of_the_exit() -> None:
    slow = raises(10, 2, "ValueError", "own", after=900)
    events = [*job(3), *raises(12, 0, "TypeError", "later", line=9, after=1), stopping(14, [1, 2]), *slow]
    verdict = judge([*events, exits(15, 1, -15), over(950)])
    assert blamed(verdict) == ("failure", 2, "exception")
    assert verdict.failed_too == (0,)


def test_a_rank_that_raised_and_was_stopped_while_exiting_is_blamed() -> None:
    events = [*job(2), ExceptionRaised(at(5), 0, 100, "", recorded("ValueError", "own"))]
    events = [*events[:-1], *raises(8, 1, "RuntimeError", GLOO), stopping(14, [0]), events[-1], exits(15, 0, -15)]
    verdict = judge([*events, over(16)])
    assert (blamed(verdict), verdict.exit_code) == (("failure", 0, "exception"), 1)


@pytest.mark.parametrize(("message", "code"), [("7", 7), ("no more", 1)])
def test_a_rank_stopped_while_exiting_ends_the_job_with_the_code_it_would_have_had(message: str, code: int) -> None:
    left = ExceptionRaised(at(5), 0, 100, "", recorded("SystemExit", message))
    events = [*job(2), left, *raises(8, 1, "RuntimeError", GLOO), stopping(14, [0]), exits(15, 0, -15), over(16)]
    verdict = judge(events)
    assert (blamed(verdict), verdict.exit_code) == (("failure", 0, "exception"), code)
    assert "(stopped while it was exiting, " in describe(History(events), verdict)[0]


@pytest.mark.parametrize(("code", "killed", "kind"), [(-11, False, "signal"), (-9, True, "memory"), (3, False, "exit")])
def test_a_silent_exit_is_blamed(code: int, killed: bool, kind: str) -> None:
    events = [*job(2), exits(5, 1, code, killed), stopping(6, [0]), exits(7, 0, -15), over(8)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 1, kind)
    assert verdict.stopped == (0,)


def test_ranks_that_we_stopped_are_not_blamed_however_they_exit() -> None:
    own_handler = raises(20, 0, "SystemExit", "143", code=143)
    events = [
        *job(3),
        *raises(1, 2, "RuntimeError", GLOO),
        stopping(9, [0, 1]),
        *own_handler,
        exits(25, 1, 1),
        over(30),
    ]
    verdict = judge(events)
    assert blamed(verdict) == ("waited", 2, "exception")
    assert verdict.stopped == (0, 1)


def test_a_broken_pipe_is_a_ranks_own_failure_unless_another_rank_fails_then() -> None:
    alone = [*job(2), *raises(10, 1, "ConnectionResetError", "[Errno 104] Connection reset by peer"), stopping(16, [0])]
    assert blamed(judge([*alone, exits(17, 0, -15), over(18)])) == ("failure", 1, "exception")
    both = [*job(2), *raises(10, 1, "BrokenPipeError", "[Errno 32] Broken pipe"), exits(15.1, 0, 3), stopping(16, [])]
    assert blamed(judge([*both, over(18)])) == ("failure", 0, "exit")


def test_an_exception_is_judged_by_its_root_cause() -> None:
    began = recorded("ValueError", "own")
    raised = ExceptionRaised(at(3), 0, 100, "", recorded("RuntimeError", GLOO, context=began))
    wrapped = ExceptionRaised(
        at(2), 1, 101, "", recorded("MyError", "training failed", cause=recorded("RuntimeError", GLOO))
    )
    events = [*job(2), raised, exits(4, 0, 1), wrapped, exits(5, 1, 1), stopping(5, []), over(6)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 0, "exception")
    assert [(one.rank, one.why) for one in verdict.victims] == [
        (1, "RuntimeError: Connection closed by peer [127.0.0.1]:20115")
    ]


def test_a_rank_that_exited_early_is_named_if_there_are_only_victims() -> None:
    done = ExceptionRaised(at(9), 3, 103, "", {"type": "SystemExit", "message": "0", "frames": []})
    events = [*job(4), *raises(10, 0, "RuntimeError", GLOO), stopping(16, [1, 2]), done, exits(15.5, 3, 0)]
    history = History([*events, exits(17, 1, -15), exits(17, 2, -15), over(18)])
    verdict = verdict_on(history)
    assert (verdict.kind, verdict.early, verdict.exit_code) == ("early", (3,), 1)
    lines = describe(history, verdict)
    assert lines[0].startswith(
        "rank 3 exited with code 0 while others still waited for it; then rank 0 failed: Runtime"
    )
    shown = as_json(history, verdict, lines)
    assert (shown["rank"], shown["first_victim"], shown["line"]) == (3, 0, 7)


def test_a_rank_that_exited_early_is_shown_with_its_own_host() -> None:
    done = ExceptionRaised(at(9), 2, 102, "", {"type": "SystemExit", "message": "0", "frames": []})
    events = [*job(2, 1), done, exits(9.5, 2, 0), *raises(10, 0, "RuntimeError", GLOO), stopping(16, [1])]
    history = History([*events, exits(17, 1, -15), over(18)])
    shown = as_json(history, verdict_on(history), [])
    assert (shown["rank"], shown["node"], shown["host"], shown["pid"]) == (2, 1, "h1", 102)


def test_a_rank_that_held_up_the_others_is_named_if_there_are_only_victims() -> None:
    found = ["rank 2 is in read at data.py:3", "group default_pg: rank 2 has not entered collective 7"]
    held = RanksHeld(at(20), "failure", [2], found)
    events = [
        *job(4),
        *raises(10, 0, "RuntimeError", LATE),
        *raises(12, 1, "RuntimeError", GLOO),
        held,
        stopping(25, [2, 3]),
    ]
    verdict = judge([*events, exits(30, 2, -15), exits(31, 3, -15), over(40)])
    assert blamed(verdict) == ("held", 2, "hang")
    assert verdict.exit_code == 1
    assert [one.rank for one in verdict.victims] == [0, 1]
    first, *more = describe(History(events), verdict)
    assert first == f"rank 2 held up the others, which gave up waiting for it: {found[0]}"
    assert more[0] == f"    {found[1]}"
    assert summarize(History(events), verdict) == f"rank 2 held up the others ({found[0]})"
    own = judge([*events, *raises(5, 3, "ValueError", "its own"), over(40)])
    assert blamed(own) == ("failure", 3, "exception")


def test_a_lost_connection_that_may_be_unrelated_is_the_cause_if_the_others_lost_a_rank() -> None:
    own = raises(11, 2, "ConnectionResetError", "[Errno 104] Connection reset by peer")
    verdict = judge(
        [*job(3), *raises(10, 0, "RuntimeError", GLOO), *own, stopping(20, [1]), exits(25, 1, -15), over(40)]
    )
    assert blamed(verdict) == ("failure", 2, "exception")


@pytest.mark.parametrize("why", ["stall", "timeout"])
def test_a_hang_names_the_rank_that_the_others_wait_for(why: str) -> None:
    held = RanksHeld(
        at(20), why, [1], ["rank 1 is in read at data.py:3", "ranks 0, 2 wait in all_reduce at train.py:9"]
    )
    events = [*job(3), held, Stalled(at(20), 3.0), stopping(25, [0, 1, 2], why)]
    verdict = judge([*events, *(exits(30, rank, -15) for rank in range(3)), over(40, why)])
    assert blamed(verdict) == (why, 1, "hang")
    assert verdict.exit_code == 124
    assert "    rank 1 is in read at data.py:3" in describe(History(events), verdict)


@pytest.mark.parametrize("why", ["stall", "timeout"])
def test_a_hang_names_the_ranks_that_had_left(why: str) -> None:
    held = RanksHeld(at(20), why, [], ["ranks 1-2 wait in all_reduce at train.py:9"])
    events = [*job(4), exits(5, 0, 0), exits(6, 3, 0), held, Stalled(at(20), 3.0), stopping(25, [1, 2], why)]
    history = History([*events, exits(30, 1, 0), exits(30, 2, -15), over(40, why)])
    assert describe(history, verdict_on(history))[1:] == [
        "ranks 0, 3 had exited with code 0 before that",
        "    ranks 1-2 wait in all_reduce at train.py:9",
        "stopped because of it: ranks 1-2",
    ]


def test_ranks_that_waited_in_the_store_for_one_that_had_returned() -> None:
    lines = ['ranks 1-2 are in <module> at train.py:9: store.wait(["ready"])']
    quiet = RanksHeld(at(15), "idle", [0], ["rank 0 is in main at train.py:3"])  # only told
    events = [*job(3), quiet, exits(18, 0, 0), RanksHeld(at(20), "vain", [1, 2], lines), Stalled(at(20), 9.0, True)]
    history = History([*events, stopping(25, [1, 2], "stall"), exits(30, 1, -15), exits(30, 2, -15), over(40, "stall")])
    verdict = verdict_on(history)
    assert verdict.exit_code == 124
    assert describe(history, verdict) == [
        "the job was stopped: ranks 1-2 wait in torch's store for a key that no rank can set",
        "rank 0 had exited with code 0 before that",
        f"    {lines[0]}",
        "stopped because of it: ranks 1-2",
    ]


def test_a_rank_that_finished_is_not_blamed_for_another_ranks_own_failure() -> None:
    events = [*job(2), exits(5, 0, 0), *raises(10, 1, "ValueError", "own"), stopping(15, []), over(16)]
    verdict = judge(events)
    assert (blamed(verdict), verdict.early) == (("failure", 1, "exception"), ())


def test_a_dead_thread_is_the_cause_if_the_other_ranks_only_waited() -> None:
    thread = ExceptionRaised(at(5), 1, 101, "loader", recorded("KeyError", "'x'", 12))
    events = [*job(2), *raises(900, 0, "RuntimeError", LATE), stopping(905, [1]), thread, exits(906, 1, -15), over(907)]
    history = History(events)
    verdict = verdict_on(history)
    assert blamed(verdict) == ("failure", 1, "thread")
    assert "its thread 'loader' died, and the rank went on without it: KeyError: 'x'" in describe(history, verdict)[0]


def test_an_exception_in_a_child_process_is_not_the_ranks() -> None:
    child = ExceptionRaised(at(5), 1, 4711, "", recorded("KeyError", "'x'"))
    events = [*job(2), *raises(10, 0, "ValueError", "own"), child, exits(11, 1, 0), stopping(15, []), over(16)]
    assert blamed(judge(events)) == ("failure", 0, "exception")


def test_two_failures_that_the_clocks_cannot_order_are_both_named() -> None:
    def failing(doubt: int, apart: float) -> tuple[Verdict, list[str]]:
        clocks = [ClocksSeen(at(9), [[1, doubt]])]
        first, second = raises(5, 0, "ValueError", "one"), raises(5 + apart, 2, "TypeError", "two", line=9)
        history = History([*job(2, 2), *first, *second, *clocks, stopping(20, [1, 3]), over(30)])
        verdict = verdict_on(history)
        return verdict, describe(history, verdict)

    verdict, lines = failing(2 * MS, 0.5)
    assert (verdict.cause and verdict.cause.rank, verdict.close) == (0, (2,))
    close = "or rank 2: failed within 0.5 ms of it, and events on different nodes less than 2 ms apart can't be ordered"
    assert close in lines
    verdict, lines = failing(MS // 10, 0.5)
    assert (verdict.close, verdict.failed_too) == ((), (2,))
    assert lines[0].startswith("rank 0 on h0 failed first")


def test_simultaneous_exits_cannot_be_ordered_but_exceptions_can() -> None:
    history = History([*job(3, 1), exits(5, 1, 3), exits(5.3, 2, 4), stopping(6, [0]), exits(7, 0, -15), over(8)])
    verdict = verdict_on(history)
    assert (verdict.cause and verdict.cause.rank, verdict.close) == (1, (2,))
    close = "or rank 2: failed within 0.3 ms of it, and exits less than 2 ms apart can't be ordered"
    assert close in describe(history, verdict)
    first, second = raises(5, 1, "ValueError", "x"), raises(5.3, 2, "TypeError", "y", line=9)
    assert judge([*job(3), *first, *second, stopping(12, [0]), over(13)]).close == ()


def test_ranks_that_fail_in_the_same_way_share_a_line() -> None:
    events = [*job(4), *(one for rank in range(4) for one in raises(rank * 10, rank, "ValueError", f"lr {rank}"))]
    verdict = judge([*events, stopping(60, []), over(61)])
    assert (verdict.cause and verdict.cause.rank, verdict.alike, verdict.failed_too) == (0, (1, 2, 3), ())


def test_a_lost_node_comes_before_the_failures_that_it_caused() -> None:
    lost = NodeLost(at(8), 1, "no heartbeat for 10 s", [2, 3])
    events = [*job(2, 2), *raises(20, 0, "RuntimeError", GLOO), stopping(26, [1, 2, 3]), exits(27, 1, -15), lost]
    verdict = judge([*events, over(40, "lost")])
    assert (verdict.kind, verdict.exit_code, [one.rank for one in verdict.victims]) == ("lost", 4, [0])


def test_a_rank_that_we_stopped_is_not_blamed_where_clocks_are_bad() -> None:
    events = [*job(1, 2), NodeLost(at(5), 1, "its agent hung up", [1, 2]), ClocksSeen(at(6), [[0, 50_000_000]])]
    verdict = judge([*events, stopping(6, [0], "lost"), exits(4, 0, -15), over(10, "lost")])
    assert (verdict.kind, verdict.exit_code, verdict.stopped) == ("lost", 4, (0,))


def test_the_cause_stays_the_cause_if_its_clock_is_known_better_when_ranks_are_killed() -> None:
    clocks = [ClocksSeen(at(10), [[1, 4 * MS]]), stopping(10, [0, 1, 3]), ClocksSeen(at(1010), [[1, MS // 2]])]
    events = [*job(2, 2), exits(10.8, 2, -9), *clocks, stopping(1010, [0, 1, 3], signum=9)]
    verdict = judge([*events, *(exits(1020, rank, -9) for rank in (0, 1, 3)), over(1030)])
    assert (blamed(verdict), verdict.exit_code, verdict.stopped) == (("failure", 2, "signal"), 137, (0, 1, 3))


def test_an_mpi_abort_is_reported_with_its_code() -> None:
    failed = RankFailed(at(5), 1, 5, "called MPI_Abort(5)")
    verdict = judge([*job(2), failed, stopping(6, [0, 1]), exits(7, 0, -15), exits(7, 1, -15), over(8)])
    assert (blamed(verdict), verdict.exit_code, verdict.stopped) == (("failure", 1, "mpi"), 5, (0,))


def test_a_timeout_names_the_rank_that_raised_and_did_not_exit() -> None:
    raised = ExceptionRaised(at(5), 1, 101, "", recorded("ValueError", "own"))
    events = [*job(2), stopping(60000, [0, 1], "timeout"), raised, exits(60001, 0, -15), exits(60001, 1, -15)]
    history = History([*events, over(60002, "timeout")])
    verdict = verdict_on(history)
    assert (blamed(verdict), verdict.exit_code) == (("timeout", 1, "exception"), 124)
    lines = describe(history, verdict)
    assert "before that, rank 1 raised ValueError: own at /w/train.py:7 and did not exit:" in lines


def test_a_crash_that_was_seen_after_the_timeout_is_reported_as_a_crash() -> None:
    events = [*job(2), stopping(5, [0, 1], "timeout"), exits(4, 1, -11), exits(6, 0, -15), over(7, "timeout")]
    history = History(events)
    line = describe(history, verdict_on(history))[1]
    assert line.startswith("before that, rank 1 failed: killed by SIGSEGV (Segmentation fault) (pid 101, ")


def test_a_node_that_is_lost_during_a_stop_is_not_taken_for_a_rank() -> None:
    lost = NodeLost(at(8), 1, "its agent hung up", [1])
    history = History([*job(1, 1), stopping(5, [0, 1], "timeout"), lost, exits(9, 0, -15), over(10, "timeout")])
    verdict = verdict_on(history)
    assert (verdict.kind, verdict.cause, verdict.lost) == ("timeout", None, (1,))
    assert describe(history, verdict) == [
        "the job was stopped: it ran longer than --timeout 60 s",
        "h1 was lost: its agent hung up; it was running rank 1",
        "stopped because of it: ranks 0-1",
    ]


def test_only_the_last_attempt_is_judged() -> None:
    again = [Restarted(at(20), 1, 1, 0, 3, -1), RankStarted(at(21), 0, 200), RankStarted(at(21), 1, 201)]
    events = [*job(2), exits(5, 0, 3), stopping(6, [1]), exits(7, 1, -15), *again]
    assert judge(events).kind == "running"
    verdict = judge([*events, exits(30, 1, 4), stopping(31, [0]), exits(32, 0, -15), over(33)])
    assert (blamed(verdict), verdict.exit_code) == (("failure", 1, "exit"), 4)


def test_jobs_that_succeed_that_run_and_that_are_stopped_by_a_signal() -> None:
    assert judge([*job(2), exits(5, 0, 0), exits(6, 1, 0), over(7, "")]).kind == "none"
    assert judge(job(2)).running == (0, 1)
    assert describe(History(job(2)), judge(job(2))) == ["the job is running: ranks 0-1"]
    assert describe(History(job(2)[:1]), judge(job(2)[:1])) == ["the job is running"]
    asked = [StopRequested(at(5), 2), stopping(5, [0, 1], "signal", 2), *raises(6, 0, "KeyboardInterrupt", "", code=-2)]
    verdict = judge([*job(2), *asked, exits(7, 1, -2), over(8, "signal")])
    assert (verdict.kind, verdict.exit_code, verdict.cause) == ("signal", 130, None)


def test_a_crash_is_shown_with_its_stack_in_the_order_of_a_traceback() -> None:
    stack = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 9 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/v/site-packages/native.py", line 5 in call\n    lib.call()\n'
        '  File "/w/train.py", line 31 in step\n    call(x)\n'
        '  File "/w/train.py", line 40 in <module>\n    step()\n\nExtension modules: numpy\n'
    )
    history = History([*job(1), Crashed(at(5), 0, stack), exits(5, 0, -11), stopping(6, []), over(7)])
    verdict = verdict_on(history)
    lines = describe(history, verdict)
    assert lines[0].startswith("rank 0 failed first: killed by SIGSEGV (Segmentation fault) (pid 100, 0.01 s after")
    assert lines[1:] == [
        "    It crashed here (most recent call last):",
        '      File "/w/train.py", line 40, in <module>',
        "        step()",
        '      File "/w/train.py", line 31, in step',
        "        call(x)",
        '      … and from there into "/v/site-packages/native.py", line 5, in call',
    ]
    shown = as_json(history, verdict, lines)
    assert (shown["how"], shown["code"], shown["file"], shown["line"]) == ("signal", -11, "/w/train.py", 31)


def test_a_crash_is_shown_where_the_c_stack_follows() -> None:
    """As Python 3.14 writes it."""
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x2 [python] (most recent call first):\n"
        '  File "/w/train.py", line 31 in step\n    call(x)\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/lib/libc.so.6", at +0x3c050 [0x7f]\n'
    )
    assert tracebacks.crash_frames(stack) == [tracebacks.Frame("/w/train.py", 31, "step", "call(x)")]


# As Python 3.13 writes it on a terminal, or with FORCE_COLOR.
COLOURED = (
    "Traceback (most recent call last):\n"
    '  File \x1b[35m"/w/a.py"\x1b[0m, line \x1b[35m4\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
    "    \x1b[31mf\x1b[0m\x1b[1;31m({})\x1b[0m\n    \x1b[31m~\x1b[0m\x1b[1;31m^^^^\x1b[0m\n"
    '  File \x1b[35m"/w/a.py"\x1b[0m, line \x1b[35m2\x1b[0m, in \x1b[35mf\x1b[0m\n'
    "    return \x1b[31md\x1b[0m\x1b[1;31m[1]\x1b[0m\n           \x1b[31m~\x1b[0m\x1b[1;31m^^^\x1b[0m\n"
    "\x1b[1;35mKeyError\x1b[0m: \x1b[35m1\x1b[0m\n"
)


def test_a_coloured_traceback_in_the_output_is_read_and_shown_without_colours() -> None:
    """What ended a rank that has no hooks, and what a command wrote that a rank had run."""
    shown = [
        "Traceback (most recent call last):",
        *('  File "/w/a.py", line 4, in <module>', "    f({})"),
        *('  File "/w/a.py", line 2, in f', "    return d[1]", "KeyError: 1"),
    ]
    history = History([*job(1), Output(at(5), 0, STDERR, COLOURED.encode()), exits(5, 0, 1), stopping(6, []), over(7)])
    verdict = verdict_on(history)
    assert blamed(verdict) == ("failure", 0, "exception")
    lines = describe(history, verdict)
    assert lines[0].startswith("rank 0 failed first: KeyError: 1 ")
    assert lines[1:] == [f"    {line}" for line in shown]
    command = recorded("subprocess.CalledProcessError", "exit status 1", printed=COLOURED)
    raised = [ExceptionRaised(at(4), 0, 100, "", command), exits(5, 0, 1), stopping(6, []), over(7)]
    verdict = judge([*job(1), *raised])
    assert verdict.cause is not None
    assert verdict.cause.traceback is not None
    assert verdict.cause.traceback.roots[0].lines == shown


def test_a_coloured_line_is_shown_without_colours() -> None:
    said = Output(at(5), 0, STDERR, b"\x1b[1;31mfatal:\x1b[0m no data\n")
    history = History([*job(1), said, exits(5, 0, 3), stopping(6, []), over(7)])
    assert describe(history, verdict_on(history))[1:] == ["    fatal: no data"]


def test_the_last_lines_are_shown_without_torchs_mark_of_the_rank() -> None:
    """Those of ranks that it ran itself keep theirs."""
    said = Output(at(5), 0, STDERR, b"[rank0]:W1126 no GPU\n[rank0]: no data\n[rank3]: here neither\n")
    history = History([*job(1), said, exits(5, 0, 3), stopping(6, []), over(7)])
    assert describe(history, verdict_on(history))[1:] == [
        "    W1126 no GPU",
        "    no data",
        "    [rank3]: here neither",
    ]


def test_a_traceback_is_read_from_the_last_output() -> None:
    """Also with torch's prefixes and among other lines; the last one counts."""
    text = (
        "noise\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 3, in f\n[rank1]:     d[1]\n[rank1]:     ~^^^\n[rank1]: KeyError: 1\n\n'
        "[rank1]: The above exception was the direct cause of the following exception:\n\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 9, in <module>\n[rank1]:     f()\n[rank1]: ValueError: bad\n'
    )
    traceback = tracebacks.from_text(text)
    assert traceback is not None
    assert (traceback.title, traceback.is_cause, traceback.roots[0].title) == ("ValueError: bad", True, "KeyError: 1")
    assert traceback.place == ("/w/a.py", 3, "f", "d[1]")
    for cut in range(len(text)):
        tracebacks.from_text(text[:cut])
        tracebacks.from_text(text[cut:])
    events = [*job(1), Output(at(4), 0, STDERR, text.encode()), exits(5, 0, 1), stopping(6, []), over(7)]
    assert judge(events).cause.short == "KeyError: 1"  # type: ignore[union-attr]


def test_the_report_fits_on_a_screen_whatever_is_raised() -> None:
    long = recorded("ValueError", "\n".join(f"line {i}" for i in range(500)))
    long["frames"] = [[f"/w/{i}.py", i, "f", "x" * 200] for i in range(40)]
    for _ in range(4):  # a tree of some hundred exceptions
        long = {**long, "cause": {**long}, "group": [long] * 4}
    raised = ExceptionRaised(at(5), 0, 100, "", long)
    history = History([*job(64), raised, exits(6, 0, 1), stopping(7, list(range(1, 64))), over(8)])
    assert len(describe(history, verdict_on(history))) <= 24


@pytest.mark.parametrize(
    "traceback", [{}, {"type": 1}, {"type": "E", "message": "", "frames": 5}, recorded("E", "", cause=3)]
)
def test_a_malformed_traceback_is_ignored(traceback: dict[str, Any]) -> None:
    events = [*job(1), ExceptionRaised(at(5), 0, 100, "", traceback), exits(6, 0, 7), stopping(7, []), over(8)]
    assert blamed(judge(events)) == ("failure", 0, "exit")


@pytest.mark.parametrize(
    ("text", "strength"),
    [
        (GLOO, "peer"),
        (LATE, "late"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", "late"),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.21.5", "peer"),
        ("recvValue failed on SocketImpl(fd=3): Connection was likely closed. Did the remote server shutdown", "peer"),
        ("Fatal error in internal_Allreduce: Other MPI error, communication error with rank 2", "peer"),
        ("[Errno 104] Connection reset by peer", "weak"),
        ("Operation timed out!", "late"),
        ("the operation timed out! after 3 s", ""),
        ("batch 17 is empty", ""),
        ("CUDA out of memory. Tried to allocate 2 GiB", ""),
        ("connection to the database refused", ""),
        ("Connection to 10.1.2.3 closed by remote host.", ""),
        ("Connection closed by peer", ""),
        ("the read from the object store timed out after 30 s", ""),
    ],
)
def test_secondary_failures_are_recognised_by_their_text(text: str, strength: str) -> None:
    assert secondary_in(text) == strength


DIST = "torch.distributed.DistNetworkError"
TAKEN = "The server socket has failed to listen on any local network address. port: 29533, code: -98, name: EADDRINUSE"
NO_HOST = "The client socket has timed out after 60000ms while trying to connect to (nosuchhost-7, 29500)."
GPUS = "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.21.5, Duplicate GPU detected"


@pytest.mark.parametrize(
    ("kind", "message", "file", "strength"),
    [
        ("RuntimeError", "Connection closed by peer", "/v/site-packages/torch/distributed/distributed_c10d.py", "peer"),
        ("mpi4py.MPI.Exception", "the peer has disconnected", "/w/train.py", "peer"),
        ("OperationalError", "connection to server at 10.0.0.5 failed", "/v/site-packages/psycopg/c.py", ""),
        ("ReadTimeout", "socket timeout", "/v/site-packages/requests/adapters.py", ""),
        (DIST, "the connection is gone", "/w/train.py", "peer"),
        (DIST, TAKEN, "/v/site-packages/torch/distributed/rendezvous.py", ""),
        ("torch.distributed.DistBackendError", GPUS, "/v/site-packages/torch/distributed/distributed_c10d.py", ""),
    ],
)
def test_only_who_talks_to_other_ranks_can_have_lost_one(kind: str, message: str, file: str, strength: str) -> None:
    traceback = tracebacks.from_event({"type": kind, "message": message, "frames": [[file, 1, "f", ""]]})
    assert traceback is not None
    assert secondary_kind(traceback) == strength


@pytest.mark.parametrize("link", ["hidden", "cause", "context"])
def test_a_program_that_says_in_its_own_words_that_it_lost_a_rank_is_a_victim(link: str) -> None:
    wrapped = recorded("TrainingAborted", "collective failed in step 20") | {link: recorded("RuntimeError", GLOO)}
    events = [*job(3), ExceptionRaised(at(5), 0, 100, "", wrapped), exits(6, 0, 1), stopping(9, [1, 2])]
    own = recorded("ValueError", "bad batch in shard 7")
    held = RanksHeld(at(8), "failure", [1], ["rank 1 is in upload at train.py:17"], own)
    verdict = judge([*events, held, exits(10, 1, -15), exits(10, 2, -15), over(11)])
    assert (blamed(verdict), verdict.exit_code, verdict.stopped) == (("failure", 1, "exception"), 1, (2,))
    assert [one.rank for one in verdict.victims] == [0]
    first, *more = describe(History([*events, held, exits(10, 1, -15), over(11)]), verdict)
    assert first.startswith(
        "rank 1 failed first: ValueError: bad batch in shard 7 (stopped while it was handling that,"
    )
    assert more[-4:-2] == ["where the ranks were then:", "    rank 1 is in upload at train.py:17"]


def later(ms: float, rank: int, kind: str = "TrainingAborted") -> list[Any]:
    """An exception that a rank raises when it has caught the loss of another one and gone on."""
    traceback = recorded(kind, "step 20 failed", kept=[recorded("RuntimeError", GLOO)])
    return [ExceptionRaised(at(ms), rank, 100 + rank, "", traceback), exits(ms + 1, rank, 1)]


def test_a_rank_that_caught_the_loss_of_another_and_fails_later_is_a_victim_if_there_is_a_cause() -> None:
    held = RanksHeld(at(8), "failure", [1], ["rank 1 is in upload at train.py:17"], recorded("ValueError", "bad batch"))
    events = [*job(3), *later(5, 0), *later(6, 2), stopping(9, [1]), held, exits(10, 1, -15), over(11)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 1, "exception")
    assert [one.why[:40] for one in verdict.victims] == ["RuntimeError: Connection closed by peer "] * 2
    killed = [*job(3), *later(5, 0), exits(7, 1, -9), stopping(9, [2]), exits(10, 2, -15), over(11)]
    assert blamed(judge(killed)) == ("failure", 1, "signal")
    early = [*job(3), exits(4, 2, 0), *later(5, 0), *later(6, 1), stopping(9, []), over(11)]
    assert (judge(early).kind, judge(early).early) == ("early", (2,))
    mixed = [*job(3), *raises(5, 0, "RuntimeError", GLOO), *later(5.5, 2), stopping(9, [1]), held, over(11)]
    assert blamed(judge(mixed)) == ("failure", 1, "exception")


def test_a_rank_that_fails_later_by_itself_is_blamed_although_it_had_caught_the_loss_of_another() -> None:
    own = later(5, 1, "ValueError")
    waits = RanksHeld(at(8), "failure", [2], ["rank 2 is in compute at train.py:17"])
    events = [*job(3), *own, waits, stopping(9, [2]), *raises(9, 0, "RuntimeError", GLOO), exits(10, 2, -15), over(11)]
    verdict = judge(events)
    assert (blamed(verdict), [one.rank for one in verdict.victims]) == (("failure", 1, "exception"), [0])
    text = describe(History(events), verdict)
    assert text[0].startswith("rank 1 failed first: ValueError: step 20 failed (exit code 1, ")
    assert any(
        line.startswith("    It had caught this before: RuntimeError: Connection closed by peer") for line in text
    )
    much_later = [*job(3), *own, *raises(1600, 2, "KeyError", "'x'"), stopping(1700, [0]), over(1800)]
    assert blamed(judge(much_later)) == ("failure", 1, "exception")


def test_a_rank_that_logged_the_loss_of_another_and_exits_is_a_victim() -> None:
    """`sys.exit(main())`: the exception is gone, and more was logged after it."""
    log = 'Traceback (most recent call last):\n  File "a.py", line 9, in f\n{}\nINFO: cleaning up\n'
    lost, bad = log.format(f"RuntimeError: {GLOO}"), log.format("ValueError: bad label")
    events = job(3)
    for ms, rank, said in ((5, 2, bad), (7, 0, lost), (8, 1, f"ERROR: training failed: {GLOO}\n")):
        events += [Output(at(ms), rank, STDERR, said.encode()), *raises(ms, rank, "SystemExit", "1")]
    events = [*events, stopping(20, []), over(21)]
    verdict = judge(events)
    assert (blamed(verdict), [one.rank for one in verdict.victims]) == (("failure", 2, "exception"), [0, 1])
    text = describe(History(events), verdict)
    assert text[0].startswith("rank 2 failed first: exit code 1 (pid 102")
    assert "    ValueError: bad label" in text
    assert "    INFO: cleaning up" in text


def test_what_a_rank_failed_of_before_it_lost_another_is_told_first() -> None:
    """A collective in a `finally`."""
    own = recorded("SystemExit", "no more data")
    events = [*job(2), ExceptionRaised(at(5), 0, 100, "", recorded("RuntimeError", LATE, context=own)), exits(6, 0, 1)]
    events = [*events, stopping(9, [1]), over(11)]
    first = describe(History(events), judge(events))[0]
    assert first.startswith("rank 0 failed first: SystemExit: no more data; then RuntimeError: Timed out waiting")


def test_a_thread_that_died_is_the_cause_if_the_others_waited_for_its_rank() -> None:
    died = ExceptionRaised(at(3), 1, 101, "prefetch", recorded("OSError", "checksum mismatch"))
    held = RanksHeld(at(8), "failure", [1], ["rank 1 is in next_batch at train.py:17"])
    events = [
        *job(3),
        died,
        *raises(5, 0, "RuntimeError", LATE),
        held,
        stopping(9, [1, 2]),
        exits(10, 1, -15),
        over(11),
    ]
    verdict = judge(events)
    assert (blamed(verdict), verdict.exit_code, verdict.threads) == (("failure", 1, "thread"), 1, ())
    text = describe(History(events), verdict)
    assert "its thread 'prefetch' died, and the rank went on without it: OSError: checksum mismatch" in text[0]
    assert text[-4:-2] == ["where the ranks were then:", "    rank 1 is in next_batch at train.py:17"]


@pytest.mark.parametrize(("lines", "odd"), [((7, 7, 9, 7), 2), ((7, 9, 7, 9), -1), ((7, 7, 7, 7), -1)])
def test_of_ranks_that_only_waited_the_one_that_waited_elsewhere_is_told(lines: tuple[int, ...], odd: int) -> None:
    events = job(4)
    for rank, line in enumerate(lines):
        events += raises(10 + rank, rank, "RuntimeError", LATE, line)
    events = [*events, stopping(20, []), over(21)]
    verdict = judge(events)
    assert (verdict.kind, verdict.elsewhere, blamed(verdict)[1]) == ("waited", odd >= 0, max(odd, 0))
    hint = "it waited elsewhere than the others: did all ranks call the same collectives?"
    assert (hint in describe(History(events), verdict)) == (odd >= 0)


def test_what_a_worker_or_a_command_said_is_told() -> None:
    """A pool forwards the traceback as text; what a command wrote may have been captured."""
    text = 'Traceback (most recent call last):\n  File "/w/text.py", line 3, in tokenize\nValueError: empty document\n'
    remote = {"type": "multiprocessing.pool.RemoteTraceback", "message": f'\n"""\n{text}"""', "frames": []}
    raised = ExceptionRaised(at(5), 0, 100, "", recorded("ValueError", "empty document", cause=remote))
    pool = [*job(1), raised, exits(6, 0, 1), stopping(7, []), over(8)]
    assert '      File "/w/text.py", line 3, in tokenize' in describe(History(pool), judge(pool))
    kind = "subprocess.CalledProcessError"
    for printed, title in (
        (text.replace("tokenize", "<module>"), "ValueError: empty document, in the command that it ran"),
        ("cc: no such file\n", f"{kind}: returned 1"),
    ):
        ran = ExceptionRaised(at(5), 0, 100, "", recorded(kind, "returned 1", printed=printed))
        events = [*job(1), ran, exits(6, 0, 1), stopping(7, []), over(8)]
        lines = describe(History(events), judge(events))
        assert lines[0].startswith(f"rank 0 failed first: {title} (")
        assert printed.splitlines()[-1] in "\n".join(lines)


FAILED = "subprocess.CalledProcessError: Command '['sh', 'tok.sh']' returned non-zero exit status 4."
REPORT = f'Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    run()\n{FAILED}\n'
CHAIN = "\nThe above exception was the direct cause of the following exception:\n\n"
WRAPPED = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in main\nRuntimeError: no tokenizer\n'


@pytest.mark.parametrize("after", [REPORT, REPORT + CHAIN + WRAPPED, ""], ids=["itself", "as_cause", "unprinted"])
def test_what_a_command_wrote_to_the_ranks_own_stream_is_quoted(after: str) -> None:
    """Without what other ranks wrote as well, which is their program's own."""
    kind, _, message = FAILED.partition(": ")
    error = recorded(kind, message, shared="stderr")
    if after.endswith(WRAPPED):
        error = recorded("RuntimeError", "no tokenizer", 9, cause=error)
    said = "epoch 1\n 10%\r 20%\nvocab.json: no such file\n\n"
    events = [*job(2), Output(at(2), 1, STDERR, b"epoch 1\n"), Output(at(3), 0, STDERR, (said + after).encode())]
    events += [ExceptionRaised(at(5), 0, 100, "", error), exits(6, 0, 1), stopping(7, [1]), exits(8, 1, -15), over(9)]
    lines = describe(History(events), judge(events))
    told = lines.index("    Before that, the rank's stderr, to which it wrote too, ended with:")
    assert lines[told + 1 : told + 3] == ["     20%", "    vocab.json: no such file"]
    assert lines[told - 1].endswith(FAILED)


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"printed": "usage: tok\n", "printed_to": "stdout"}, ["It wrote to stdout:", "usage: tok"]),
        ({"printed": "a\nb\n", "printed_to": "/w/tok.log"}, ["It wrote to /w/tok.log:", "a", "b"]),
        ({"printed_to": "nowhere"}, ["What it wrote to stderr was thrown away."]),
        ({}, []),
    ],
)
def test_where_a_command_wrote_is_told(known: dict[str, str], told: list[str]) -> None:
    found = tracebacks.from_event(recorded("subprocess.CalledProcessError", "exit status 4", **known))
    assert found is not None
    assert found.lines[found.lines.index(found.title) + 1 :] == told


def test_a_failure_that_the_program_hid_does_not_make_its_own_one_a_victims() -> None:
    """It gave up a database, and said so in its own words."""
    wrapped = recorded("ConfigError", "no database", hidden=recorded("ConnectionRefusedError", "[Errno 111] refused"))
    events = [*job(2), ExceptionRaised(at(5), 0, 100, "", wrapped), exits(6, 0, 1), stopping(9, [1]), over(11)]
    assert blamed(judge(events)) == ("failure", 0, "exception")


def test_a_port_that_is_taken_is_the_cause_of_what_that_rank_did_not_write() -> None:
    taken = recorded(DIST, TAKEN, why="the port 29533 is taken (by pid 812, nginx)")
    missing = raises(300, 1, "FileNotFoundError", "[Errno 2] No such file or directory: 'made-by-rank-0'")
    events = [*job(2), ExceptionRaised(at(10), 0, 100, "", taken), exits(12, 0, 1), *missing, stopping(310, [])]
    verdict = judge([*events, over(311)])
    assert (blamed(verdict), verdict.failed_too) == (("failure", 0, "exception"), (1,))
    (first, *_) = describe(History(events), verdict)
    assert first.startswith(f"rank 0 failed first: the port 29533 is taken (by pid 812, nginx): {DIST}: The server")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-10, "killed by SIGUSR1 (User defined signal 1), which"),
        (138, "exit code 138; a command in it died of SIGUSR1, which"),
    ],
)
def test_a_signal_that_was_passed_on_is_said_to_be_ours(code: int, told: str) -> None:
    """It was sent to all ranks at once: which of them died first means nothing."""
    ends = [exits(6, 1, code), exits(6.1, 0, code), stopping(6, [0]), over(11)]
    events = [*job(2), StopRequested(at(5), signal.SIGUSR1), *ends]
    lines = describe(History(events), judge(events))
    passed_on = " launchpad was sent and passed on; the program has no handler ("
    assert lines[0].startswith(f"rank 1 failed first: {told}{passed_on}")
    assert lines[1:] == ["failed in the same way: rank 0"]
    for other in (signal.SIGUSR2, signal.SIGCONT, signal.SIGTERM):
        events = [*job(2), StopRequested(at(5), other), *ends]
        assert "passed on" not in describe(History(events), judge(events))[0]
    for node in (0, 1):  # a launchpad that has joined passes it on to its own ranks only
        events = [*job(2), SignalPassedOn(at(5), signal.SIGUSR1, node), *ends]
        assert ("passed on" in describe(History(events), judge(events))[0]) == (node == 0)


@pytest.mark.parametrize("code", [7, -15])
@pytest.mark.parametrize("gone", [8, 6000])
def test_a_rank_that_was_exiting_when_it_was_to_be_stopped_is_the_cause(gone: int, code: int) -> None:
    """Its connections close before it is gone, and on a busy host its peer's failure is known first."""
    begun = [*job(2), *raises(5, 0, "BrokenPipeError", "[Errno 32] Broken pipe"), stopping(7, [1])]
    verdict = judge([*begun, exits(gone, 1, code)._replace(exiting=True), over(9000)])
    assert (blamed(verdict)[:2], verdict.stopped) == (("failure", 1), ())
    verdict = judge([*begun, exits(gone, 1, code), over(9000)])
    assert (blamed(verdict)[:2], verdict.stopped) == (("failure", 0), (1,))


def test_a_rank_that_exits_as_the_user_stops_the_job_did_not_fail_before() -> None:
    """Whoever stops launchpad may have told the ranks as well."""
    events = [*job(2), stopping(7, [0, 1], "signal"), *(exits(8, rank, -15)._replace(exiting=True) for rank in (0, 1))]
    verdict = judge([*events, over(9, "signal")])
    assert (verdict.kind, verdict.stopped) == ("signal", (0, 1))


def ended_after_oom_kills(failed: dict[str, Any], code: int) -> Verdict:
    """Rank 1 fails like this on a host where the kernel has killed a process for memory."""
    raised = ExceptionRaised(at(5), 1, 101, "", failed | {"killed_child": 4711})
    gone = exits(6, 1, code)._replace(oom_kills=1)
    events = [*job(2), raised, gone, *raises(8, 0, "RuntimeError", GLOO), stopping(9, []), over(11)]
    verdict = judge(events)
    return verdict._replace(cause=verdict.cause and verdict.cause._replace(text=describe(History(events), verdict)[0]))


@pytest.mark.parametrize(
    ("failed", "code", "told"),
    [
        (recorded("OSError", "helper ended with -9"), 1, ": OSError: helper ended with -9 (exit code 1, "),
        (recorded("SystemExit", "3"), 3, ": exit code 3 ("),
        (recorded("BrokenPipeError", "[Errno 32] Broken pipe"), 1, ": BrokenPipeError: [Errno 32]"),
    ],
)
def test_a_child_that_the_kernel_killed_for_memory_is_the_cause(failed: dict[str, Any], code: int, told: str) -> None:
    verdict = ended_after_oom_kills(failed, code)
    assert verdict.cause is not None
    assert (verdict.kind, verdict.cause.rank, verdict.exit_code) == ("failure", 1, code)
    said = "rank 1 failed first: its child process 4711 was killed by the kernel's OOM killer"
    assert verdict.cause.text.startswith(f"{said}{told}")


def test_a_child_that_was_killed_for_memory_before_makes_no_victim_the_cause() -> None:
    """It may be long ago, and have been replaced."""
    verdict = ended_after_oom_kills(recorded("RuntimeError", GLOO), 1)
    assert verdict.kind == "waited"
    assert verdict.cause is not None
    assert "its child process" not in verdict.cause.text
    assert "; the kernel's OOM killer had killed another process on its host before that (" in verdict.cause.text


def test_a_host_that_has_no_address_is_no_lost_rank() -> None:
    warning = "[W1123 socket.cpp:767] [c10d] The IPv6 network addresses of (nosuchhost-7, 29500) cannot be retrieved ("
    events = [*job(2), Output(at(4), 0, STDERR, f"{warning}gai error: -2 - Name or service not known).\n".encode())]
    events = [*events, *raises(5, 0, DIST, NO_HOST), stopping(11, [1]), exits(12, 1, -15), over(13)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 0, "exception")
    assert "rank 0 failed first: nosuchhost-7 has no address: " in describe(History(events), verdict)[0]
    assert blamed(judge([one for one in events if not isinstance(one, Output)])) == ("waited", 0, "exception")


HANDLED = (
    'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    d[1]\n    ~^^^\n'
    "KeyError: 'optional setting'\n"
)


@pytest.mark.parametrize(
    ("text", "code", "title"),
    [
        (HANDLED, 1, "KeyError: 'optional setting'"),
        (HANDLED, 3, "KeyError: 'optional setting'"),  # os._exit(3) after it
        (HANDLED + "no more disk quota\n", 3, ""),
        (HANDLED + "\nstep 7\n", 1, ""),
        (HANDLED + "srun: error: n2: task 1: Exited with exit code 1\n", 1, "KeyError: 'optional setting'"),
        (f"{HANDLED}E1123 02:38:01.119000 8838 api.py:1002] failed (exitcode: 1)\n", 1, "KeyError: 'optional setting'"),
        (f"{HANDLED}{'-' * 74}\nmpirun detected that\none or more processes\n{'-' * 74}\n", 1, "KeyError: 'opti"),
        ("no traceback\n", 1, ""),
    ],
)
def test_a_traceback_in_the_output_counts_only_if_it_ended_the_rank(text: str, code: int, title: str) -> None:
    events = [*job(2), Output(at(4), 0, STDERR, text.encode()), exits(5, 0, code), stopping(6, [1]), over(8)]
    verdict = judge(events)
    assert verdict.cause is not None
    assert (verdict.cause.traceback.title if verdict.cause.traceback else "").startswith(title)
    assert blamed(verdict)[2] == ("exception" if title else "exit")
    shown = "\n".join(describe(History(events), verdict))
    assert ("KeyError" in shown) == bool(title)
    assert "E1123" not in shown


def test_an_exit_after_a_traceback_that_says_that_a_rank_is_lost_is_a_victims() -> None:
    text = HANDLED.replace("KeyError: 'optional setting'", f"RuntimeError: {GLOO}")
    left = [Output(at(4), 0, STDERR, text.encode()), *raises(5, 0, "SystemExit", "1")]
    verdict = judge([*job(2), *left, *raises(8, 1, "ValueError", "own"), stopping(20, []), over(21)])
    assert (blamed(verdict), [one.rank for one in verdict.victims]) == (("failure", 1, "exception"), [0])


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c"])
def test_only_a_newline_ends_a_line_of_a_message(mark: str) -> None:
    message = f"bad row{mark}in the file\nsecond line"
    history = History([*job(1), *raises(5, 0, "ValueError", message), over(13)])
    lines = describe(history, verdict_on(history))
    assert lines[0].startswith(f"rank 0 failed first: ValueError: bad row{printable(mark)}in the file (exit code 1")
    assert lines[-2:] == [f"    ValueError: bad row{printable(mark)}in the file", "    second line"]
    printed = HANDLED.replace("optional setting", f"optional{mark}setting")
    found = tracebacks.ending(printed, 1)
    assert found is not None
    assert found.message == f"'optional{mark}setting'"


TORCHRUN = """
============================================================
inner.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_01:00:00
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""
LAUNCHPAD = (
    "launchpad: rank 1 failed first: ValueError: the inner cause (exit code 1, pid 7, 0.41 s after the start)\n"
    "launchpad:     Traceback (most recent call last):\n"
    'launchpad:       File "/w/inner.py", line 3, in <module>\n'
    'launchpad:         raise ValueError("the inner cause")\n'
    "launchpad:     ValueError: the inner cause\n"
    "launchpad: stopped because of it: rank 0\n"
    "launchpad: logs: /home/me/.local/state/launchpad/jobs/0a1b\n"
    "launchpad: more: launchpad why 0a1b\n"
)
INNER = LAUNCHPAD.split("\n", 1)[1].replace("launchpad:     ", "").partition("launchpad:")[0]
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
RUN = "Command '['torchrun', 'inner.py']' returned non-zero exit status 1."
PYTEST = (
    "=========================== short test summary info ============================\n"
    "FAILED test_inner.py::test_it - ValueError: the inner cause\n"
    "============================== 1 failed in 0.02s ===============================\n"
)


@pytest.mark.parametrize(
    ("errors", "output", "kind", "message", "where"),
    [
        (INNER, "", CHILD_FAILED, TORCHRUN, "rank 1 of the torchrun that it ran"),
        (INNER + HANDLED.replace("KeyError: 'optional", f"{CHILD_FAILED}: {TORCHRUN}"), "", "", "", "rank 1 of the t"),
        (INNER, "", "subprocess.CalledProcessError", RUN, "the command that it ran"),
        (LAUNCHPAD, "", "subprocess.CalledProcessError", RUN, "rank 1 of the launchpad that it ran"),
        (LAUNCHPAD, "", "SystemExit", "1", "rank 1 of the launchpad that it ran"),
        (LAUNCHPAD, "", "", "", "rank 1 of the launchpad that it ran"),
        ("", PYTEST, "SystemExit", "1", "test_inner.py::test_it"),
        ("", PYTEST, "", "", "test_inner.py::test_it"),
    ],
)
def test_the_cause_inside_another_launcher_is_told(
    errors: str, output: str, kind: str, message: str, where: str
) -> None:
    events = [*job(2), Output(at(3), 0, STDERR, errors.encode()), Output(at(3), 0, STDOUT, output.encode())]
    ends = raises(5, 0, kind, message) if kind else [exits(5, 0, 1)]
    events = [*events, *ends, stopping(11, [1]), exits(12, 1, -15), over(13)]
    verdict = judge(events)
    assert (blamed(verdict), verdict.exit_code) == (("failure", 0, "exception"), 1)
    lines = describe(History(events), verdict)
    assert lines[0].startswith(f"rank 0 failed first: ValueError: the inner cause, in {where}")
    if errors:
        assert '      File "/w/inner.py", line 3, in <module>' in lines
    assert len(lines) < 24
    found = as_json(History(events), verdict, lines)
    assert found["type"] == (kind if kind.startswith("subprocess.") else "ValueError")


@pytest.mark.parametrize("mark", ["", "[rank0]: "])
def test_the_verdict_of_an_inner_launchpad_is_found_before_the_ranks_own_traceback(mark: str) -> None:
    """torch's hook marks each line of a rank that has a process group."""
    own = HANDLED.replace("KeyError: 'optional setting'", f"subprocess.CalledProcessError: {RUN}")
    errors = LAUNCHPAD + "".join(f"{mark}{line}\n" for line in own.splitlines())
    events = [*job(1), Output(at(3), 0, STDERR, errors.encode())]
    history = History([*events, *raises(5, 0, "subprocess.CalledProcessError", RUN), over(13)])
    lines = describe(history, verdict_on(history))
    title = "rank 0 failed first: ValueError: the inner cause, in rank 1 of the launchpad that it ran"
    assert lines[0].startswith(title)
    assert lines[4:6] == ["    ValueError: the inner cause", ""]
    assert not any("logs:" in line or "more:" in line or "stopped" in line for line in lines)


def test_an_inner_rank_that_says_nothing_is_told_by_its_exit_code() -> None:
    verdict = judge([*job(1), *raises(5, 0, CHILD_FAILED, TORCHRUN.replace(": 1 (pid", ": 7 (pid")), over(13)])
    assert verdict.cause is not None
    assert verdict.cause.traceback is not None
    assert verdict.cause.traceback.title == "exit code 7, in rank 1 of the torchrun that it ran"


def test_who_has_a_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # At all addresses: at another one, a process beside us could have the same port.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as mine:
        port = mine.getsockname()[1]
        for words in (f"port: {port}, name: EADDRINUSE", f"binding ('::1', {port}, 0, 0): address already in use"):
            cause = {"message": words}
            ports.explain({"message": "can't serve", "cause": cause})
            name = procfs.status(os.getpid())["Name"]
            assert cause["why"] == f"the port {port} is taken (by pid {os.getpid()}, {name})"
    monkeypatch.setattr(ports, "_found", {})
    assert ports.taken(port) == f"the port {port} is taken"
    other = {"message": "port: 80: permission denied"}
    ports.explain(other)
    assert other == {"message": "port: 80: permission denied"}


def test_who_has_a_port_is_looked_up_once_for_all_ranks_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(ports, "_found", {})
    monkeypatch.setattr(ports, "_look_up", lambda port: looked.append(port) or f"{len(looked)}")
    assert [ports.taken(port) for port in (29500, 29500, 29501, 29500)] == ["1", "1", "2", "1"]
    monkeypatch.setattr(ports, "FOUND_HOLDS", 0.0)
    monkeypatch.setattr(ports, "_found", {})
    assert [ports.taken(29500), ports.taken(29500)] == ["3", "4"]


# Of the faults in collective programs test_gallery.py makes sure.


def test_a_failure_that_is_recorded_before_the_start_is_noted() -> None:
    """A forked rank is quicker than the agent that forked it."""
    events = [*job(1), *raises(-0.5, 0, "ValueError", "own", after=1), over(2)]
    history = History(events)
    line = describe(history, verdict_on(history))[0]
    assert ", 0.00 s after the start, " in line


@pytest.mark.parametrize(("kind", "text"), [("bdb.BdbQuit", ""), ("EOFError", "EOF when reading a line")])
def test_a_prompt_without_standard_input_is_explained(kind: str, text: str) -> None:
    why = "it has no standard input; --input-rank 1 gives it launchpad's, for prompts: "
    for rank, reason in ((1, why), (0, "")):
        history = History([*job(2), *raises(10, rank, kind, text), stopping(12, [1 - rank]), exits(13, 1 - rank, -15)])
        verdict = verdict_on(history)
        assert blamed(verdict) == ("failure", rank, "exception")
        assert describe(history, verdict)[0].startswith(f"rank {rank} failed first: {reason}{kind}")
