"""Shows the job in the ways of the CI system that it runs in: annotations, sections, GitHub's summary page."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launchpad.console.console import Console
from launchpad.record import ci
from launchpad.record.annotations import annotation
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets.outlet import Ended, Outlet


class CiOutlet(Outlet):
    """The outlet."""

    name = "the report for the CI system"

    def __init__(self, reports: ReportOptions, console: Console, environ: Mapping[str, str]) -> None:
        """`environ`: the variables by which the system is known."""
        self._reports = reports
        self._console = console
        self._environ = environ
        self._token = os.urandom(16).hex()  # ranks can't know it

    def begin(self, folder: str) -> None:  # noqa: ARG002
        """Have GitHub take no commands from the ranks' output."""
        if ci.system_of(self._environ) == "github":
            self._console.print(f"::stop-commands::{self._token}")

    def conclude(self, ended: Ended) -> None:
        """Show what is to stand in the log before the verdict; write the page."""
        system, history = ci.system_of(self._environ), ended.diagnosis.history
        verdict = ended.verdict or ended.diagnosis.verdict()
        self._console.flush()
        if system == "github":
            self._console.print(f"::{self._token}::")
        if system == "github" and ended.lines:
            self._console.print(annotation(history, verdict, ended.lines, self._environ))
        if ended.lines and not self._reports.quiet and (sections := ci.sections(system, history, verdict)):
            self._console.print("\n".join(sections))
        path = self._environ.get("GITHUB_STEP_SUMMARY")
        if system == "github" and path:
            page = ci.page(history, verdict, ended.lines, ended.code, self._reports.job or "")
            if problem := ci.write_page(path, page):
                self._console.say(problem, bad=True)
