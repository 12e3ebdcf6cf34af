"""`launchpad.ranks`: ranks that stay for one call after the other. What their failures, interrupts and ends leave."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.api.screen import SessionScreen
from tests.support import called
from tests.support.called import (
    barrier_of,
    collect,
    exit_on,
    hold,
    keep,
    kept_unless,
    meet_unless,
    raise_on,
    rank,
    until,
    wait_in,
)
from tests.support.command import DEADLINE, MARK, Launchpad, descriptors, wait_until
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import needs_sshd


@pytest.fixture(autouse=True)
def nothing_is_left(launchpad: Launchpad, keeper: Launchpad, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No descriptor and no thread here; the command's fixture checks for processes and files."""
    launchpad.use_images(keeper)
    for name in (MARK, "TMPDIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, launchpad.environ[name])
    for name in [name for name in os.environ if name.startswith("PYTHON")]:  # the images were made without
        monkeypatch.delenv(name)
    before = descriptors()
    handler = signal.getsignal(signal.SIGINT)
    yield
    gc.collect()  # an exception that was caught holds frames, which hold what was returned
    assert descriptors().items() <= before.items()
    assert signal.getsignal(signal.SIGINT) is handler
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("launchpad")] == []


def test_what_a_call_leaves_is_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no image is found
    with lp.ranks(2, backend=None) as ranks:
        pids = ranks.run(os.getpid)
        assert isinstance(pids, lp.Results)
        assert ranks.run(hold, 5) == (1, 1)
        assert ranks.run(hold, 6) == (2, 2)
        assert ranks.run(os.getpid) == pids
        assert called.held == []
        assert ranks.run(lambda rank, size: (rank, size)) == ((0, 2), (1, 2))
        assert repr(ranks) == "<launchpad.ranks: 2 ranks, ready>"
        assert pids[pids.places[1]] == pids[1]
    assert repr(ranks) == "<launchpad.ranks: 2 ranks, closed>"
    with pytest.raises(lp.UsageError, match="these ranks are closed"):
        ranks.run(rank)
    assert capsys.readouterr() == ("", "")


def test_what_a_call_prints_is_there_when_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ranks(2, backend=None) as ranks:
        for number in range(20):
            ranks.run(print, "call", number)
            assert sorted(capsys.readouterr().out.splitlines()) == [f"[0] call {number}", f"[1] call {number}"]
        ranks.run(os.write, 1, b"unfinished")
        assert sorted(capsys.readouterr().out.splitlines()) == ["[0] unfinished", "[1] unfinished"]
        ranks.run(subprocess.run, ["sh", "-c", "echo from a child >&2"])
        assert sorted(capsys.readouterr().err.splitlines()) == ["[0] from a child", "[1] from a child"]
        ranks.run(os.write, 1, b"x\n" * (1 << 20))
        assert capsys.readouterr().out.count("\n") == 2 << 20


def test_submitted_calls_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ranks(2, backend=None) as ranks:
        futures = [ranks.submit(hold, number) for number in range(9)]
        assert [future.result(DEADLINE) for future in futures] == [(number, number) for number in range(1, 10)]
        first = ranks.submit(until, str(tmp_path / "go"))
        second, third = ranks.submit(hold, 0), ranks.submit(print, "printed")
        assert second.cancel()
        assert not first.done()
        (tmp_path / "go").touch()
        assert third.result(DEADLINE) == (None, None)
        assert sorted(capsys.readouterr().out.splitlines()) == ["[0] printed", "[1] printed"]
        assert ranks.run(hold, 0) == (10, 10)
        last = ranks.submit(hold, 0)
    assert last.result(0) == (11, 11)  # the `with` has waited for it


