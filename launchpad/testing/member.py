"""What runs in a rank of a test: takes on its place in the world, runs the whole item, reports, and exits."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import pytest

from launchpad.agent.host import processes
from launchpad.rank import import_watch, mpi_init, own_process, stack_server, store
from launchpad.testing import messages, shared, warned
from launchpad.testing.capturing import Captured

# Answers of the team to a rank that wants the terminal.
GO, NO = b"g", b"n"

# Threads and children may take this long to end after the test.
_LEFT_SECONDS = 1.0

# Hooks by which pytest's plugins tell the user what happens. Only pytest's own process does that.
_TELLING = (
    *("pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish", "pytest_warning_recorded"),
)

_line: socket.socket | None = None  # to the team


class Place(NamedTuple):
    """What makes a fork a certain rank."""

    rank: int
    environ: Mapping[str, str]
    removed: frozenset[str]  # variables that it must not have
    store: list[Any]  # for rank/store.py; empty if there is no store
    stacks: str  # the socket over which it reports its stacks
    seed: int  # for Hypothesis
    threads: int  # with which torch computes


def is_rank() -> bool:
    """Whether this process is a rank of a test."""
    return _line is not None


def limit(seconds: float | None) -> None:
    """Tell the team that the call may take this long from now on; None: that it is over."""
    _tell("limit", seconds)


def _tell(*words: Any) -> None:
    if _line is not None:
        try:
            messages.send(_line, *words)
        except OSError:  # the team is gone, and we will be
            pass


def run(item: pytest.Item, place: Place, line: socket.socket, captured: Captured, parent: int) -> NoReturn:
    """Be this rank, in a fork that has just begun. Never returns."""
    global _line
    code = 1
    try:
        _line = line
        _become(item, place, captured, parent)
        reporter = _Reporter(item.config)
        _run(item, reporter)
        _tell("left", _threads_left() + _children_left())
        code = 1 if reporter.failed else 0
        save_coverage()
        _tell("done")
        _finish(code)
    except BaseException:
        _tell("broken", traceback.format_exc())
    finally:
        os._exit(code)


def _become(item: pytest.Item, place: Place, captured: Captured, parent: int) -> None:
    os.setsid()
    own_process.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in place.removed:
        os.environ.pop(name, None)
    os.environ.update(place.environ)
    captured.take_over(item.config)
    if faulthandler.is_enabled():
        faulthandler.enable(captured.crash)  # the stacks of a crash are told with the test
    store.hold(place.store)
    stack_server.prepare(place.stacks, eager=False)
    import_watch.watch()
    _start_afresh()
    if "torch" in sys.modules:
        # OpenMP's threads, if there are any, have not come along: with one thread it needs none.
        torch = sys.modules["torch"]
        torch.set_num_threads(place.threads)
        # Ranks draw different numbers, as processes of their own would. A seed that the test module has set stays, on
        # all ranks: it is small, and those that torch chooses have 53 bits.
        if torch.initial_seed() >= 1 << 32:
            torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _seed_hypothesis(place.seed)
    shared.forget(item)
    mpi_init.release()


def _start_afresh() -> None:
    """Forget the children and exit functions of the process that we were forked from, as multiprocessing does."""
    atexit._clear()
    process: Any = sys.modules.get("multiprocessing.process")
    util: Any = sys.modules.get("multiprocessing.util")
    if process is not None:
        process._children.clear()
        process.current_process().authkey = os.urandom(32)
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)


def _seed_hypothesis(seed: int) -> None:
    core: Any = sys.modules.get("hypothesis.core")
    if core is not None and core.global_force_seed is None:
        core.global_force_seed = seed


def _run(item: pytest.Item, reporter: _Reporter) -> None:
    manager = item.config.pluginmanager
    for name in _TELLING:
        caller = getattr(manager.hook, name)
        for one in caller.get_hookimpls():
            caller._remove_plugin(one.plugin)
    reporter.debugger = manager.unregister(name="pdbinvoke") if manager.hasplugin("pdbinvoke") else None
    manager.register(reporter, "launchpad-rank")
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    except pytest.exit.Exception as stop:
        _tell("stop", str(stop.msg), stop.returncode)
    except KeyboardInterrupt:
        _tell("interrupted")


class _Reporter:
    """A plugin that tells the team what pytest would tell the user."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.failed = False
        self.debugger: Any = None  # pytest's plugin for --pdb

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        report.user_properties = [(name, _portable(value)) for name, value in report.user_properties]
        _tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: Any, when: str) -> None:
        if when != "runtest":  # pytest tells a new plugin of earlier ones, too
            return
        _tell("warning", warned.seen(warning_message))

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """--pdb: the first rank that fails has the terminal."""
        if self.debugger is not None and _ask("first"):
            self._say_who()
            self.debugger.pytest_exception_interact(node, call, report)
            _tell("leave")

    def pytest_enter_pdb(self) -> None:
        """breakpoint(): one rank after the other has the terminal."""
        _ask("enter")
        self._say_who()

    def _say_who(self) -> None:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        self._config.get_terminal_writer().sep(">", f"rank {rank} of {size} has the terminal")

    def pytest_leave_pdb(self) -> None:
        _tell("leave")


def _portable(value: object) -> object:
    """A property's value, as text unless pytest's own process can unpickle it for certain."""
    return value if isinstance(value, str | int | float | None) else str(value)


def _ask(what: str) -> bool:
    assert _line is not None
    _tell(what)
    try:
        return _line.recv(1) == GO
    except OSError:
        return False


def _threads_left() -> list[str]:
    """Threads that keep an interpreter from exiting, in words."""
    deadline = time.monotonic() + _LEFT_SECONDS
    left = []
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon:
            continue
        if getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {}).get(thread) is not None:
            continue  # of an executor, which the interpreter ends by itself
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(f"the thread {thread.name!r}")
    return left


def _children_left() -> list[str]:
    """End the rank's children, and return those that it should have ended itself, in words."""
    process: Any = sys.modules.get("multiprocessing.process")
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._run_finalizers(0)  # first, as an interpreter does: an open pool would replace workers that end
    for child in process.active_children() if process is not None else ():
        if child.daemon:  # as it would be at an interpreter's exit
            child.terminate()
            child.join(_LEFT_SECONDS)
    deadline = time.monotonic() + _LEFT_SECONDS
    while (left := _live_children()) and time.monotonic() < deadline:
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [f"the process {pid} ({name})" for pid, name in left.items()]


def _live_children() -> dict[int, str]:
    found = {pid: processes.name_of(pid) for pid in processes.children() if not processes.is_zombie(pid)}
    return {pid: name for pid, name in found.items() if not processes.is_helper(name)}


def _finish(code: int) -> None:
    """Run what the rank has registered for its exit, and flush its files."""
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == 0:  # a rank that has failed would wait in MPI_Finalize for others, while they wait for it elsewhere
        mpi_init.finalize()


def save_coverage() -> None:
    """If coverage is measured here, save what this process has seen in a file of its own."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage and coverage.Coverage.current()
    if current:
        current.stop()
        current.save()
