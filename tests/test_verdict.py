"""report/verdict: who failed first, why, and what became of the others; from events alone, and in real jobs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launchpad.events import (
    STDERR,
    NodeLost,
    Output,
    PhaseChanged,
    RankExited,
    RankFailed,
    RankStarted,
    Restarted,
    StopRequested,
)
from launchpad.failures import ClockSeen, Crashed, ExceptionRaised, JobPlanned, RanksHeld
from launchpad.report import accounts
from launchpad.report.conclusion import as_json
from launchpad.report.echoes import echo_in
from launchpad.report.story import Story
from launchpad.report.telling import tell
from launchpad.report.verdict import Verdict, judge, verdict_on
from launchpad.stacks import Stalled
from tests.conftest import Launchpad

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

MS = 1_000_000
GLOO = "[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:20115. This is typically caused by a remote worker"
LATE = "[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"


def job(*nodes: int) -> list[Any]:
    """A job with so many ranks on each node, all started at 1 s; rank n has pid 100 + n."""
    numbers = iter(range(sum(nodes)))
    placed = [[f"h{place}", [next(numbers) for _ in range(count)]] for place, count in enumerate(nodes)]
    planned = JobPlanned(0, 1.7e9, "0a1b", 1, "id", ["train.py"], "/work", placed, {}, 60.0, "")
    return [planned, *(RankStarted(1000 * MS, rank, 100 + rank) for rank in range(sum(nodes)))]


def at(ms: float) -> int:
    """So long after the ranks' start, in ns."""
    return int((1000 + ms) * MS)


def said(kind: str, message: str, line: int = 7, **more: Any) -> dict[str, Any]:
    frames = [["/w/train.py", line, "step", f"line {line}"], ["/v/site-packages/lib.py", 9, "inner", "x"]]
    return {"type": kind, "message": message, "frames": frames, **more}


def raises(ms: float, rank: int, kind: str, message: str, line: int = 7, code: int = 1, after: float = 5) -> list[Any]:
    """An exception, and the rank's end a little later."""
    raised = ExceptionRaised(at(ms), rank, 100 + rank, "", said(kind, message, line))
    return [raised, left(ms + after, rank, code)]


def left(ms: float, rank: int, code: int, killed: bool = False) -> RankExited:
    return RankExited(at(ms), rank, code, 64 << 20, killed)


def stopping(ms: float, ranks: list[int], cause: str = "failure", signum: int = 15) -> PhaseChanged:
    return PhaseChanged(at(ms), "stopping", cause, signum, 5.0, ranks)


def over(ms: float, cause: str = "failure") -> PhaseChanged:
    return PhaseChanged(at(ms), "over", cause, 0, 0.0, [])


def blamed(verdict: Verdict) -> tuple[str, int, str]:
    assert verdict.cause is not None
    return verdict.kind, verdict.cause.rank, verdict.cause.kind


def test_a_victim_that_is_heard_of_first_is_not_blamed() -> None:
    """Rank 0 ends by itself, is noticed late, and rank 1 fails for the want of it."""
    events = [*job(3), *raises(10, 1, "RuntimeError", GLOO), stopping(16, [0, 2]), left(16.5, 0, -9, True)]
    verdict = judge([*events, left(17, 2, -15), over(18)])
    assert blamed(verdict) == ("failure", 0, "memory")
    assert [one.rank for one in verdict.victims] == [1]
    assert (verdict.stopped, verdict.exit_code) == ((2,), 137)


def test_the_time_of_an_exception_counts_and_not_that_of_the_end() -> None:
    slow = raises(10, 2, "ValueError", "own", after=900)
    events = [*job(3), *raises(12, 0, "TypeError", "later", line=9, after=1), stopping(14, [1, 2]), *slow]
    verdict = judge([*events, left(15, 1, -15), over(950)])
    assert blamed(verdict) == ("failure", 2, "exception")
    assert verdict.failed_too == (0,)


