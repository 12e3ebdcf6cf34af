"""The pytest plugin: real runs of pytest on tests that have its marks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, wait_until
from tests.support.needs import needs_torch
from tests.support.processes import stacks, with_variable

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

OURS_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p launchpad"}

HEAD = "import os, signal, subprocess, sys, threading, time, unittest, warnings\nimport pytest\n"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run pytest on a file with this code; afterwards no process of it is left."""
    # Without pytester's folder for temporary files, the inner pytest would clean up after earlier sessions.
    kept = ("PYTEST_CURRENT_TEST", "PYTEST_DEBUG_TEMPROOT")
    for name in list(os.environ):
        if name.startswith(("PYTEST_", "LAUNCHPAD_", "OMP_", "MASTER_")) and name not in kept:
            monkeypatch.delenv(name)
    mark = f"PLUGIN_TEST_{os.getpid()}"
    monkeypatch.setenv(mark, str(pytester.path))
    # Half of its time would go into plugins that are not used.
    for name, setting in OURS_ALONE.items():
        monkeypatch.setenv(name, setting)

    def run_pytest(code: str, *args: str, **options: object) -> pytest.RunResult:
        pytester.makepyfile(test_it=HEAD + code)
        words = [sys.executable, "-m", "pytest", *args]
        too_long = threading.Timer(DEADLINE - 10, lambda: print(stacks(with_variable(mark, pytester.path))))
        too_long.start()
        try:
            return pytester.run(*words, timeout=DEADLINE, **options)  # type: ignore[arg-type]
        finally:
            too_long.cancel()
            too_long.join()

    yield run_pytest

    def left() -> list[str]:
        found = []
        for pid in with_variable(mark, pytester.path):
            with contextlib.suppress(OSError):
                if pid != os.getpid():
                    found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        return found

    wait_until(lambda: not left(), "all processes to be gone", show=left)


def squeezed(text: str) -> str:
    """Without the rules around headings."""
    return re.sub(r"[-_=]{3,}", "", text)


# Unused.


