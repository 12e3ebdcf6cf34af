"""The process that the ranks of tests are forked from. It is forked from pytest when all tests have been collected.

So nothing that pytest's own tests do can reach a rank: their threads, their CUDA context, what they patch. It stands to
marked tests as a worker of pytest-xdist does: it sets up the fixtures that their ranks share, and tears them down.

pytest asks ("run", number of the test, seconds or None), ("teardown", number, number of the next or None, which phases
have passed), or closes the link, which ends this process and everything below it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from _pytest.skipping import evaluate_xfail_marks, xfailed_key
from _pytest.tmpdir import tmppath_result_key

from launchpad import linux
from launchpad.agent.host import processes
from launchpad.agent.ranks import rundir
from launchpad.forkserver.forking import frozen
from launchpad.rank import stack_server, store
from launchpad.testing import collected, member, messages, phase, shared, soundness, warned, worlds
from launchpad.testing.capturing import Captured
from launchpad.testing.outcome import TestEnd
from launchpad.testing.team import Team
from launchpad.testing.warned import WarningSeen

_PDEATHSIG = 1

_ONE_SIZE = (
    "its mark has to give a single number of ranks: only the mark of a function, class or module can make several tests"
    " of one, and not of a unittest.TestCase's"
)


def fork(session: pytest.Session, items: Sequence[pytest.Item]) -> tuple[int, socket.socket]:
    """Fork this process; returns the fork's pid and the link to it. Raises OSError."""
    ours, theirs = socket.socketpair()
    if session.config.pluginmanager.hasplugin("terminalreporter"):
        session.config.get_terminal_writer().flush()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that soundness.py has judged
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = 1
    try:
        ours.close()
        TestForkserver(session, items, theirs, parent).serve()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


class TestForkserver:
    """The loop of that process."""

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item], link: socket.socket, parent: int) -> None:
        self._session = session
        self._items = items
        self._link = link
        self._parent = parent
        self._prepared: set[str] = set()
        self._frozen = False
        self._warnings: list[WarningSeen] = []  # of shared fixtures, since the last answer
        os.setsid()  # a Ctrl-C is pytest's, which says so
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # those of pytest are for pytest
        processes.become_subreaper()
        collected.in_forked_process(session.config)
        warned.in_forked_process()
        self._captured = Captured()
        self._captured.take_over(session.config)
        self._folder = rundir.create()

    def serve(self) -> None:
        """Answer pytest until it closes the link."""
        try:
            while (request := messages.receive(self._link)) is not None:
                try:
                    answer = self._answer(request)
                except KeyboardInterrupt:
                    answer = TestEnd(interrupted=True)
                except pytest.exit.Exception as stop:
                    answer = TestEnd(stop=(str(stop.msg), stop.returncode))
                answer.warnings, self._warnings = self._warnings, []
                messages.send(self._link, answer)
            self._finish()
        except (KeyboardInterrupt, OSError):  # pytest is gone
            pass
        finally:
            processes.sweep(processes.reap)
            rundir.remove(self._folder)
            member.save_coverage()

    def _answer(self, request: Any) -> TestEnd:
        match request:
            case "run", int(number), limit:
                return self._run(self._items[number], limit)
            case "teardown", int(number), following, passed:
                after = None if following is None else self._items[following]
                return self._tear_down(self._items[number], after, passed)
        raise ValueError(request)

    def _run(self, item: pytest.Item, limit: float | None) -> TestEnd:
        try:
            mark = collected.mark_of(item)
        except pytest.fail.Exception as fault:  # a mark that pytest did not see when it parametrized the test
            return TestEnd(error=str(fault))
        assert mark is not None
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        size = mark.sizes[0] if len(mark.sizes) == 1 else parameters.get(collected.SIZE)
        if size is None:
            return TestEnd(error=_ONE_SIZE)
        limits = [one for one in (mark.timeout, limit) if one]
        if hasattr(item, "_request") and not item._request:  # it runs once more
            item._initrequest()  # type: ignore[attr-defined]
        with self._users_code(item):
            report = phase.run(item, "setup", lambda: _set_up(item))
        if report is not None:
            return TestEnd(before=report)
        if problem := self._prepare(item) or soundness.why_not("the process that ranks are forked from"):
            return TestEnd(error=problem)
        if mark.mpi and (problem := worlds.why_not()):
            return TestEnd(error=f"@pytest.mark.parallel: {problem}")
        backend = item.config.getoption("ranks_backend") or ""
        team = Team(item, size, min(limits, default=None), self._folder, self._link, backend, mark.mpi)
        return team.run()

    def _prepare(self, item: pytest.Item) -> str:
        """Import what ranks with a process group need, once. Returns why that failed."""
        names = [name for name in ("torch", "torch.distributed") if "torch" in sys.modules or _has_group(item)]
        if names and _has_group(item):
            names.append("launchpad.collectives.start")
        new = [name for name in names if name not in self._prepared]
        if not new and self._frozen:
            return ""
        self._frozen = True
        gc.collect()  # what pytest has dropped
        with frozen():
            for name in new:
                try:
                    importlib.import_module(name)
                except Exception as error:
                    return f"can't import {name}, which a process group needs: {type(error).__name__}: {error}"
            self._prepared.update(new)
            if new:
                store.install()
                stack_server.install()
        return ""

    def _tear_down(self, item: pytest.Item, following: pytest.Item | None, passed: dict[str, bool]) -> TestEnd:
        item.stash[tmppath_result_key] = passed
        try:
            with self._users_code(item):
                return phase.tear_down(item, following)
        finally:
            item._request = False  # type: ignore[attr-defined]
            item.funcargs = None  # type: ignore[attr-defined]

    def _finish(self) -> None:
        """Tear down the shared fixtures that no test has asked to: one that needs them could still have come."""
        if os.getppid() == self._parent:
            linux.prctl(_PDEATHSIG, signal.SIGKILL)
            state: Any = self._session._setupstate
            try:
                state.teardown_exact(None)
            except Exception:
                traceback.print_exc()

    @contextlib.contextmanager
    def _users_code(self, item: pytest.Item) -> Iterator[None]:
        """While it runs, nobody looks at the link. Keeps its warnings. Raises BrokenPipeError if pytest is gone."""
        linux.prctl(_PDEATHSIG, signal.SIGKILL)
        try:
            with warned.caught(item, self._warnings):
                yield
        finally:
            linux.prctl(_PDEATHSIG, 0)
        if os.getppid() != self._parent:
            raise BrokenPipeError


def _set_up(item: pytest.Item) -> None:
    """Set up the shared fixtures. pytest looks for xfail marks in its own set-up, which comes later, in the ranks."""
    item.stash[xfailed_key] = evaluate_xfail_marks(item)
    shared.set_up(item)


def _has_group(item: pytest.Item) -> bool:
    return shared.uses(item, "process_group")
