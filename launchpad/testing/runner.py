"""Runs marked tests for pytest: asks the forkserver, and logs the one report that is made of the ranks'."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks

from launchpad.testing import forkserver, merge, messages, phase, soundness
from launchpad.testing.outcome import TestEnd

# A shared fixture that does not heed Ctrl-C is killed by this one.
_MOST_INTERRUPTS = 3


class TestRunner:
    """pytest's side of the forkserver."""

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        """Fork the forkserver. `items`: the marked ones."""
        self._session = session
        self._numbers = {item: number for number, item in enumerate(items)}
        self._items = items
        self._pid = 0
        self._link: Any = None
        for item in items:
            if "tmp_path_factory" in getattr(item, "fixturenames", ()):
                session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # the same one for all
                break
        self._problem = soundness.why_not("pytest's own process")
        if not self._problem:
            try:
                self._pid, self._link = forkserver.fork(session, items)
            except OSError as error:
                self._problem = f"the process that ranks are forked from can't be created: {error.strerror}"
        from launchpad.rank import mpi_init

        if mpi_init.release():
            session.config.add_cleanup(mpi_init.finalize)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None, limit: float | None) -> bool | None:
        """Run a test on its ranks. Returns None if pytest is to do it: it will skip it, or not run it at all."""
        if item not in self._numbers or _is_left_to_pytest(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._run(item, nextitem, limit)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None, limit: float | None) -> None:
        test = merge.Test(_template(item), _expected(item))
        number = self._numbers[item]
        end = TestEnd(error=self._problem) if self._problem else self._ask(("run", number, limit))
        self._stop_if_asked([end.stop])
        last: list[pytest.TestReport] = []
        if end.error:
            first = [test.failed("setup", end.error)]
        elif end.before is not None:
            first = [self._read(end.before)]
        else:
            first, last = merge.merged(test, end, self._read)
        last = last or [test.report("teardown", "passed")]
        for report in first:
            self._log(item, report)
        _warn(end)
        self._stop_if_asked([one.stop for one in end.ranks])
        if self._session.shouldfail or self._session.shouldstop:
            nextitem = None
        after = TestEnd()
        if not self._problem:
            outcomes = {str(report.when): report.passed for report in first}
            after = self._ask(("teardown", number, self._following(item, nextitem), outcomes))
            _warn(after)
        # Of tests without the mark, too, something may still be set up: pytest has each test tear down what is over.
        for torn in (after, phase.tear_down(item, nextitem)):
            last = self._with(last, torn, test)
        # For junitxml: it writes what was captured when a test has been torn down, and takes it from there.
        last[0].sections[:0] = [one for one in first[-1].sections if one not in last[0].sections]
        for report in last:
            self._log(item, report)
        self._stop_if_asked([after.stop])

    def _with(self, last: list[pytest.TestReport], torn: TestEnd, test: merge.Test) -> list[pytest.TestReport]:
        """The reports on teardown, with what was torn down outside of the ranks."""
        if torn.error or torn.before is not None:
            report = test.failed("teardown", torn.error) if torn.error else self._read(torn.before or {})
            return [report] if last[0].passed else [*last, report]
        last[-1].sections += torn.sections
        return last

    def _following(self, item: pytest.Item, nextitem: pytest.Item | None) -> int | None:
        """The number of the next test that will come to the forkserver: shared fixtures stay set up for it."""
        if nextitem is None:
            return None
        first = self._numbers.get(nextitem, self._numbers[item] + 1)
        return next((at for at in range(first, len(self._items)) if not _is_left_to_pytest(self._items[at])), None)

    def _stop_if_asked(self, stops: Sequence[tuple[str, int | None] | None]) -> None:
        for stop in stops:
            if stop is not None:
                pytest.exit(*stop)

    def _log(self, item: pytest.Item, report: pytest.TestReport) -> None:
        if report.failed and type(report) is not pytest.TestReport:
            subtests: Any = sys.modules["_pytest.subtests"]
            self._session.config.stash[subtests.failed_subtests_key][item.id] += 1
        item.ihook.pytest_runtest_logreport(report=report)

    def _read(self, data: dict[str, Any]) -> pytest.TestReport:
        config = self._session.config
        report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
        return report

    def _ask(self, request: Any) -> TestEnd:
        """Send a request and wait for its answer. Raises KeyboardInterrupt once a Ctrl-C has ended the ranks."""
        try:
            messages.send(self._link, *request)
        except OSError:
            return self._lost()
        interrupts = 0
        while True:
            try:
                answer = messages.receive(self._link)
                break
            except KeyboardInterrupt:
                interrupts += 1
                os.kill(self._pid, signal.SIGINT if interrupts < _MOST_INTERRUPTS else signal.SIGKILL)
        if answer is None:
            lost = self._lost()
            if interrupts:
                raise KeyboardInterrupt
            return lost
        (end,) = answer
        if end.interrupted or (interrupts and not end.ranks):
            raise KeyboardInterrupt
        return end  # type: ignore[no-any-return]

    def _lost(self) -> TestEnd:
        """The forkserver has died: nothing can be forked any more."""
        if not self._problem:
            _, status = os.waitpid(self._pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self._pid = 0
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._problem = f"the process that ranks are forked from has died ({how})"
        return TestEnd(error=self._problem)

    def close(self) -> None:
        """End the forkserver and everything below it."""
        if self._link is not None:
            self._link.close()
        if self._pid:
            os.waitpid(self._pid, 0)


def _warn(end: TestEnd) -> None:
    """Issue what the shared fixtures and the ranks warned of, each once, past the filters: those have judged it."""
    for seen in dict.fromkeys([*end.warnings, *(seen for one in end.ranks for seen in one.warnings)]):
        warnings.showwarning(UserWarning(seen.text), seen.category, seen.file, seen.line)


def _is_left_to_pytest(item: pytest.Item) -> bool:
    """Whether a mark says that the test is not to be run, or makes no sense: pytest says so itself."""
    try:
        expected = evaluate_xfail_marks(item)
        return evaluate_skip_marks(item) is not None or bool(expected and not expected.run)
    except Exception:
        return True


def _expected(item: pytest.Item) -> str | None:
    """Why the test may end in any way, even with a crash; None if it may not."""
    found = evaluate_xfail_marks(item)
    return found.reason if found and not item.config.option.runxfail and not found.raises else None


def _template(item: pytest.Item) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, "passed", None, "setup")  # type: ignore[arg-type]