def test_a_rank_that_raises_leaves_all_alive(capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ranks(3, backend=None) as ranks:
        pids = ranks.run(os.getpid)
        with pytest.raises(UnicodeDecodeError) as error:
            ranks.run(raise_on, 1)
        assert error.value.reason == "rank 1"
        remote = str(error.value.__cause__)
        assert remote.startswith("\nrank 1:\nTraceback (most recent call last):")
        assert "in raise_on\n    raise UnicodeDecodeError(" in remote
        assert "rank/call_server.py" not in remote
        with pytest.raises(lp.UnpicklableError, match=r"what rank . returned \(a lock\) can't be pickled"):
            ranks.run(threading.Lock)
        with pytest.raises(lp.UnpicklableError, match=r"argument 1 \(a lock\) can't be pickled"):
            ranks.run(hold, threading.Lock())
        with pytest.raises(lp.UsageError, match=r"takes \(number\); it must take \(rank, size\), or nothing"):
            ranks.run(hold)
        with pytest.raises(lp.UsageError, match=r"ranks\.run needs a function"):
            ranks.run(3)
        with pytest.raises(lp.UsageError, match="timeout=0"):
            ranks.run(rank, timeout=0)
        assert ranks.run(os.getpid) == pids
    assert capsys.readouterr().err == ""


def test_a_rank_that_exits_ends_all_until_they_are_restarted() -> None:
    ranks = lp.ranks(2, backend=None)
    try:
        with pytest.raises(lp.RankError, match="rank 1 failed first: exit code 7") as error:
            ranks.run(exit_on, 1, 7)
        assert (error.value.rank, error.value.code) == (1, 7)
        assert "ranks.restart() starts new ones" in error.value.__notes__[-1]
        with pytest.raises(lp.UsageError, match=r"the ranks are gone \(rank 1 failed first"):
            ranks.run(rank)
        ranks.restart()
        assert ranks.run(hold, 1) == (1, 1)
        with pytest.raises(lp.RankError, match=r"rank . exited \(exit code 0\) before its function returned"):
            ranks.run(sys.exit, 0)
        ranks.restart()
        before = ranks.run(os.getpid)
        ranks.restart()  # also while they run
        assert set(before).isdisjoint(ranks.run(os.getpid))
    finally:
        ranks.close()
        ranks.close()


@needs_torch
def test_a_rank_that_raises_while_others_wait_for_it(launchpad: Launchpad) -> None:
    with lp.ranks(3, backend="gloo") as ranks:
        with pytest.raises(UnicodeDecodeError, match="before the barrier") as error:
            ranks.run(meet_unless, 1)
        assert str(error.value.__cause__).startswith("\nrank 1:\nTraceback")
        assert "ranks.restart() starts new ones" in error.value.__notes__[-1]
        assert "rank 1 failed first: UnicodeDecodeError" in launchpad.run("why").stdout
        with pytest.raises(lp.UsageError, match="the ranks are gone"):
            ranks.run(rank)
        ranks.restart()
        ranks.run(meet_unless, -1)
        assert ranks.run(rank) == (0, 1, 2)


@needs_torch
def test_ranks_that_sent_each_other_messages_survive_an_exception() -> None:
    with lp.ranks(3, backend="gloo") as ranks:
        assert ranks.run(collect) == (2, 0, 0)
        with pytest.raises(UnicodeDecodeError):
            ranks.run(raise_on, 1)
        assert ranks.run(collect) == (2, 0, 0)


def test_a_call_that_takes_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ranks(2, backend=None, timeout=DEADLINE) as ranks:
        pids = ranks.run(os.getpid)
        ranks.run(rank)  # imports this module
        with pytest.raises(lp.JobTimeout, match=r"wait_in was ended: it ran longer than timeout=5 s"):
            ranks.run(wait_in, str(tmp_path), timeout=5)
        said = capsys.readouterr().err
        assert "ranks 0-1 " in said
        assert "in wait_in" in said
        assert ranks.run(os.getpid) == pids


@needs_torch
def test_a_call_that_hangs_in_a_collective() -> None:
    with lp.ranks(2, backend="gloo") as ranks:
        ranks.run(rank)  # imports this module
        with pytest.raises(lp.JobTimeout, match="rank 0 had not returned") as error:
            ranks.run(barrier_of, 0, timeout=5)
        assert "rank 0 did not end the call" in error.value.__notes__[0]
        with pytest.raises(lp.UsageError, match=r"the ranks are gone \(the call of .* was ended"):
            ranks.run(rank)


@needs_torch
@needs_mpi
def test_over_mpi() -> None:
    with lp.ranks(2, backend="mpi") as ranks:
        assert ranks.run(keep, 1) == ((0, 2.0), (1, 2.0))
        with pytest.raises(UnicodeDecodeError, match="rank 1"):
            ranks.run(raise_on, 1)
        assert ranks.run(kept_unless, -1) == (1, 1)
        with pytest.raises(UnicodeDecodeError, match="before the barrier"):
            ranks.run(meet_unless, 0)
        ranks.restart()
        assert ranks.run(rank) == (0, 1)


def test_it_is_a_job_like_any_other(launchpad: Launchpad) -> None:
    """Its idle ranks too."""
    with lp.ranks(2, backend=None) as ranks:
        ranks.run(print, "printed")
        wait_until(lambda: launchpad.run("stacks").returncode == 0, "an answer")
        assert "ranks 0-1" in launchpad.run("stacks").stdout
        assert "running" in launchpad.run("jobs").stdout
        assert "[0] printed" in launchpad.run("logs").stdout
    assert "running" not in launchpad.run("jobs").stdout


def test_ranks_that_are_dropped_end(launchpad: Launchpad) -> None:
    ranks = lp.ranks(1, backend=None)
    (pid,) = ranks.run(os.getpid)
    future = ranks.submit(rank)
    assert future.result(DEADLINE) == (0,)
    del ranks
    gc.collect()
    wait_until(lambda: not launchpad.survivors() or not os.path.exists(f"/proc/{pid}"), "the rank to be gone")
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("launchpad")], "the threads")