def test_who_had_raised_and_was_stopped_on_its_way_out_is_blamed() -> None:
    events = [*job(2), ExceptionRaised(at(5), 0, 100, "", said("ValueError", "own"))]
    events = [*events[:-1], *raises(8, 1, "RuntimeError", GLOO), stopping(14, [0]), events[-1], left(15, 0, -15)]
    verdict = judge([*events, over(16)])
    assert (blamed(verdict), verdict.exit_code) == (("failure", 0, "exception"), 143)


@pytest.mark.parametrize(("code", "killed", "kind"), [(-11, False, "signal"), (-9, True, "memory"), (3, False, "exit")])
def test_ends_without_a_word(code: int, killed: bool, kind: str) -> None:
    events = [*job(2), left(5, 1, code, killed), stopping(6, [0]), left(7, 0, -15), over(8)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 1, kind)
    assert verdict.stopped == (0,)


def test_ranks_that_we_have_stopped_are_not_blamed_whatever_they_make_of_it() -> None:
    own_handler = raises(20, 0, "SystemExit", "143", code=143)
    events = [*job(3), *raises(1, 2, "RuntimeError", GLOO), stopping(9, [0, 1]), *own_handler, left(25, 1, 1), over(30)]
    verdict = judge(events)
    assert blamed(verdict) == ("waited", 2, "exception")
    assert verdict.stopped == (0, 1)


def test_a_broken_pipe_is_a_ranks_own_unless_another_fails_then() -> None:
    alone = [*job(2), *raises(10, 1, "ConnectionResetError", "[Errno 104] Connection reset by peer"), stopping(16, [0])]
    assert blamed(judge([*alone, left(17, 0, -15), over(18)])) == ("failure", 1, "exception")
    both = [*job(2), *raises(10, 1, "BrokenPipeError", "[Errno 32] Broken pipe"), left(15.1, 0, 3), stopping(16, [])]
    assert blamed(judge([*both, over(18)])) == ("failure", 0, "exit")


def test_an_exception_is_judged_by_what_it_began_with() -> None:
    began = said("ValueError", "own")
    raised = ExceptionRaised(at(3), 0, 100, "", said("RuntimeError", GLOO, context=began))
    wrapped = ExceptionRaised(at(2), 1, 101, "", said("MyError", "training failed", cause=said("RuntimeError", GLOO)))
    events = [*job(2), raised, left(4, 0, 1), wrapped, left(5, 1, 1), stopping(5, []), over(6)]
    verdict = judge(events)
    assert blamed(verdict) == ("failure", 0, "exception")
    assert [(one.rank, one.why) for one in verdict.victims] == [
        (1, "RuntimeError: Connection closed by peer [127.0.0.1]:20115")
    ]


def test_a_rank_that_left_early_is_named_where_there_are_only_victims() -> None:
    done = ExceptionRaised(at(9), 3, 103, "", {"type": "SystemExit", "message": "0", "frames": []})
    events = [*job(4), *raises(10, 0, "RuntimeError", GLOO), stopping(16, [1, 2]), done, left(15.5, 3, 0)]
    story = Story([*events, left(17, 1, -15), left(17, 2, -15), over(18)])
    verdict = verdict_on(story)
    assert (verdict.kind, verdict.early, verdict.exit_code) == ("early", (3,), 1)
    lines = tell(story, verdict)
    assert lines[0].startswith("rank 3 left with exit code 0 while others still waited for it: then rank 0 failed: Run")
    told = as_json(story, verdict, lines)
    assert (told["rank"], told["first_victim"], told["line"]) == (3, 0, 7)


