"""`--report`: a page about the job, made from its record."""

from __future__ import annotations

from launchpad.errors import UsageError
from launchpad.report import page
from launchpad.runner.outlets.outlet import Ended, Outlet, Says


class ReportOutlet(Outlet):
    """The outlet."""

    name = "--report"
    reads_record = True

    def __init__(self, path: str, says: Says) -> None:
        """Raises UsageError if the file can't be written."""
        self._path = path
        self._says = says
        self._folder = ""
        page.check(path)

    def begin(self, folder: str) -> None:
        """Raises UsageError if there is no record."""
        self._folder = folder
        if not folder:
            raise UsageError(
                f"--report {self._path}: this job's record can't be kept, and the report is written from it"
            )

    def finish(self, ended: Ended) -> None:  # noqa: ARG002
        """Write the page."""
        if problem := page.write(self._path, self._folder):
            self._says.say(f"--report {problem}", bad=True)
