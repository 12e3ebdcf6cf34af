"""`launchpad.run(fn, …)`: a function on N ranks from Python, its results, its failures, and where its output goes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import importlib.util
import io
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

import launchpad as lp
from launchpad.api import packing
from launchpad.rank import pickling
from tests.support import called
from tests.support.called import NUMBER, Stubborn, by_reference, fails_until, raises, spawns, wait_for_ever
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
    names = ("launchpad", "control")
    wait_until(lambda: not any(thread.name in names for thread in threading.enumerate()), "the threads to be gone")


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("cold")
def test_a_function_of_a_module_and_a_closure(capsys: pytest.CaptureFixture[str]) -> None:
    results = lp.run(by_reference, nproc=2, backend=None)
    assert isinstance(results, lp.Results)
    assert results == ((5, called.__name__), (5, called.__name__))
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["[0] printed by a rank", "[1] printed by a rank"]
    assert sorted(said.err.splitlines()) == ["[0] and on stderr", "[1] and on stderr"]
    assert [host for host, _ in results.places] == [results.places[0][0]] * 2
    assert results[results.places[1]] == results[1]
    assert results[1:] == ((5, called.__name__),)
    with pytest.raises(KeyError, match="no rank ran at"):
        results["elsewhere", 0]
    captured = [NUMBER]
    more = lp.run(lambda x, y: (captured, x, y, os.environ["RANK"], os.environ["GIVEN"]), 1, "b", env={"GIVEN": "yes"})
    assert more == (([5], 1, "b", "0", "yes"),)


def test_in_a_running_loop_in_a_thread_and_with_another_stdout() -> None:
    async def cell() -> tuple[object, str]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            results = lp.run(by_reference, nproc=2, backend=None)
        in_thread = await asyncio.to_thread(lp.run, by_reference, backend=None)
        return (*results, *in_thread), shown.getvalue()

    results, shown = asyncio.run(cell())
    assert results == ((5, called.__name__),) * 3
    assert sorted(shown.splitlines()) == ["[0] printed by a rank", "[1] printed by a rank"]


def test_the_first_failed_ranks_own_exception(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnicodeDecodeError) as error:
        lp.run(raises, nproc=3, backend=None)
    assert error.value.reason == "rank 1 of 3"
    assert isinstance(error.value.__cause__, lp.RemoteTraceback)
    remote = str(error.value.__cause__)
    assert remote.startswith("\nrank 1:\nTraceback (most recent call last):")
    assert "in raises\n    raise UnicodeDecodeError(" in remote
    assert "forkserver" not in remote
    assert "Traceback" not in capsys.readouterr().err  # it is not shown twice

    def stubborn() -> None:
        raise Stubborn(1, 2)

    with pytest.raises(lp.RankError, match=r"rank 0 raised .*Stubborn: 1 and 2") as other:
        lp.run(stubborn, backend=None)
    assert "raise Stubborn(1, 2)" in str(other.value.__cause__)


def test_it_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    """With the results of the last attempt; and not if that can't help."""
    assert lp.run(fails_until, 1, nproc=2, backend=None, max_restarts=3) == ("1" * 8, "1" * 8)
    assert "restarting all ranks (restart 1 of 3)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="attempt 1") as error:
        lp.run(fails_until, 9, nproc=2, backend=None, max_restarts=(3, 3600.0))
    why = "launchpad: it fails the same way each time; not restarted (--restart always would)"
    assert error.value.__notes__[0].endswith(why)
    with pytest.raises(ValueError, match="attempt 2") as error:
        lp.run(fails_until, 9, nproc=2, backend=None, max_restarts=2, restart="always")
    assert why not in error.value.__notes__[0]


def test_its_jobs_are_recorded_and_can_be_asked_for_stacks(launchpad: Launchpad, tmp_path: Path) -> None:
    with pytest.raises(UnicodeDecodeError):
        lp.run(raises, nproc=2, backend=None)
    why = launchpad.run("why").stdout
    assert f"job {launchpad.run('jobs').stdout.split()[0]}: {called.__name__}:raises" in why
    assert "rank 1 failed first: UnicodeDecodeError: " in why
    assert "in raises" in why
    assert "SystemExit" not in why

    def waits() -> None:
        print("is here", flush=True)
        while not (tmp_path / "go").exists():
            threading.Event().wait(0.01)

    caller = threading.Thread(target=lp.run, args=(waits,), kwargs={"backend": None})
    caller.start()
    try:
        wait_until(lambda: "is here" in launchpad.run("logs").stdout, "what the rank writes")
        wait_until(lambda: launchpad.run("stacks").returncode == 0, "an answer")
        assert "rank 0 " in launchpad.run("stacks").stdout
        assert "the job is running: rank 0" in launchpad.run("why").stdout
    finally:
        (tmp_path / "go").touch()
        caller.join(DEADLINE)
    assert "is here" in launchpad.run("logs").stdout
    assert launchpad.run("stacks").returncode == 2
    assert "running" not in launchpad.run("jobs").stdout