def test_an_unused_plugin_loads_next_to_nothing(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OURS_ALONE:
        monkeypatch.delenv(name)
    pytester.makeconftest(
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    print('LOADED', sorted(n for n in sys.modules if n.startswith(('launchpad', 'torch'))))\n"
    )
    out = run("def test_it(): pass\n", "-q", "-s").stdout.str()
    own = ["launchpad", "launchpad._version", "launchpad.testing", "launchpad.testing.collected"]
    assert f"LOADED {[*own, 'launchpad.testing.plugin']}" in out
    out = run("def test_it(): pass\n", "-q", "-s", "-p", "no:launchpad").stdout.str()
    assert "LOADED []" in out


# Marks.


def test_a_bad_mark_is_one_sentence(run: Run) -> None:
    done = run("@pytest.mark.ranks(0)\ndef test_it(): pass\n", "-q")
    done.stdout.fnmatch_lines(["@pytest.mark.ranks: 0 is not a number of ranks: use whole numbers from 1"])
    assert done.ret == pytest.ExitCode.INTERRUPTED
    assert "Traceback" not in done.stdout.str()


PLACES = """
class TestAll:
    pytestmark = pytest.mark.ranks(2)

    @pytest.mark.parametrize("x", "ab")
    def test_in_class(self, x, rank, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("OWN", str(rank))
        (tmp_path / str(rank)).write_text(x)
        print("hidden")
        assert capsys.readouterr().out == "hidden\\n"
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline

@pytest.mark.ranks(2, 3)
def test_sizes(world_size, rank):
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))

@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    print("made for", os.environ.get("RANK"))
    yield folder
    print("seen:", sorted(one.name for one in folder.iterdir()))

@pytest.fixture(scope="module")
def each(rank):
    return [rank]

@pytest.mark.ranks(2)
def test_one(once, each, rank):
    (once / f"one{rank}").touch()
    each.append(1)

@pytest.mark.ranks(2)
def test_two(once, each, rank):
    assert {"one0", "one1"} <= {one.name for one in once.iterdir()}
    assert each == [rank]
    (once / f"two{rank}").touch()

def test_plain():
    assert "RANK" not in os.environ and "OWN" not in os.environ
"""


def test_places_fixtures_and_ids(run: Run) -> None:
    done = run(PLACES, "-v", "-rP")
    done.assert_outcomes(passed=7)
    done.stdout.fnmatch_lines(["*test_in_class[[]a[]] PASSED*", "*test_sizes[[]ranks2[]]*", "*test_sizes[[]ranks3[]]*"])
    assert done.stdout.str().count("made for None") == 1
    assert "seen: ['one0', 'one1', 'two0', 'two1']" in done.stdout.str()
    run(PLACES, "-k", "ranks3 or plain").assert_outcomes(passed=2, deselected=5)


# One report.

FAILURES = """
@pytest.mark.ranks(4)
def test_differs(rank):
    print("same")
    print("other", rank % 2, file=sys.stderr)
    value = [1, 2, 3 if rank == 2 else 4]
    assert value[2] == 4

@pytest.mark.ranks(2)
def test_dies(rank):
    print("my last words")
    if rank == 1:
        os._exit(7)

@pytest.mark.ranks(2)
def test_crashes(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.ranks(2, timeout=3)
def test_hangs(rank):
    if rank == 1:
        time.sleep(300)

@pytest.fixture
def broken(rank):
    assert rank == 0

@pytest.mark.ranks(2)
def test_setup(broken): pass

@pytest.mark.ranks(2)
def test_teardown(rank, request):
    request.addfinalizer(lambda: 1 / rank)

@pytest.fixture(scope="module")
def nowhere():
    raise ValueError("not here")

@pytest.mark.ranks(2)
def test_shared(nowhere): pass

@pytest.mark.ranks(2)
def test_warns(rank): warnings.warn("take care")

@pytest.mark.ranks(2)
def test_thread(rank):
    if rank: threading.Thread(target=time.sleep, args=(300,), name="pump").start()

@pytest.mark.ranks(2)
def test_child(rank):
    if not rank: subprocess.Popen(["sleep", "301"])

@pytest.mark.ranks(2)
def test_orphan(rank):
    start = "import subprocess; subprocess.Popen(['sleep', '302'], start_new_session=True)"
    if not rank: subprocess.run([sys.executable, "-I", "-c", start], check=True)

def test_no_mark(rank): pass

@pytest.mark.ranks(2)
def test_after(rank): pass
"""


def test_each_failure_is_one_report_and_fails_only_its_test(run: Run) -> None:
    done = run(FAILURES, "--junitxml=report.xml", "--durations=3")
    done.assert_outcomes(passed=6, failed=4, errors=7, warnings=1)
    text = squeezed(done.stdout.str())
    for part in (
        "E       assert 3 == 4",
        "rank 2: assert 3 == 4; ranks 0-1, 3 passed",
        " Captured stdout call (ranks 0-3) \nsame\n",
        " Captured stderr call (ranks 1, 3) \nother 1\n",
        "rank 1 died: exit code 7; rank 0 passed\nits last words:\n    my last words\n",
        "rank 0 died: killed by SIGSEGV (Segmentation fault); rank 1 passed\nwhere it was:\n    test_it.py:",
        "in test_crashes: os.kill(os.getpid(), signal.SIGSEGV)\n",
        "rank 1 did not end within 3 s; rank 0 passed\nwhere the ranks are:\n",
        "\n  rank 1 is in test_hangs at test_it.py:",
        "rank 1: assert 1 == 0; rank 0 passed",
        "rank 0: ZeroDivisionError: division by zero; rank 1 passed",
        "ValueError: not here",
        "UserWarning: take care",
        "rank 1 left the thread 'pump': ended now;",
        "(sleep 301): ended now;",
        "a rank left the process ",
        "sleep 302): ended now;",
        "the fixture 'rank' has a value only in a rank: mark the test with @pytest.mark.ranks(2)",
        "FAILED test_it.py::test_differs - rank 2: assert 3 == 4; ranks 0-1, 3 passed",
    ):
        assert part in text, part
    suite = ElementTree.parse("report.xml").getroot()[0]
    failures = {case.get("name"): case[0].get("message") for case in suite if len(case) and case[0].tag == "failure"}
    assert failures["test_differs"] == "rank 2: assert 3 == 4; ranks 0-1, 3 passed"


SKIPS = """
@pytest.mark.ranks(2)
def test_all_skip(): pytest.skip("no need")

@pytest.mark.ranks(2)
def test_some_skip(rank):
    if rank: pytest.skip("no need")

@pytest.mark.ranks(2)
@pytest.mark.skip
def test_mark(): pass

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_some_xfail(rank): assert rank

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_strict(rank): assert rank

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_strict_passes(rank): pass

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_xpass(rank): pass

@pytest.mark.ranks(2)
@pytest.mark.xfail(run=False)
def test_not_run(rank): os._exit(1)

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_dies(rank): os._exit(1)
"""


def test_skip_and_xfail(run: Run) -> None:
    done = run(SKIPS)
    done.assert_outcomes(skipped=2, failed=2, xfailed=4, xpassed=1)
    text = done.stdout.str()
    assert "rank 1 skipped (no need); rank 0 passed: a test is skipped on all of its ranks, or on none" in text
    assert "XPASS(strict)" in text


# What can't be forked.


def test_what_began_before_the_tests_is_an_error_of_marked_tests(run: Run) -> None:
    code = """
event = threading.Event()
if "STARTS" in os.environ: threading.Thread(target=event.wait, name="feeder", daemon=True).start()

def test_plain():
    threading.Thread(target=event.wait, name="of a plain test", daemon=True).start()

@pytest.mark.ranks(2)
def test_marked(rank): pass

@pytest.fixture(scope="module")
def feeding():
    thread = threading.Thread(target=event.wait, name="late feeder")
    thread.start()
    yield
    event.set()
    thread.join()

@pytest.mark.ranks(2)
def test_first(rank): pass

@pytest.mark.ranks(2)
def test_fed(feeding): pass
"""
    done = run(code, "-p", "no:threadexception")
    done.assert_outcomes(passed=3, errors=1)
    done.stdout.fnmatch_lines(["*the process that ranks are forked from can't be forked: the thread 'late feeder'*"])
    os.environ["STARTS"] = "1"
    try:
        done = run(code)
    finally:
        del os.environ["STARTS"]
    done.assert_outcomes(passed=1, errors=3)
    done.stdout.fnmatch_lines(["pytest's own process can't be forked: the thread 'feeder' runs in it; *"])


# Options of pytest, and other plugins.

SOME = """
@pytest.mark.ranks(2)
def test_bad(rank):
    print("shown by", rank)
    value = rank * 6 + 1
    assert value == 1

@pytest.mark.ranks(2)
def test_good(rank): pass
"""


def test_stop_at_the_first_failure_and_the_last_failed(run: Run) -> None:
    run(SOME, "-x").assert_outcomes(failed=1)
    run(SOME, "--lf").assert_outcomes(failed=1)
    done = run(SOME, "-s", "-q")
    assert {"shown by 0", "shown by 1"} <= {line.strip("F.") for line in done.stdout.lines}


IN_TURNS = """
def until_there_is(name):
    deadline = time.monotonic() + 30
    while not os.path.exists(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)

@pytest.mark.ranks(2)
def test_it(rank):
    if rank == 0:
        print("begun by 0,", end=" ")
        open("begun", "w").close()
        until_there_is("between")
        print("ended by 0")
    else:
        until_there_is("begun")
        print("said by 1")
        open("between", "w").close()
"""


@pytest.mark.parametrize("shown", ["-s", "--capture=tee-sys"])
def test_lines_stay_whole_where_ranks_write_to_one_pipe(run: Run, monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # else a line would only be cut where a buffer is full
    done = run(IN_TURNS, shown, "-q")
    assert {"begun by 0, ended by 0", "said by 1"} <= {line.strip("F.") for line in done.stdout.lines}


BESIDE_PLAIN_TESTS = """
@pytest.fixture(scope="class")
def broken():
    yield
    print("torn down")
    raise RuntimeError("can't be torn down")

class TestFirst:
    def test_plain(self, broken): pass
    @pytest.mark.ranks(2)
    def test_ranks(self, rank): pass

class TestOther:
    def test_other(self): pass
    @pytest.mark.ranks(2)
    def test_shared(self, broken): pass
    @pytest.mark.ranks(2)
    @pytest.mark.skip
    def test_skipped(self): pass

class TestLast:
    @pytest.mark.ranks(2)
    def test_last(self): pass
"""


def test_fixtures_of_a_class_are_torn_down_after_its_last_test_of_either_kind(run: Run) -> None:
    done = run(BESIDE_PLAIN_TESTS, "-v")
    done.assert_outcomes(passed=5, skipped=1, errors=2)
    done.stdout.fnmatch_lines(["*ERROR at teardown of TestFirst.test_ranks*", "E *can't be torn down", "torn down"])
    done.stdout.fnmatch_lines(["*ERROR at teardown of TestOther.test_shared*", "E *can't be torn down", "torn down"])


def test_a_rank_that_dies_or_hangs_while_it_exits_fails_its_test(run: Run) -> None:
    code = """
import atexit
def crashes(): os.kill(os.getpid(), 11)
def exits(): os._exit(5)
def hangs(): time.sleep(1000)
two = pytest.mark.ranks(2)
limited = pytest.mark.ranks(2, timeout=5)
each = [pytest.param(crashes, marks=two), pytest.param(exits, marks=two), pytest.param(hangs, marks=limited)]
@pytest.mark.parametrize("what", each)
def test_it(rank, what):
    if rank == 1:
        atexit.register(what)
"""
    done = run(code)
    done.assert_outcomes(passed=3, errors=3)
    shown = done.stdout.str()
    assert "rank 1 died while it exited: killed by SIGSEGV (Segmentation fault); rank 0 passed" in shown
    assert "rank 1 died while it exited: exit code 5; rank 0 passed" in shown
    assert "rank 1 did not end within 5 s; rank 0 passed" in shown
    assert "in crashes" in shown
    assert "rank 1 is in hangs at" in shown
    assert "member.py" not in shown


def test_a_pool_that_is_left_open_ends_with_its_rank(run: Run) -> None:
    code = """
import multiprocessing
@pytest.mark.ranks(2, timeout=60)
def test_it(rank):
    global kept
    kept = multiprocessing.get_context("fork").Pool(2)
    assert kept.map(abs, [-1]) == [1]
"""
    run(code).assert_outcomes(passed=1)


def test_pytest_exit_in_a_shared_fixture(run: Run) -> None:
    code = """
@pytest.fixture(scope="module")
def leaves(): pytest.exit("enough", returncode=8)
@pytest.mark.ranks(2)
def test_it(rank, leaves): pass
"""
    done = run(code)
    assert done.ret == 8
    assert "Exit: enough" in done.stdout.str()


@pytest.mark.parametrize("where", ["the test", "its fixture", "its fixture's teardown"])
def test_pytest_exit_in_a_rank_ends_the_run_as_in_any_test(run: Run, where: str) -> None:
    code = """
@pytest.fixture
def leaves(rank):
    if WHERE == "its fixture" and rank == 1: pytest.exit("enough", returncode=8)
    yield
    if WHERE == "its fixture's teardown" and rank == 1: pytest.exit("enough", returncode=8)
@pytest.mark.ranks(2)
def test_it(rank, leaves):
    if WHERE == "the test" and rank == 1: pytest.exit("enough", returncode=8)
def test_later(): pass
"""
    done = run(f"WHERE = {where!r}\n{code}")
    assert done.ret == 8
    assert "Exit: enough" in done.stdout.str()
    done.assert_outcomes(passed=int(where == "its fixture's teardown"))


def test_what_shared_fixtures_log_is_told_with_a_failure(run: Run) -> None:
    code = """
import logging
@pytest.fixture(scope="module")
def logs():
    logging.warning("while it was set up")
    yield
    logging.warning("while it was torn down")
    assert False, "a bad end"
@pytest.mark.ranks(2)
def test_it(rank, logs): assert False, "a bad test"
"""
    text = squeezed(run(code).stdout.str())
    assert re.search(r"Captured log setup \(ranks 0-1\) *\nWARNING .* while it was set up\n", text), text
    assert re.search(r"Captured log teardown *\nWARNING .* while it was torn down\n", text), text


def test_a_mark_that_can_not_make_several_tests_fails_only_its_own(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
import pytest
def pytest_collection_modifyitems(items):
    items[0].add_marker(pytest.mark.ranks(2, 3))
""")
    code = """
def test_hooked(): pass
@pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.ranks(0)),
                               pytest.param(1, marks=pytest.mark.ranks(2))])
