"""The pytest plugin: what marks mean, and which failure is the first."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace

import pytest

from launchpad.testing import marks, merge, shared, soundness
from launchpad.testing.outcome import STOPPED, TIMEOUT, WAITED, RankEnd, TestEnd

# Marks.


def test_what_marks_mean() -> None:
    assert marks.read_ranks((2, 4), {"timeout": 3}) == ((2, 4), ("ranks2", "ranks4"), 3, False)
    assert marks.read_parallel((), {}) == ((3,), ("nprocs=3",), None, True)
    assert marks.read_parallel(([1, 2],), {}).ids == ("nprocs=1", "nprocs=2")
    assert marks.read_parallel((), {"nprocs": 2}).sizes == (2,)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, "needs the number of ranks"),
        ((0,), {}, "0 is not a number of ranks"),
        ((True,), {}, "True is not a number of ranks"),
        (("4",), {}, "'4' is not a number of ranks"),
        ((2, 2), {}, "only once"),
        ((2,), {"timeout": 0}, "timeout=0 is not a number of seconds"),
        ((2,), {"backend": "mpi"}, "no argument 'backend'"),
    ],
)
def test_marks_that_make_no_sense(args: tuple[object, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        marks.read_ranks(args, options)


# One report.


class Reports:
    """Reports as ranks make them, for the pure merge."""

    def __init__(self) -> None:
        self.template = pytest.TestReport("t.py::t", ("t.py", 1, "t"), {}, "passed", None, "setup")
        self.test = merge.Test(self.template)

    def one(self, when: str, message: str = "") -> dict[str, object]:
        report = self.test.failed(when, message) if message else self.test.report(when, "passed")  # type: ignore[arg-type]
        return {"report": report}

    def merged(self, *ends: RankEnd, **options: object) -> list[str]:
        end = TestEnd(ranks=list(ends), **options)  # type: ignore[arg-type]
        first, last = merge.merged(self.test, end, lambda data: data["report"])
        return [f"{one.when} {one.outcome} {one.longreprtext.splitlines()[-1:]}" for one in [*first, *last]]


@pytest.mark.parametrize(
    ("died", "done", "failed", "code", "ended"),
    [
        (False, True, False, 0, ""),
        (False, True, True, 1, ""),
        (True, True, False, 1, ""),
        (False, True, True, 0, ""),
        (True, True, False, -11, ""),
        (True, False, False, 0, ""),
        (False, True, False, -9, STOPPED),
        (False, False, False, -9, TIMEOUT),
    ],
)
def test_which_ranks_died(died: bool, done: bool, failed: bool, code: int, ended: str) -> None:
    report = {"outcome": "failed" if failed else "passed"}
    assert RankEnd(0, [report], done, code, ended).died() is died


def test_a_rank_that_ends_badly_when_all_has_been_reported_fails_the_teardown() -> None:
    make = Reports()
    whole = [make.one("setup"), make.one("call"), make.one("teardown")]
    passed = RankEnd(0, whole, True)
    words = "rank 1 died while it exited: exit code 5; rank 0 passed"
    assert make.merged(passed, RankEnd(1, whole, True, 5))[-1] == f"teardown failed ['{words}']"
    words = "rank 1 did not end within 3 s; rank 0 passed"
    assert make.merged(passed, RankEnd(1, whole, True, -9, TIMEOUT), limit=3)[-1] == f"teardown failed ['{words}']"
    assert make.merged(passed, RankEnd(1, whole, True, -9, STOPPED))[-1] == "teardown passed []"


def test_what_several_ranks_say_is_not_put_into_the_plural() -> None:
    make = Reports()
    text = "dictionary changed size while iterating, and was ended while it waited"
    ranks = [RankEnd(rank, [make.one("setup"), make.one("call", text), make.one("teardown")], True) for rank in (0, 1)]
    _, call, _ = make.merged(*ranks)
    assert call == f"call failed ['both ranks: {text}']"


def test_a_lost_connection_is_not_the_first_failure() -> None:
    """Ranks 0 and 2 fail because rank 1 is gone."""
    make = Reports()
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"
    victims = [
        RankEnd(rank, [make.one("setup"), make.one("call", lost), make.one("teardown")], True) for rank in (0, 2)
    ]
    setup, call, teardown = make.merged(victims[0], RankEnd(1, [make.one("setup")], code=-9), victims[1])
    assert setup == "setup passed []"
    assert call.startswith("call failed ['rank 1 died: killed by SIGKILL (Killed); ranks 0, 2: RuntimeError: [gloo")
    assert teardown == "teardown passed []"
    own = RankEnd(1, [make.one("setup"), make.one("call", "assert 1 == 2"), make.one("teardown")], True)
    _, call, _ = make.merged(victims[0], own, victims[1])
    assert "rank 1: assert 1 == 2; ranks 0, 2: RuntimeError" in call


def test_ranks_that_were_ended_come_last() -> None:
    make = Reports()
    ended = RankEnd(0, [make.one("setup")], ended=WAITED)
    own = RankEnd(1, [make.one("setup"), make.one("call", "assert 1 == 2"), make.one("teardown")], True)
    _, call, teardown = make.merged(ended, own, stacks="STACKS")
    assert (call, teardown) == ("call failed ['STACKS']", "teardown passed []")
    late = [RankEnd(rank, [make.one("setup")], ended=TIMEOUT) for rank in range(2)]
    assert make.merged(*late, limit=3.0)[1:] == ["call failed ['both ranks did not end within 3 s']"]


def test_fixtures_that_need_a_rank() -> None:
    needed = {"a": ["b"], "b": ["c", "rank"], "d": ["c", "d"], "process_group": []}
    assert shared.needs_rank("a", lambda name: needed.get(name, []))
    assert shared.needs_rank("process_group", lambda name: needed.get(name, []))
    assert not shared.needs_rank("d", lambda name: needed.get(name, []))


# What can't be forked.


def test_a_thread_is_named() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="feeder")
    thread.start()
    try:
        assert "this process can't be forked: the thread 'feeder' runs in it" in soundness.why_not("this process")
    finally:
        done.set()
        thread.join()


def test_mpi_that_has_begun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Is_initialized=lambda: True))  # type: ignore[arg-type]
    monkeypatch.setattr(soundness, "_thread", lambda: "")
    assert "MPI is initialised in it; run pytest with --ranks-backend mpi" in soundness.why_not("pytest's own process")