def test_who_held_the_others_up_is_named_where_there_are_only_victims() -> None:
    found = ["rank 2 is in read at data.py:3", "group default_pg: rank 2 has not entered number 7"]
    held = RanksHeld(at(20), "failure", [2], found)
    events = [
        *job(4),
        *raises(10, 0, "RuntimeError", LATE),
        *raises(12, 1, "RuntimeError", GLOO),
        held,
        stopping(25, [2, 3]),
    ]
    verdict = judge([*events, left(30, 2, -15), left(31, 3, -15), over(40)])
    assert blamed(verdict) == ("held", 2, "hang")
    assert verdict.exit_code == 1
    assert [one.rank for one in verdict.victims] == [0, 1]
    first, *more = tell(Story(events), verdict)
    assert first == f"rank 2 held up the others, which waited for it in vain: {found[0]}"
    assert more[0] == f"    {found[1]}"
    own = judge([*events, *raises(5, 3, "ValueError", "its own"), over(40)])
    assert blamed(own) == ("failure", 3, "exception")


def test_a_lost_connection_that_may_be_ones_own_is_the_cause_where_the_others_lost_a_rank() -> None:
    own = raises(11, 2, "ConnectionResetError", "[Errno 104] Connection reset by peer")
    verdict = judge(
        [*job(3), *raises(10, 0, "RuntimeError", GLOO), *own, stopping(20, [1]), left(25, 1, -15), over(40)]
    )
    assert blamed(verdict) == ("failure", 2, "exception")


@pytest.mark.parametrize("why", ["stall", "timeout"])
def test_a_hang_names_who_the_others_wait_for(why: str) -> None:
    held = RanksHeld(
        at(20), why, [1], ["rank 1 is in read at data.py:3", "ranks 0, 2 wait in all_reduce at train.py:9"]
    )
    events = [*job(3), held, Stalled(at(20), 3.0), stopping(25, [0, 1, 2], why)]
    verdict = judge([*events, *(left(30, rank, -15) for rank in range(3)), over(40, why)])
    assert blamed(verdict) == (why, 1, "hang")
    assert verdict.exit_code == 124
    assert "    rank 1 is in read at data.py:3" in tell(Story(events), verdict)


def test_a_rank_that_was_done_is_not_blamed_for_another_ones_own_failure() -> None:
    events = [*job(2), left(5, 0, 0), *raises(10, 1, "ValueError", "own"), stopping(15, []), over(16)]
    verdict = judge(events)
    assert (blamed(verdict), verdict.early) == (("failure", 1, "exception"), ())


def test_a_dead_thread_is_the_reason_where_the_rest_has_only_waited() -> None:
    thread = ExceptionRaised(at(5), 1, 101, "loader", said("KeyError", "'x'", 12))
    events = [*job(2), *raises(900, 0, "RuntimeError", LATE), stopping(905, [1]), thread, left(906, 1, -15), over(907)]
    story = Story(events)
    verdict = verdict_on(story)
    assert blamed(verdict) == ("failure", 1, "thread")
    assert "its thread 'loader' died, and it went on without: KeyError: 'x'" in tell(story, verdict)[0]


def test_a_childs_exception_is_not_its_ranks() -> None:
    child = ExceptionRaised(at(5), 1, 4711, "", said("KeyError", "'x'"))
    events = [*job(2), *raises(10, 0, "ValueError", "own"), child, left(11, 1, 0), stopping(15, []), over(16)]
    assert blamed(judge(events)) == ("failure", 0, "exception")