def test_parameter(n): pass
"""
    done = run(code)
    done.assert_outcomes(errors=2, passed=1)
    assert "its mark has to give a single number of ranks" in done.stdout.str()
    assert "During handling" not in done.stdout.str()


def test_without_pytests_capture(run: Run) -> None:
    run(SOME, "-p", "no:capture").assert_outcomes(passed=1, failed=1)


def test_unittests_expected_failure_on_one_rank_only(run: Run) -> None:
    code = """
@pytest.mark.ranks(2)
class TestCase(unittest.TestCase):
    @unittest.expectedFailure
    def test_it(self): assert os.environ["RANK"] == "0"
"""
    run(code).assert_outcomes(xfailed=1)


def test_junit_has_what_a_rank_printed_before_it_died(run: Run, pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.ranks(2)
def test_it(rank):
    print("last words of", rank)
    os.kill(os.getpid(), 9)
"""
    run(code, "--junitxml=junit.xml", "-o", "junit_logging=all").assert_outcomes(failed=1)
    (out,) = ElementTree.parse(pytester.path / "junit.xml").getroot().iter("system-out")
    assert out.text is not None
    assert "last words of 0" in out.text
    assert "last words of 1" in out.text


def test_the_first_rank_that_fails_has_the_terminal(run: Run) -> None:
    done = run(SOME, "--pdb", stdin=b"p 'value', value\nc\n")
    done.assert_outcomes(failed=1, passed=1)
    assert "rank 1 of 2 has the terminal" in done.stdout.str()
    assert "('value', 7)" in done.stdout.str()
    code = "@pytest.mark.ranks(2, timeout=50)\ndef test_it(rank):\n    here = rank\n    breakpoint()\n    here += 1\n"
    done = run(code, stdin=b"p 'here', here\nc\n")
    assert "rank 0 of 2 has the terminal" in done.stdout.str() or "rank 1 of 2 has the terminal" in done.stdout.str()
    assert "('here', " in done.stdout.str()