def test_a_forked_process_has_no_ranks() -> None:
    with lp.ranks(1, backend=None) as ranks:
        pid = os.fork()
        if pid == 0:
            try:
                ranks.run(rank)
            except lp.UsageError as error:
                os._exit(0 if "belong to the process that has started them" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert ranks.run(rank) == (0,)


SCRIPT = """
import os, sys, launchpad

def setup(start):
    global total
    total = start

def add(x):
    global total
    total += x * factor
    return total

total, factor = -1, 1
ranks = launchpad.ranks(2, backend=None)
ranks.run(setup, 10)
assert ranks.run(add, 1) == (11, 11) and ranks.run(add, 1) == (12, 12), "a global of the ranks"
factor = 2
assert ranks.run(add, 1) == (14, 14) and total == -1, "a global of the caller"

class Batch:
    def __init__(self, x): self.x = x

def keep(batch):
    global kept
    kept = batch

ranks.run(keep, Batch(3))
assert ranks.run(lambda: isinstance(kept, Batch) and kept.x) == (3, 3)
import numpy
big = numpy.arange(1 << 18)
(one, other) = ranks.run(lambda x: x * 2, big)
assert (one == big * 2).all() and (other == big * 2).all()
print("pids", *ranks.run(os.getpid), flush=True)
END
"""


@pytest.mark.parametrize(
    "end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)", "raise SystemExit(3)", "del ranks; input()"]
)
def test_nothing_is_left_whatever_ends_the_interpreter(launchpad: Launchpad, end: str) -> None:
    (launchpad.folder / "script.py").write_text(SCRIPT.replace("END", end))
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=launchpad.folder,
        env=launchpad.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        line = process.stdout.readline()
        assert line.startswith("pids "), process.stderr.read()
        pids = [int(word) for word in line.split()[1:]]
        if "input" not in end:
            process.wait(DEADLINE)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the ranks to be gone")
        _, err = process.communicate("\n", timeout=DEADLINE)
        assert "Traceback" not in err


INTERRUPTED = """
import launchpad, os, threading

def wait():
    print("ready", flush=True)
    threading.Event().wait()

with launchpad.ranks(2, backend=None) as ranks:
    pids = ranks.run(os.getpid)
    try:
        ranks.run(wait)
    except KeyboardInterrupt:
        print("interrupted", ranks.run(os.getpid) == pids, flush=True)
"""


def test_ctrl_c_ends_the_call_and_not_the_ranks(launchpad: Launchpad) -> None:
    argv = [sys.executable, "-c", INTERRUPTED]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=launchpad.environ, cwd=launchpad.folder, **pipes) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] ready\n", b"[1] ready\n"]
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, b"interrupted True\n", b"")


def test_a_ctrl_c_that_does_not_interrupt_a_system_call_is_heard() -> None:
    """As one between the interpreter's last look for signals and its wait."""
    screen = SessionScreen()
    calls: list[Future[None]] = [Future(), Future()]
    before = signal.signal(signal.SIGINT, lambda *_: calls[0].set_result(None))
    try:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        screen.show_until(calls[0])
        signal.signal(signal.SIGINT, lambda *_: calls[1].set_result(None))
        other = threading.Thread(target=screen.show_until, args=[calls[1]])  # it writes, too
        other.start()
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        screen.show_until(calls[1])
        other.join()
    finally:
        signal.signal(signal.SIGINT, before)
        screen.close()
        screen.thread.join()