def test_two_failures_closer_than_the_clocks_can_tell_are_both_named() -> None:
    def failing(doubt: int, apart: float) -> tuple[Verdict, list[str]]:
        clocks = [ClockSeen(at(9), 1, doubt)]
        first, second = raises(5, 0, "ValueError", "one"), raises(5 + apart, 2, "TypeError", "two", line=9)
        story = Story([*job(2, 2), *first, *second, *clocks, stopping(20, [1, 3]), over(30)])
        verdict = verdict_on(story)
        return verdict, tell(story, verdict)

    verdict, lines = failing(2 * MS, 0.5)
    assert (verdict.cause and verdict.cause.rank, verdict.close) == (0, (2,))
    assert "or rank 2: failed within 0.5 ms of it, and their nodes' clocks can't tell less than 2 ms apart" in lines
    verdict, lines = failing(MS // 10, 0.5)
    assert (verdict.close, verdict.failed_too) == ((), (2,))
    assert lines[0].startswith("rank 0 on h0 failed first")


def test_ends_of_processes_in_one_moment_are_not_told_apart_and_exceptions_are() -> None:
    exits = judge([*job(3), left(5, 1, 3), left(5.3, 2, 4), stopping(6, [0]), left(7, 0, -15), over(8)])
    assert (exits.cause and exits.cause.rank, exits.close) == (1, (2,))
    first, second = raises(5, 1, "ValueError", "x"), raises(5.3, 2, "TypeError", "y", line=9)
    assert judge([*job(3), *first, *second, stopping(12, [0]), over(13)]).close == ()


def test_ranks_that_fail_alike_are_told_in_one_line() -> None:
    events = [*job(4), *(one for rank in range(4) for one in raises(rank * 10, rank, "ValueError", f"lr {rank}"))]
    verdict = judge([*events, stopping(60, []), over(61)])
    assert (verdict.cause and verdict.cause.rank, verdict.alike, verdict.failed_too) == (0, (1, 2, 3), ())


def test_a_lost_node_comes_before_what_its_loss_did_elsewhere() -> None:
    lost = NodeLost(at(8), 1, "nothing was heard of it for 10 s", [2, 3])
    events = [*job(2, 2), *raises(20, 0, "RuntimeError", GLOO), stopping(26, [1, 2, 3]), left(27, 1, -15), lost]
    verdict = judge([*events, over(40, "lost")])
    assert (verdict.kind, verdict.exit_code, [one.rank for one in verdict.victims]) == ("lost", 4, [0])


def test_an_mpi_abort_is_told_with_its_code() -> None:
    failed = RankFailed(at(5), 1, 5, "called MPI_Abort(5)")
    verdict = judge([*job(2), failed, stopping(6, [0, 1]), left(7, 0, -15), left(7, 1, -15), over(8)])
    assert (blamed(verdict), verdict.exit_code, verdict.stopped) == (("failure", 1, "mpi"), 5, (0,))


def test_a_time_out_names_who_had_raised_and_was_still_there() -> None:
    raised = ExceptionRaised(at(5), 1, 101, "", said("ValueError", "own"))
    events = [*job(2), stopping(60000, [0, 1], "timeout"), raised, left(60001, 0, -15), left(60001, 1, -15)]
    story = Story([*events, over(60002, "timeout")])
    verdict = verdict_on(story)
    assert (blamed(verdict), verdict.exit_code) == (("timeout", 1, "exception"), 124)
    assert "before that rank 1 had raised ValueError: own at /w/train.py:7, and was still there:" in tell(
        story, verdict
    )


def test_of_several_attempts_the_last_is_judged() -> None:
    again = [Restarted(at(20), 1, 1, 0, 3, -1), RankStarted(at(21), 0, 200), RankStarted(at(21), 1, 201)]
    events = [*job(2), left(5, 0, 3), stopping(6, [1]), left(7, 1, -15), *again]
    assert judge(events).kind == "running"
    verdict = judge([*events, left(30, 1, 4), stopping(31, [0]), left(32, 0, -15), over(33)])
    assert (blamed(verdict), verdict.exit_code) == (("failure", 1, "exit"), 4)


def test_jobs_that_go_well_run_or_are_ended_by_a_signal() -> None:
    assert judge([*job(2), left(5, 0, 0), left(6, 1, 0), over(7, "")]).kind == "none"
    assert judge(job(2)).running == (0, 1)
    asked = [StopRequested(at(5), 2), stopping(5, [0, 1], "signal", 2), *raises(6, 0, "KeyboardInterrupt", "", code=-2)]
    verdict = judge([*job(2), *asked, left(7, 1, -2), over(8, "signal")])
    assert (verdict.kind, verdict.exit_code, verdict.cause) == ("signal", 130, None)


def test_a_crash_is_told_with_its_stack_in_the_order_of_a_traceback() -> None:
    stack = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 9 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/v/site-packages/native.py", line 5 in call\n    lib.call()\n'
        '  File "/w/train.py", line 31 in step\n    call(x)\n'
        '  File "/w/train.py", line 40 in <module>\n    step()\n\nExtension modules: numpy\n'
    )
    story = Story([*job(1), Crashed(at(5), 0, stack), left(5, 0, -11), stopping(6, []), over(7)])
    verdict = verdict_on(story)
    lines = tell(story, verdict)
    assert lines[0].startswith("rank 0 failed first: killed by SIGSEGV (Segmentation fault) (pid 100, 0.01 s after")
    assert lines[1:] == [
        "    It was here (most recent call last):",
        '      File "/w/train.py", line 40, in <module>',
        "        step()",
        '      File "/w/train.py", line 31, in step',
        "        call(x)",
        '      … and on into "/v/site-packages/native.py", line 5, in call',
    ]
    told = as_json(story, verdict, lines)
    assert (told["how"], told["code"], told["file"], told["line"]) == ("signal", -11, "/w/train.py", 31)