def test_with_xdist_and_coverage(run: Run, pytester: pytest.Pytester) -> None:
    branches = "    if rank == 0:\n        return 'a'\n    if rank == 1:\n        return 'b'\n    return 'c'\n"
    pytester.makepyfile(seen=f"def which(rank):\n{branches}")
    code = """
import seen
@pytest.fixture(scope="session")
def shared(request):
    (request.config.rootpath / f"made-{os.getpid()}").touch()
    yield
    (request.config.rootpath / f"made-{os.getpid()}").rename(request.config.rootpath / f"torn-{os.getpid()}")

@pytest.mark.ranks(2)
@pytest.mark.parametrize('n', range(4))
def test_it(rank, n, shared): assert seen.which(rank) == 'ab'[rank]
"""
    for args in ((), ("-n", "2")):
        done = run(code, "-p", "xdist", "-p", "pytest_cov", "--cov=seen", "--cov-report=term-missing", *args)
        done.assert_outcomes(passed=4)
        done.stdout.fnmatch_lines(["seen.py * 6 * 1 * 83% * 6"])
    assert len(list(pytester.path.glob("torn-*"))) in (2, 3)  # of two runs, one with two workers
    assert not list(pytester.path.glob("made-*"))


def test_with_timeout(run: Run) -> None:
    code = """
@pytest.mark.ranks(2)
@pytest.mark.timeout(3, method="thread")
def test_all(rank): time.sleep(300 * rank)

@pytest.mark.ranks(2)
@pytest.mark.timeout(3, func_only=True)
def test_call(rank): time.sleep(300 * rank)
"""
    done = run(code, "-p", "timeout")
    done.assert_outcomes(failed=2)
    assert done.stdout.str().count("rank 1 did not end within 3 s; rank 0 passed") >= 2


