"""The reports on a job besides its console and its record: a new one is its file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets.outlet import Outlet, Says

if TYPE_CHECKING:
    from launchpad.console.console import Console
    from launchpad.output.mark import Resumed

# CI systems set one of these.
_CI_VARIABLES = ("GITHUB_ACTIONS", "GITLAB_CI", "TEAMCITY_VERSION", "BUILDKITE")


def outlets_of(
    reports: ReportOptions,
    says: Says,
    post: Callable[[Any], None],
    environ: Mapping[str, str],
    console: Console | None = None,
    resumed: Resumed | None = None,
) -> list[Outlet]:
    """Those of this job, in the order of their turns. Raises UsageError for files that can't be written.

    `post` takes the head's own events. CI systems read what the `console` shows, if there is one. `resumed`: where to
    go on with files that grow.
    """
    found: list[Outlet] = []
    if reports.events is not None:
        from launchpad.runner.outlets.events import EventsOutlet

        found.append(EventsOutlet(reports, post, resumed))
    if console is not None and any(name in environ for name in _CI_VARIABLES):
        from launchpad.runner.outlets.ci import CiOutlet

        found.append(CiOutlet(reports, console, environ))
    if reports.junit is not None:
        from launchpad.runner.outlets.junit import JunitOutlet

        found.append(JunitOutlet(reports, says))
    if reports.report is not None:
        from launchpad.runner.outlets.report import ReportOutlet

        found.append(ReportOutlet(reports.report, says))
    if reports.notify is not None:
        from launchpad.runner.outlets.notify import NotifyOutlet

        found.append(NotifyOutlet(reports.notify, says))
    return found