def test_last_words_of_a_program_that_is_not_ours_are_read() -> None:
    """Also with torch's marks, and among other lines; of several tracebacks the last."""
    text = (
        "noise\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 3, in f\n[rank1]:     d[1]\n[rank1]:     ~^^^\n[rank1]: KeyError: 1\n\n'
        "[rank1]: The above exception was the direct cause of the following exception:\n\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 9, in <module>\n[rank1]:     f()\n[rank1]: ValueError: bad\n'
    )
    account = accounts.from_text(text)
    assert account is not None
    assert (account.title, account.is_cause, account.roots[0].title) == ("ValueError: bad", True, "KeyError: 1")
    assert account.place == ("/w/a.py", 3, "f", "d[1]")
    for cut in range(len(text)):
        accounts.from_text(text[:cut])
        accounts.from_text(text[cut:])
    events = [*job(1), Output(at(4), 0, STDERR, text.encode()), left(5, 0, 1), stopping(6, []), over(7)]
    assert judge(events).cause.short == "KeyError: 1"  # type: ignore[union-attr]


def test_a_report_fits_a_screen_whatever_is_raised() -> None:
    long = said("ValueError", "\n".join(f"line {i}" for i in range(500)))
    long["frames"] = [[f"/w/{i}.py", i, "f", "x" * 200] for i in range(40)]
    for _ in range(6):
        long = {**long, "cause": {**long}, "group": [long] * 4}
    raised = ExceptionRaised(at(5), 0, 100, "", long)
    story = Story([*job(64), raised, left(6, 0, 1), stopping(7, list(range(1, 64))), over(8)])
    assert len(tell(story, verdict_on(story))) <= 24


@pytest.mark.parametrize(
    "account", [{}, {"type": 1}, {"type": "E", "message": "", "frames": 5}, said("E", "", cause=3)]
)
def test_an_account_that_makes_no_sense_is_left_out(account: dict[str, Any]) -> None:
    events = [*job(1), ExceptionRaised(at(5), 0, 100, "", account), left(6, 0, 7), stopping(7, []), over(8)]
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
        ("batch 17 is empty", ""),
        ("CUDA out of memory. Tried to allocate 2 GiB", ""),
        ("connection to the database refused", ""),
    ],
)
def test_echoes_are_known_by_their_words(text: str, strength: str) -> None:
    assert echo_in(text) == strength


# Real jobs.


