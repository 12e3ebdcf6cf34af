"""diagnosis/restarts: whether a restart can help, from events alone; and what counts as a new file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launchpad.diagnosis import restarts
from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import verdict_on
from launchpad.job.limits import RestartLimit
from launchpad.protocol.events import STDERR, ExceptionRaised, NodeLost, Output
from launchpad.runner import restart_judge
from tests.support.failures import GLOO, at, exits, job, over, raises, recorded, stopping

LATE = restarts.EARLY_NS / 1e6  # ms


def prints(rank: int, text: str) -> Output:
    return Output(0, rank, STDERR, text.encode())


def fails(ms: float = 5, message: str = "loss is nan at step 17", rank: int = 1, **more: Any) -> list[Any]:
    """An attempt of two ranks, of which one raises a ValueError and the other one is stopped."""
    ended = raises(ms, rank, "ValueError", message, **more)
    return [*job(2), *ended, stopping(ms + 6, [1 - rank]), exits(ms + 7, 1 - rank, -15), over(ms + 8)]


def exit_with(code: int, text: str = "", killed: bool = False) -> list[Any]:
    return [*job(2), prints(1, text), exits(5, 1, code, killed), stopping(6, [0]), exits(7, 0, -15), over(8)]


def refusal(first: list[Any], second: list[Any], new_files: bool | None = None, *progress: str) -> str:
    """The judgement on the second attempt; the first one was restarted."""
    before = History(first)
    assert restarts.refusal(before, verdict_on(before), None, new_files, progress) == ""
    history = History(second)
    history.attempt = 1
    return restarts.refusal(history, verdict_on(history), restarts.signature_of(before, verdict_on(before)), new_files)


@pytest.mark.parametrize(
    "again",
    [
        fails(),
        fails(message="loss is nan at step 23512"),
        fails(rank=0),
        fails(ms=500_000),
    ],
    ids=["the same", "another number", "another rank", "a little later"],
)
def test_the_same_failure_is_not_worth_a_restart(again: list[Any]) -> None:
    assert refusal(fails(), again).startswith("it fails the same way each time; not restarted")


@pytest.mark.parametrize(
    "again",
    [
        fails(message="no memory"),
        fails(line=8),
        [*job(2), *raises(5, 1, "TypeError", "loss is nan at step 17"), over(12)],
        exit_with(1),
        exit_with(-11),
        [*job(2), *raises(5, 1, "RuntimeError", GLOO), over(12)],
    ],
    ids=["message", "line", "type", "no exception", "crash", "victims only"],
)
def test_another_failure_is_worth_a_restart(again: list[Any]) -> None:
    assert refusal(fails(), again) == ""


def test_an_exit_without_an_exception() -> None:
    assert refusal(exit_with(3), exit_with(3))
    assert refusal(exit_with(-11), exit_with(-11))
    assert refusal(exit_with(3, "step 1\nno file 7\n"), exit_with(3, "step 5\nno file 8\n\n"))
    assert not refusal(exit_with(3), exit_with(4))
    assert not refusal(exit_with(3, "no file"), exit_with(3, "no memory"))
    left = [*job(1), *raises(5, 0, "SystemExit", "3", code=3), over(12)]
    assert refusal(left, left)
    assert not refusal(left, [*job(1), *raises(5, 0, "SystemExit", "4", code=4), over(12)])


@pytest.mark.parametrize(
    "attempt",
    [
        exit_with(-9),
        exit_with(-9, killed=True),
        exit_with(-15),
        exit_with(-10),
        exit_with(137),
        exit_with(143),
        [*job(1), *raises(5, 0, "SystemExit", "143", code=143), over(12)],
        [*job(1), *raises(5, 0, "KeyboardInterrupt", "", code=-2), over(12)],
        [*job(1, 1), NodeLost(at(5), 1, "no heartbeat", [1]), stopping(6, [0]), exits(7, 0, -15), over(8, "lost")],
        [*job(1, 1), *raises(3, 0, "ValueError", "x"), NodeLost(at(5), 1, "no heartbeat", [1]), over(12)],
        [*job(1)],
    ],
    ids="KILL OOM TERM USR1 137 143 handler INT lost lost-too unknown".split(),
)
def test_what_comes_from_outside_is_always_worth_a_restart(attempt: list[Any]) -> None:
    assert refusal(attempt, attempt) == ""


def test_an_exit_early_is_the_programs_fault() -> None:
    attempt = [*job(2), exits(5, 0, 0), *raises(9, 1, "RuntimeError", GLOO), over(20)]
    assert refusal(attempt, attempt)


def test_new_files_are_progress() -> None:
    assert not refusal(fails(), fails(), True, "ckpt/*")
    assert refusal(fails(), fails(), False, "ckpt/*")


def test_without_patterns_a_long_run_is_progress_and_with_them_it_is_not() -> None:
    assert not refusal(fails(LATE + 1), fails(LATE + 1))
    assert not refusal(fails(), fails(LATE + 1))
    assert refusal(fails(LATE + 1), fails())
    assert refusal(fails(LATE + 1), fails(LATE + 1), False, "ckpt/*")


def test_the_patterns_are_named() -> None:
    history = History(fails())
    signature = restarts.signature_of(history, verdict_on(history))
    said = restarts.refusal(history, verdict_on(history), signature, False, ["a/*", "b"])
    assert said.startswith("it fails the same way each time, and no file that matches a/* or b is new; not restarted")


def first(*events: Any, nodes: tuple[int, ...] = (2,)) -> str:
    """The judgement on the first attempt."""
    history = History([*job(*nodes), *events])
    return restarts.refusal(history, verdict_on(history), None, None)


def no_module(rank: int, ms: float = 5) -> list[Any]:
    return raises(ms, rank, "ModuleNotFoundError", "No module named 'x'")


def test_a_rank_that_was_stopped_can_not_tell() -> None:
    assert first(*no_module(0), stopping(11, [1]), exits(12, 1, -15)).startswith("an import failed at the start")
    assert first(*no_module(0), stopping(11, [1]), *no_module(1, 11))
    assert first(*no_module(0), stopping(11, [1]), stopping(5010, [1], signum=9), exits(5011, 1, -9))


def test_a_rank_that_got_further_can() -> None:
    assert not first(exits(4, 1, 0), *no_module(0))
    assert not first(*no_module(0), stopping(11, [1]), *raises(12, 1, "ValueError", "x"))
    assert not first(*no_module(0), stopping(11, [1]), exits(12, 1, 3))
    assert not first(*no_module(0, LATE + 1), stopping(LATE + 7, [1]), exits(LATE + 8, 1, -15))


def test_each_node_must_show_it() -> None:
    one = [*no_module(0), stopping(11, [1]), exits(12, 1, -15)]
    assert not first(*one, nodes=(1, 1))
    assert first(*no_module(0), *no_module(1), nodes=(1, 1))


def test_sys_exit_with_2_counts_if_all_ranks_do_it() -> None:
    both = [*raises(5, 0, "SystemExit", "2", code=2), *raises(6, 1, "SystemExit", "2", code=2)]
    assert first(*both).startswith("all ranks exited with 2")
    one = [*both[:2], stopping(11, [1]), exits(12, 1, -15)]
    assert not first(*one)
    assert first(prints(0, "\nusage: train.py [-h]\ntrain.py: error: no\n"), *one).startswith("the program rejected")
    assert not first(exits(5, 0, 2), exits(6, 1, 2)), "any program may exit with 2"


@pytest.mark.parametrize(("link", "refused"), [("cause", True), ("context", False)])
def test_what_an_exception_was_raised_from_counts_but_not_what_was_handled_before(link: str, refused: bool) -> None:
    """`try: import faster; except ImportError: …` goes on without it."""
    inner = recorded("ImportError", "no faster")
    raised = ExceptionRaised(at(5), 0, 100, "", recorded("OSError", "busy", **{link: inner}))
    assert bool(first(raised, exits(9, 0, 1), nodes=(1,))) is refused


def test_a_rank_that_one_of_its_children_wrote_about() -> None:
    """The child raised, and not the rank."""
    raised = ExceptionRaised(at(5), 0, 999, "", recorded("ImportError", "x"))
    assert not first(raised, exits(9, 0, 3), nodes=(1,))


# Files.


def test_the_newest_file(tmp_path: Path) -> None:
    folder = tmp_path / "has [brackets]"
    (folder / "ckpt" / "deep").mkdir(parents=True)
    assert restart_judge.newest(str(folder), ["*.pt", "/no/such/*"]) == 0
    for seconds, name in enumerate(["a.pt", "ckpt/b.pt", "ckpt/deep/c.pt"], start=1):
        (folder / name).touch()
        os.utime(folder / name, (seconds, seconds))
    (folder / "d.pt").symlink_to("nowhere")
    found = [restart_judge.newest(str(folder), [pattern]) for pattern in ("*.pt", "ckpt/*.pt", "**/*.pt")]
    assert found == [10**9, 2 * 10**9, 3 * 10**9]
    assert restart_judge.newest("/", [str(tmp_path / "*" / "ckpt" / "*.pt")]) == 2 * 10**9


def test_limits_in_words() -> None:
    limits = [RestartLimit(3), RestartLimit(10, 3600.0), RestartLimit(1, 5400.0), RestartLimit(2, 172800.0)]
    assert [str(one) for one in [*limits, RestartLimit(1, 0.5)]] == ["3", "10/1h", "1/90m", "2/2d", "1/0.5s"]