def test_with_unittest_and_hypothesis(run: Run) -> None:
    code = """
from hypothesis import HealthCheck, given, settings, strategies

class TestCase(unittest.TestCase):
    pytestmark = pytest.mark.ranks(2)

    @classmethod
    def setUpClass(cls): cls.begun = os.getpid()
    def setUp(self): self.rank = int(os.environ["RANK"])
    def test_good(self): self.assertEqual(os.getppid(), self.begun)
    def test_bad(self): self.assertEqual(self.rank, 0)

drawn = []

@settings(max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.lists(strategies.integers()))
def draw(numbers): drawn.append(numbers)

@pytest.mark.ranks(2)
def test_draw(rank, tmp_path):
    draw()
    (tmp_path / f"part{rank}").write_text(repr(drawn))
    (tmp_path / f"part{rank}").rename(tmp_path / str(rank))
    deadline = time.monotonic() + 30
    while not (tmp_path / str(1 - rank)).exists():
        assert time.monotonic() < deadline
    assert (tmp_path / str(1 - rank)).read_text() == repr(drawn)
"""
    done = run(code, "-p", "hypothesispytest")
    done.assert_outcomes(passed=2, failed=1)
    assert "rank 1: AssertionError: 1 != 0; rank 0 passed" in done.stdout.str()