def test_no_thread_is_left_when_it_returns(launchpad: Launchpad) -> None:
    """From Python 3.12 on, the caller would be warned of it at its next fork."""
    running = launchpad.state / "launchpad" / "running"

    def waits() -> None:  # until the job can be asked, which takes a thread
        while not running.is_dir() or not any(running.iterdir()):
            threading.Event().wait(0.01)

    before = set(threading.enumerate())  # one of an earlier test may end
    for _ in range(3):
        lp.run(waits, backend=None)
        assert set(threading.enumerate()) <= before


def test_a_rank_that_does_not_return(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lp.RankError, match="rank 0 failed first: exit code 3") as error:
        lp.run(lambda: os._exit(3), backend=None)
    assert (error.value.rank, error.value.code) == (0, 3)
    with pytest.raises(lp.RankError, match="killed by SIGKILL"):
        lp.run(lambda: os.kill(os.getpid(), signal.SIGKILL), backend=None)
    with pytest.raises(lp.RankError, match=r"rank 0 exited \(exit code 0\) before its function returned"):
        lp.run(lambda: sys.exit(), backend=None)
    with pytest.raises(lp.JobTimeout, match=r"ran longer than timeout=0\.5 s"):
        lp.run(wait_for_ever, backend=None, timeout=0.5)
    assert "Traceback" not in capsys.readouterr().err


@needs_torch
def test_who_held_up_the_others_is_in_the_exception() -> None:
    with pytest.raises(lp.JobTimeout) as hung:
        lp.run(
            called.waits_for_rank_1, nproc=3, backend="gloo", timeout=20
        )  # until then rank 1 has to be where it stays
    said = str(hung.value)
    assert "    rank 1 waits for a threading.Event; " in said
    assert "the rank is in wait_for_ever at " in said
    assert "    ranks 0, 2 wait in all_reduce at " in said
    assert said.endswith("the last output of rank 1:\n    reading shard 7")
    with pytest.raises(RuntimeError) as early:
        lp.run(called.leaves_too_early, nproc=2, backend="gloo")
    assert early.value.__notes__[0].startswith("launchpad: rank 1 exited with code 0 while others still waited for it")


@needs_torch
@pytest.mark.parametrize(("how", "kind"), [("raises", ValueError), ("exits", lp.RankError)])
def test_where_the_others_waited_is_in_the_exception(how: str, kind: type[Exception], tmp_path: Path) -> None:
    """Rank 1 fails when the others have lost their connection to it; of an exit without words its output is told."""
    with pytest.raises(kind) as failed:
        lp.run(called.leaves_the_others, how, str(tmp_path), nproc=3, backend="gloo")
    said = "\n".join([str(failed.value), *getattr(failed.value, "__notes__", ())])
    assert re.search(r"failed because of it: ranks? 0.* \(in all_reduce: RuntimeError: ", said)
    assert ("the last output of rank 1:\n    out of quota" in said) == (how == "exits")


