"""`--junit`: a test report in which each rank is a test case."""

from __future__ import annotations

from launchpad.record import junit
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets.outlet import Ended, Outlet, Says, adds


class JunitOutlet(Outlet):
    """The outlet."""

    name = "--junit"

    def __init__(self, reports: ReportOptions, says: Says) -> None:
        """Raises UsageError if the file can't be written."""
        assert reports.junit is not None
        self._path = reports.junit
        self._adds = adds(reports.junit, reports.add_to_reports)
        self._job = reports.job or ""
        self._says = says
        junit.check(self._path, adds=self._adds)

    def conclude(self, ended: Ended) -> None:
        """Write the file."""
        verdict = ended.verdict or ended.diagnosis.verdict()
        suite = junit.suite(ended.diagnosis.history, verdict, ended.lines, self._job)
        if problem := junit.write(self._path, suite, adds=self._adds):
            self._says.say(problem, bad=True)