# Ends.


@pytest.mark.usefixtures("run")
def test_nothing_is_left_when_pytest_is_killed_or_interrupted(pytester: pytest.Pytester) -> None:
    """The fixture checks that no process is left, the ranks' children among them."""
    pytester.makepyfile(
        test_it=HEAD + "@pytest.mark.ranks(2)\ndef test_it(rank):\n    child = subprocess.Popen(['sleep', '300'])\n"
        "    open(f'ready{rank}', 'w')\n    time.sleep(300)\n"
    )
    for signum in (signal.SIGKILL, signal.SIGINT):
        for name in ("ready0", "ready1"):
            Path(name).unlink(missing_ok=True)
        words = [sys.executable, "-m", "pytest", "-q"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: Path("ready0").exists() and Path("ready1").exists(), "the ranks")
        process.send_signal(signum)
        out, _ = process.communicate(timeout=DEADLINE)
        if signum == signal.SIGINT:
            assert "KeyboardInterrupt" in out
            assert process.returncode == pytest.ExitCode.INTERRUPTED


# torch and MPI.


@needs_torch
def test_process_groups(run: Run) -> None:
    code = """
import torch, torch.distributed as dist

@pytest.mark.ranks(2, 3)
def test_sum(process_group, rank, world_size):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world_size))
    assert dist.get_backend() == "gloo"

@pytest.mark.ranks(2)
def test_own_group(rank):
    for _ in range(2):
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()

@pytest.mark.ranks(2)
def test_fails(process_group, rank):
    assert rank == 0
    dist.barrier()

@pytest.mark.ranks(2, timeout=5)
def test_hangs(process_group, rank):
    if rank: time.sleep(300)
    dist.barrier()
"""
    done = run(code)
    done.assert_outcomes(passed=3, failed=2)
    text = done.stdout.str()
    assert "rank 1: assert 1 == 0; rank 0" in text
    assert "rank 0 waits in barrier at test_it.py:" in text
    assert "rank 1 has not entered collective 1, barrier" in text


@needs_torch
def test_ranks_are_processes_of_their_own(run: Run) -> None:
    """In what they draw, in what they warn of, and in what their reports hold."""
    code = """
import torch, torch.distributed as dist
import launchpad.testing.team as team
team.AFTER_FAILURE = 0.5  # seconds that the other ranks have when one has failed
warnings.warn("at import")

@pytest.mark.ranks(2)
def test_draw(process_group, rank):
    mine = torch.rand(8)
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first) == (rank == 0)

@pytest.fixture(scope="module")
def seeded(): torch.manual_seed(7)

@pytest.mark.ranks(2)
def test_seeded(seeded): assert torch.initial_seed() == 7

class Value:
    def __str__(self): return "a value"

@pytest.mark.ranks(2)
def test_own_class(rank, record_property):
    class Odd(UserWarning): pass
    class Own(Value): pass
    warnings.warn("take care", Odd)
    record_property("own", Own())

@pytest.mark.ranks(2)
def test_part(rank, subtests):
    with subtests.test("a"): pytest.skip("not here")
    if rank: time.sleep(2)

@pytest.fixture(scope="module")
def broken(): assert False

@pytest.mark.xfail
@pytest.mark.ranks(2)
def test_expected(broken): pass
"""
    done = run(code, "--junitxml", "out.xml", "-o", "junit_family=xunit1", "-W", "default")
    text = done.stdout.str()
    done.assert_outcomes(passed=4, xfailed=1, warnings=2)
    assert "Odd: take care" in text
    assert 'value="a value"' in Path("out.xml").read_text()