class SlowAtFirst(io.StringIO):
    """Its first write takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        self.go.wait(DEADLINE)
        return super().write(text)


def test_what_a_call_prints_comes_after_what_was_printed_before() -> None:
    """Also if that is still being written when the call begins."""
    with contextlib.redirect_stdout(SlowAtFirst()) as out, lp.ranks(1, backend=None) as ranks:
        ranks.submit(print, "first")
        assert out.begun.wait(DEADLINE)
        threading.Timer(0.5, out.go.set).start()
        ranks.run(print, "second")
        assert out.getvalue() == "[0] first\n[0] second\n"


def test_what_is_to_be_done_once_the_screen_is_closed_is_done() -> None:
    """As for a call whose last outcome took so long to unpickle that the ranks have ended meanwhile."""
    screen, call = SessionScreen(), Future[None]()
    screen.close()
    screen.thread.join()
    screen.after(lambda: call.set_result(None))
    screen.show_until(call)
    assert call.done()


CLOSES = """\
import os, signal, sys, threading, time
import launchpad as lp

def slow(seconds):
    print("begins")
    time.sleep(seconds)

def close(*_):
    ranks.close()
    if sys.argv[1] == "signal":
        sys.exit(3)

if __name__ == "__main__":
    ranks = lp.ranks(1, backend=None)
    if sys.argv[1] == "signal":
        signal.signal(signal.SIGTERM, close)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
        ranks.run(slow, 600)
    first = ranks.submit(slow, 0.5)
    first.add_done_callback(close)
    try:
        ranks.run(slow, 600)
    except lp.LaunchpadError:
        sys.exit(3)