def test_the_part_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    class Holder:
        def __init__(self) -> None:
            self.inner = {"lock": [lock]}

    with pytest.raises(lp.UnpicklableError, match=r"argument 2\.inner\['lock'\]\[0\] \(a lock\) can't be pickled"):
        lp.run(print, 1, Holder(), nproc=2, backend=None)
    with pytest.raises(TypeError, match=r"lock, which the function .* uses, \(a lock\) can't be pickled.*; create it"):
        lp.run(lambda: lock, backend=None)
    with pytest.raises(lp.UnpicklableError, match=r"what rank 0 returned\['x'\] \(a lock\) can't be pickled"):
        lp.run(lambda: {"x": threading.Lock()}, backend=None)


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for options, message in (
        ({"backend": "tcp"}, "backend='tcp'"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_restarts": -1}, "max_restarts=-1: give a number"),
        ({"max_restarts": (3, 0)}, "give a number, or "),
        ({"max_restarts": 1, "restart": "never"}, "restart='never': give 'judged' or 'always'"),
        ({"restart": "always"}, "only work with restarts; add max_restarts=N"),
        ({"progress": "*"}, "only work with restarts; add max_restarts=N"),
        ({"nproc": 2, "hosts": "a:3"}, "a is given 3 ranks, but --nproc asks for 2"),
        ({"env": {"RANK": "3"}}, "launchpad sets RANK"),
        ({"env": {"A": None}}, "A is None; leave it out"),
        ({"env": {1: "2"}}, "give a dict of names and values"),
        ({"nproc": 0}, "nproc=0: give a number of ranks"),
        ({"nproc": 2.0}, r"nproc=2\.0: give a number of ranks"),
        ({"nproc": "2"}, "nproc='2': give a number of ranks"),
        ({"timeout": "5"}, "timeout='5': give a positive number"),
        ({"wdir": 5}, "wdir=5: give the path of a folder"),
        ({"hosts": 5}, "hosts=5: give 'a:4,b:4'"),
        ({"max_restarts": "3"}, "max_restarts='3': give a number"),
        ({"max_restarts": (1,)}, "give a number, or "),
        ({"input_rank": "0"}, "input_rank='0': give a rank"),
    ):
        with pytest.raises(lp.UsageError, match=message):
            lp.run(by_reference, **options)
    with pytest.raises(lp.UsageError, match="3 is not callable"):
        lp.run(3)
    with pytest.raises(lp.UsageError, match=r"takes \(x\); it must take \(rank, size\), or nothing"):
        lp.run(lambda x: x, backend=None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no image is made with the variable
    if importlib.util.find_spec("torch") is not None:
        with pytest.raises(lp.FrontendError, match="nccl: "):
            lp.run(by_reference, nproc=2, backend="nccl", env={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(lp.UsageError, match=r"launchpad\.run was called in a rank"):
        lp.run(lambda: lp.run(by_reference), backend=None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(lp.UsageError, match="each rank would start ranks"):
        lp.run(by_reference)


@needs_torch
@needs_mpi
def test_ranks_that_a_rank_spawns(capfd: pytest.CaptureFixture[str]) -> None:
    """Their output is shown, and their failure is the job's."""
    meets = "parent = MPI.Comm.Get_parent(); parent.Barrier(); parent.Disconnect()"
    assert lp.run(spawns, f"print('spawned'); {meets}", backend="mpi", timeout=DEADLINE) == ("done",)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[1] spawned", "[2] spawned"]
    with pytest.raises(lp.RankError, match="spawned by rank 0, failed first: exit code 3") as error:
        lp.run(spawns, "import os; os._exit(3)", backend="mpi", timeout=DEADLINE)
    assert (error.value.rank in (1, 2), error.value.code) == (True, 3)


SCRIPT = """
import sys
import launchpad
import torch
from launchpad import collectives as dist


class Failure(Exception):
    pass


def scale(x, by):
    total = x.clone()
    dist.all_reduce(total)
    return {"x": x * by, "total": total, "view": x[:2].t(), "half": x.bfloat16(), "none": x[:0],
            "flag": torch.tensor(True), "parameter": torch.nn.Parameter(x[:1]), "array": x.numpy(), "by": by}


def fail(rank, size):
    if rank == 1:
        raise Failure("batch", 17)
    dist.barrier()


x = torch.arange(1 << 18, dtype=torch.float32).reshape(1 << 17, 2)
results = launchpad.run(scale, x, 3, nproc=2)
for result in results:
    assert torch.equal(result["x"], x * 3) and torch.equal(result["total"], x * 2)
    assert torch.equal(result["view"], x[:2].t()) and torch.equal(result["half"], x.bfloat16())
    assert result["none"].shape == (0, 2) and bool(result["flag"]) and result["flag"].shape == ()
    assert type(result["parameter"]) is torch.nn.Parameter and result["parameter"].requires_grad
    assert (result["array"] == x.numpy()).all() and result["by"] == 3
    result["x"] += 1  # the caller may change them
    result["array"] += 1
maps = open("/proc/self/maps").read()
assert maps.count("launchpad-result-") == 2, maps  # not copied
try:
    launchpad.run(fail, nproc=2)
except Failure as error:
    assert error.args == ("batch", 17) and 'raise Failure("batch", 17)' in str(error.__cause__)
    print("failed", file=sys.stderr)
print(sorted(launchpad.run(lambda rank, size: (rank, size, dist.get_backend()), nproc=2)))
"""


@needs_torch
def test_a_script_without_a_guard_and_large_tensors(launchpad: Launchpad) -> None:
    (launchpad.folder / "script.py").write_text(SCRIPT)
    done = python(launchpad, "script.py")
    assert (done.returncode, done.stdout) == (0, "[(0, 2, 'gloo'), (1, 2, 'gloo')]\n"), done.stderr
    assert done.stderr == "failed\n"


def python(launchpad: Launchpad, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=launchpad.environ,
        cwd=launchpad.folder,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        **options,
    )


def test_at_the_prompt_the_head_imports_no_torch(launchpad: Launchpad) -> None:
    lines = (
        "import sys, launchpad",
        "assert 'launchpad.api' not in sys.modules and 'click' not in sys.modules",
        "def f(x):",
        "    print('hello')",
        "    return x + 1",
        "",
        "launchpad.run(f, 1, nproc=2, backend=None)",
        "assert 'torch' not in sys.modules",
    )
    done = python(launchpad, "-i", "-q", input="\n".join(lines) + "\n")
    assert sorted(done.stdout.splitlines()) == ["Results((2, 2))", "[0] hello", "[1] hello"], done.stderr
    assert "Error" not in done.stderr


INTERRUPTED = """
import launchpad, threading

def wait():
    print("ready", flush=True)
    threading.Event().wait()

try:
    launchpad.run(wait, nproc=2, backend=None)
except KeyboardInterrupt:
    print("interrupted", launchpad.run(lambda: 1, nproc=2, backend=None), flush=True)
"""


@pytest.mark.skipif(not hasattr(linecache, "_getlines_from_code"), reason="lines that code has are new in Python 3.13")
def test_what_was_typed_at_the_prompt_is_sent_for_tracebacks() -> None:
    typed = "def typed(): return 1 // 0"
    code = compile(typed, "<python-input-7>", "exec")
    registry: Any = linecache
    registry._register_code(code, typed, "<stdin>")
    function = FunctionType(code.co_consts[0], {"__name__": "__main__"})
    assert packing._sources(function) == {"<python-input-7>": [typed + "\n"]}


def test_ctrl_c_stops_the_ranks_and_the_next_call_works(launchpad: Launchpad) -> None:
    argv = [sys.executable, "-c", INTERRUPTED]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=launchpad.environ, cwd=launchpad.folder, **pipes) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] ready\n", b"[1] ready\n"]
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, b"interrupted Results((1, 1))\n"), err
    assert b"sent SIGINT to ranks 0-1" in err
    assert b"Traceback" not in err


def test_a_module_that_calls_it_on_import_starts_no_cascade(launchpad: Launchpad) -> None:
    (launchpad.folder / "cascade.py").write_text(
        "import launchpad\ndef f(): return 1\nprint(launchpad.run(f, nproc=2, backend=None))\n"
    )
    done = python(launchpad, "-c", "import cascade")
    assert done.returncode == 1
    assert "UsageError: launchpad.run was called in a rank" in done.stderr


def test_a_module_that_is_not_importable_is_pickled_by_value(launchpad: Launchpad) -> None:
    (launchpad.folder / "test_it.py").write_text(
        "import launchpad as lp\nY = 3\ndef f(x): return x + Y\ndef test(): assert lp.run(f, 1, backend=None) == (4,)\n"
    )
    done = python(launchpad, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "test_it.py")
    assert done.returncode == 0, done.stdout


OWN_CLASSES = """
import launchpad
total = 0

class Meter:
    def add(self, n):
        global total
        total += n

class Odd(Exception):
    def add(self):
        global total
        total += 1

def returns():
    Meter.kind = "a rank's"
    return Meter()

def raises():
    raise Odd

meters = launchpad.run(returns, nproc=2, backend=None)
meters[0].add(5)
Meter().add(5)
try:
    launchpad.run(raises, nproc=1, backend=None)
except Odd as odd:
    odd.add()
print(total, type(meters[1]) is Meter, hasattr(Meter, "kind"))

def of_ranks():
    class Own:
        def three(self): return 3
    return Own()

print([one.three() for one in launchpad.run(of_ranks, nproc=2, backend=None)])
"""


def test_the_callers_own_classes_stay_as_they_are(launchpad: Launchpad) -> None:
    """A rank's copies of them come back with what it returns."""
    (launchpad.folder / "script.py").write_text(OWN_CLASSES)
    done = python(launchpad, "script.py")
    assert (done.returncode, done.stdout) == (0, "11 True False\n[3, 3]\n"), done.stderr


def test_a_module_of_an_editable_installation_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not on the path, and a finder of its own knows where it is."""
    (tmp_path / "of_mine.py").write_text("def f(): pass\n")
    spec = importlib.util.spec_from_file_location("of_mine", tmp_path / "of_mine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "of_mine", module)
    assert packing._unimportable(module.f) is module
    finder = SimpleNamespace(find_spec=lambda name, *_: spec if name == "of_mine" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert packing._unimportable(module.f) is None


def test_whatever_is_raised_while_it_waits_ends_the_job() -> None:
    """By a handler of a signal, for instance, or by what stands in for standard output."""

    class Out(io.StringIO):
        def write(self, _: str) -> int:
            raise RuntimeError("not this one")

    def prints() -> None:
        print("up", flush=True)
        threading.Event().wait()

    with contextlib.redirect_stdout(Out()), pytest.raises(RuntimeError, match="not this one"):
        lp.run(prints, nproc=2, backend=None)


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert lp.run(lambda: print("nobody sees this"), nproc=2, backend=None) == (None, None)


def test_in_a_daemon(tmp_path: Path) -> None:
    """Its standard descriptors are closed: no pipe of ours gets their numbers."""
    code = (
        "import os, launchpad\nfor fd in range(3): os.close(fd)\n"
        "def where(): return [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]\n"
        "found = launchpad.run(where, nproc=2, backend=None)\n"
        "left = [fd for fd in range(3) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "open('found', 'w').write(repr([list(found), left]))\n"
    )
    (tmp_path / "daemon.py").write_text(code)
    subprocess.run([sys.executable, "daemon.py"], cwd=tmp_path, check=True, timeout=DEADLINE)
    found, left = ast.literal_eval((tmp_path / "found").read_text())
    assert [one[0] for one in found] == ["/dev/null"] * 2
    assert all(name.startswith("pipe:") for one in found for name in one[1:])
    assert left == [0, 1, 2]


def test_what_a_call_that_could_not_be_packed_would_have_told_is_told_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = packing.CallPacker(str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.raises(lp.UnpicklableError):
        packer.pack(by_reference, [threading.Lock()])
    call = packer.pack(by_reference, [])
    try:
        about, _ = pickling.load(pickling.map_file(call, shared=False))
    finally:
        os.close(call)
    assert "more" in about["path"]


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
@needs_torch
def test_over_ssh(
    launchpad: Launchpad, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large arguments and results, a module of the synced folder, and an exception, on hosts without cloudpickle."""
    import numpy

    (launchpad.folder / "ours.py").write_text("FACTOR = 3\ndef scaled(x): return x * FACTOR\n")
    monkeypatch.chdir(launchpad.folder)
    monkeypatch.syspath_prepend(str(launchpad.folder))
    import ours

    there = {"hosts": ["n1:1", "n2:2"], "ssh_config": str(hosts.ssh_config), "sync": True}
    secret = "secret-" + os.urandom(8).hex()

    def train(x: object, word: str) -> tuple[object, int, bool, str]:
        from launchpad import collectives as dist

        print(f"on {os.getcwd().startswith(os.environ['XDG_CACHE_HOME'])}")
        shown = any(word in Path(f"/proc/{pid}/cmdline").read_text() for pid in (os.getpid(), os.getppid()))
        return ours.scaled(x), dist.get_rank(), shown, ours.__file__

    big = numpy.arange(3 << 20, dtype=numpy.float64)  # 24 MiB: more than may be in flight
    results = lp.run(train, big, secret, **there)
    assert results.places == (("n1", 0), ("n2", 0), ("n2", 1))
    for rank, (scaled, number, shown, file) in enumerate(results):
        assert (scaled == big * 3).all()
        assert (number, shown) == (rank, False)
        assert file.startswith(str(hosts.cache))
    assert sorted(capsys.readouterr().out.splitlines()) == ["[n1 0] on True", "[n2 1] on True", "[n2 2] on True"]
    with pytest.raises(UnicodeDecodeError) as error:
        lp.run(raises, backend=None, **there)
    assert str(error.value.__cause__).startswith("\nrank 1 on n2:\nTraceback")
    assert lp.run(fails_until, 1, backend=None, max_restarts=3, **there) == ("1" * 8,) * 3
    with pytest.raises(lp.NodeError, match="n9  unresolvable"):
        lp.run(by_reference, hosts="n1,n9", ssh_config=str(hosts.ssh_config))