def test_what_shared_fixtures_warn_of_is_filtered_and_told(run: Run) -> None:
    code = """
class Odd(UserWarning): pass

@pytest.fixture(scope="module")
def shared():
    warnings.warn("when set up", Odd)
    warnings.warn("not of interest")
    yield
    warnings.warn("when torn down")

@pytest.mark.ranks(2)
def test_first(shared): pass

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:when torn down")
def test_last(shared): pass

@pytest.fixture(scope="class")
def strict(): warnings.warn("too much")

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:too much")
class TestStrict:
    def test_it(self, strict): pass
"""
    done = run(code, "-W", "ignore:not of interest", "-W", "default:when", "-k", "first")
    done.assert_outcomes(passed=1, deselected=2, warnings=2)
    assert "Odd: when set up" in done.stdout.str()
    assert "UserWarning: when torn down" in done.stdout.str()
    done = run(code, "-W", "ignore:not of interest", "-k", "first or last")
    done.assert_outcomes(passed=2, deselected=1, warnings=1)
    done = run(code, "-k", "Strict")
    done.assert_outcomes(errors=1, deselected=2)
    assert "UserWarning: too much" in done.stdout.str()
    run(code, "-p", "no:warnings", "-k", "first or last").assert_outcomes(passed=2, deselected=1)


def test_tests_that_run_in_spite_of_collection_errors_have_ranks(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import nowhere_at_all\n")
    code = "@pytest.mark.ranks(2)\ndef test_it(world_size): assert world_size == 2\n"
    run(code, "--continue-on-collection-errors").assert_outcomes(passed=1, errors=1)


@needs_torch
def test_mpi_worlds(run: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("mpi4py")
    code = """
from mpi4py import MPI

with open("pid", "w") as file: print(os.getpid(), file=file)

@pytest.mark.parallel
def test_world(rank):
    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, 3)
    assert MPI.COMM_WORLD.allreduce(1) == 3

@pytest.mark.ranks(2)
def test_group(process_group):
    import torch.distributed as dist
    assert dist.get_backend() == "mpi"
    dist.barrier()

@pytest.mark.parallel(2)
def test_fails(rank):
    assert rank == 0
    MPI.COMM_WORLD.barrier()

@pytest.mark.parallel(2)
def test_aborts(rank):
    if rank: MPI.COMM_WORLD.Abort(5)
    MPI.COMM_WORLD.barrier()

@pytest.mark.parallel([1, 2])
def test_sizes(): assert MPI.COMM_WORLD.size == int(os.environ["WORLD_SIZE"])
"""
    done = run(code, "--ranks-backend", "mpi", "-v")
    done.assert_outcomes(passed=4, failed=2)
    pid = int((pytester.path / "pid").read_text())
    assert not os.path.exists(f"/dev/shm/mpich_shm_{pid:x}_0")  # of pytest's own world
    text = done.stdout.str()
    assert "rank 1: assert 1 == 0; rank 0 was ended while it waited" in text
    assert "rank 0 waits in barrier at test_it.py:" in text
    assert "rank 1 called MPI_Abort(5)" in text
    assert "test_sizes[nprocs=2] PASSED" in text


def test_worlds_of_open_mpi_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    code = "@pytest.mark.parallel\ndef test_world(): ..."
    words = "tests form worlds of MPICH and Intel MPI only, but here mpi4py uses Open MPI: MPI4PY_MPIABI is openmpi;"
    done = run(code)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(f"*@pytest.mark.parallel: {words}*")
    done = run(code, "--ranks-backend", "mpi")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(f"ERROR: --ranks-backend mpi: {words}*")