"""


@pytest.mark.parametrize("by", ["signal", "callback"])
def test_ranks_are_closed_in_the_thread_that_waits_for_them(launchpad: Launchpad, by: str) -> None:
    argv = [sys.executable, "-c", CLOSES, by]
    done = subprocess.run(argv, env=launchpad.environ, cwd=launchpad.folder, timeout=DEADLINE)
    assert done.returncode == 3


def test_a_call_returns_while_the_callback_of_another_one_is_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ranks(1, backend=None) as ranks:
        go = threading.Event()
        first = ranks.submit(print, "first")
        first.add_done_callback(lambda _: go.wait(DEADLINE))
        assert first.result() == (None,)
        ranks.run(print, "second")
        assert capsys.readouterr().out == "[0] first\n[0] second\n"
        go.set()


def test_an_exception_while_a_call_is_waited_for_leaves_the_ranks_usable() -> None:
    """As of a handler of SIGALRM."""
    screen, calls = SessionScreen(), [Future[None](), Future[None]()]

    def show_until_alarm() -> None:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGALRM]).start()
        screen.show_until(calls[0])

    before = signal.signal(signal.SIGALRM, lambda *_: calls[0].result(0))
    try:
        with pytest.raises(TimeoutError):
            show_until_alarm()
        threading.Timer(0.1, screen.after, [lambda: calls[1].set_result(None)]).start()
        screen.show_until(calls[1])
    finally:
        signal.signal(signal.SIGALRM, before)
        screen.close()
        screen.thread.join()


def interrupts_itself() -> None:
    if os.environ["RANK"] == "1":
        raise KeyboardInterrupt


def test_a_rank_that_interrupts_itself() -> None:
    with lp.ranks(2, backend=None, timeout=DEADLINE) as ranks:
        with pytest.raises(lp.RankError, match="rank 1 raised KeyboardInterrupt") as caught:
            ranks.run(interrupts_itself)
        assert (caught.value.rank, caught.value.code) == (1, 130)
        assert ranks.run(rank) == (0, 1)


@pytest.mark.parametrize("timeout", [float("inf"), 1e8])
def test_limits_that_poll_does_not_take(timeout: float) -> None:
    with lp.ranks(1, backend=None) as ranks:
        assert ranks.run(rank, timeout=timeout) == (0,)


def test_many_small_results_are_kept_without_descriptors() -> None:
    with lp.ranks(1, backend=None) as ranks:
        ranks.run(bytes, 1 << 15)
        before = len(descriptors())
        kept = [ranks.run(bytearray, 1 << 15) for _ in range(20)]
        assert len(descriptors()) < before + 10  # the job's own come at their own time
        assert all(len(one[0]) == 1 << 15 for one in kept)


class WithoutFlush:
    def write(self, text: str) -> None:
        if text.startswith("[0] bad"):
            raise RuntimeError(text)


def test_an_output_of_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", WithoutFlush())
    with lp.ranks(1, backend=None) as ranks:
        for words in ("good", "bad", "good"):
            assert ranks.submit(print, words).result(DEADLINE) == (None,)


def test_ranks_that_nobody_keeps_finish_their_call() -> None:
    assert lp.ranks(1, backend=None).submit(rank).result(DEADLINE) == (0,)
    gc.collect()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("launchpad")], "the threads")


def test_ranks_that_a_futures_callback_closes() -> None:
    ranks = lp.ranks(1, backend=None)
    closed = threading.Event()

    def close(_: object) -> None:
        ranks.close()
        closed.set()

    ranks.submit(rank).add_done_callback(close)
    assert closed.wait(DEADLINE)
    ranks.close()


def test_a_forked_process_leaves_the_block() -> None:
    with lp.ranks(1, backend=None) as ranks:
        ranks.submit(called.wait_for_ever)
        pid = os.fork()
        if pid == 0:
            try:
                with ranks:
                    pass
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        ranks.close()


def begins_more_than_rank_0() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        raise ValueError("rank 0 does not take part")
    dist.all_reduce(torch.ones(1), async_op=True)


def leaves_a_file(path: str) -> None:
    open(f"{path}/{os.environ['RANK']}", "w").close()


@needs_torch
def test_a_call_after_the_one_that_ends_the_ranks_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    with lp.ranks(2, backend="gloo") as ranks:
        first, second = ranks.submit(begins_more_than_rank_0), ranks.submit(leaves_a_file, str(tmp_path / "left"))
        assert isinstance(first.exception(DEADLINE), ValueError)
        assert "the ranks are gone" in str(second.exception(DEADLINE))
        assert list((tmp_path / "left").iterdir()) == []


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"backend": "tcp"}, "backend='tcp'"),
        ({"timeout": 0}, "timeout=0"),
        ({"hosts": "a:3"}, "a is given 3 ranks, but --nproc asks for 2"),
        ({"env": {"RANK": "3"}}, "launchpad sets RANK"),
    ):
        with pytest.raises(lp.UsageError, match=message):
            lp.ranks(2, **options)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(lp.UsageError, match=r"launchpad\.ranks was called in a rank"):
        lp.ranks(2)


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
@needs_torch
def test_over_ssh(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Large arguments and results, state, output, an exception, a timeout and a death."""
    import numpy

    big = numpy.arange(1 << 20, dtype=numpy.float64)  # 8 MiB: more than may be in flight
    with lp.ranks(hosts=["n1:1", "n2:2"], ssh_config=str(hosts.ssh_config)) as ranks:
        results = ranks.run(keep, big)
        assert results == ((0, 3.0), (1, 3.0), (2, 3.0))
        assert results.places == (("n1", 0), ("n2", 0), ("n2", 1))
        assert sorted(capsys.readouterr().out.splitlines()) == ["[n1 0] kept", "[n2 1] kept", "[n2 2] kept"]
        assert all((one == big).all() for one in ranks.run(kept_unless, -1))
        futures = [ranks.submit(hold, 1) for _ in range(5)]
        assert [future.result(DEADLINE) for future in futures] == [(number,) * 3 for number in range(1, 6)]
        with pytest.raises(UnicodeDecodeError) as error:
            ranks.run(kept_unless, 1)
        assert str(error.value.__cause__).startswith("\nrank 1 on n2:\nTraceback")
        with pytest.raises(lp.JobTimeout):
            ranks.run(wait_in, str(tmp_path), timeout=1.0)
        assert ranks.run(rank) == (0, 1, 2)
        with pytest.raises(lp.RankError, match="failed first: exit code 7"):
            ranks.run(exit_on, 2, 7)
        ranks.restart()
        assert ranks.run(rank) == (0, 1, 2)
        with pytest.raises(UnicodeDecodeError, match="before the barrier"):
            ranks.run(meet_unless, 2)