def verdict_of(launchpad: Launchpad) -> dict[str, Any]:
    """The only job's."""
    (path,) = (Path(launchpad.environ["XDG_STATE_HOME"]) / "launchpad" / "jobs").glob("*/verdict.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


CASES = {
    # how: (exit code, kind, how, rank, type, line of the program that is blamed)
    "raise": (1, "failure", "exception", 2, "ValueError", 'raise ValueError("batch'),
    "_exit": (3, "failure", "exit", 2, None, None),
    "kill": (137, "failure", "signal", 2, None, None),
    "segv": (139, "failure", "signal", 2, None, "ctypes.string_at"),
    "abort": (134, "failure", "signal", 2, None, "os.abort"),
    "exit": (9, "failure", "exception", 2, "SystemExit", "sys.exit(9)"),
    "early": (1, "early", "exception", 2, "RuntimeError", "dist.all_reduce"),
    "loader": (1, "failure", "exception", 2, "KeyError", 'return {}["sample'),
    "excepthook": (1, "failure", "exception", 2, "KeyError", 'raise KeyError("lr")'),
    "group": (1, "failure", "exception", 2, "ExceptionGroup", "raise ExceptionGroup"),
}


@needs_torch
@pytest.mark.parametrize("how", CASES)
def test_the_rank_that_failed_in_a_collective_program_is_blamed(launchpad: Launchpad, how: str) -> None:
    done = launchpad.run("run", "-n", 4, "fails_in_step.py", how, timeout=120)
    found = verdict_of(launchpad)
    code, kind, way, rank, type_, source = CASES[how]
    assert (done.returncode, found["exit_code"]) == (code, code), done.stderr
    assert (found["kind"], found["how"], found["rank"], found["type"]) == (kind, way, rank, type_), found
    if source:
        assert source in Path(found["file"]).read_text().splitlines()[found["line"] - 1]
    others = {one["rank"] for one in found["victims"]} | set(found["stopped"])
    assert others == {0, 1, 3} - {found.get("first_victim")}
    assert found["failed_too"] == found["close"] == []
    if how == "excepthook":
        assert "[2] mine\n" in done.stderr
        assert "[2] Traceback" not in done.stderr


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_exceptions_are_kept_in_every_python_rank(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    """In threads too; what the program's own hooks and standard error see is as ever."""
    (launchpad.folder / "t.py").write_text(
        "import sys, threading\n"
        "def work():\n    raise KeyError('x')\n"
        "def main():\n"
        "    t = threading.Thread(target=work, name='loader'); t.start(); t.join()\n"
        "    try:\n        {}['a']\n"
        "    except KeyError as error:\n"
        "        error.add_note('look at the config')\n"
        "        raise ValueError('no such field') from error\n"
        "main()\n"
    )
    done = launchpad.run("run", "-n", 1, *way, "t.py")
    found = verdict_of(launchpad)
    assert (found["type"], found["message"], found["line"], done.returncode) == ("ValueError", "no such field", 7, 1)
    text = "\n".join(found["text"])
    assert "KeyError: 'a'\n    look at the config\n" in text
    assert "rank 0 had lost a thread before, thread 'loader': KeyError: 'x' at " in text
    assert done.stderr.count("[0] Traceback (most recent call last):") == 3
    assert "executed.py" not in done.stderr
    assert "nursery" not in done.stderr


def test_the_users_own_faulthandler_stays(launchpad: Launchpad) -> None:
    (launchpad.folder / "c.py").write_text("import faulthandler, os\nfaulthandler.enable()\nos.abort()\n")
    done = launchpad.run("run", "-n", 1, "c.py")
    assert "[0] Fatal Python error: Aborted" in done.stderr
    assert "launchpad:     It was here (most recent call last):" in done.stderr
    assert verdict_of(launchpad)["line"] == 3


def test_a_program_that_is_not_python_is_told_by_its_last_words(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--", "sh", "-c", "test $RANK = 0 && exec sleep 600; echo no disk >&2; exit 6")
    assert re.search(r"launchpad: rank 1 failed first: exit code 6 \(pid .*\n.*launchpad:     no disk\n", done.stderr)
    assert verdict_of(launchpad)["code"] == 6
