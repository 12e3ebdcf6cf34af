"""`--events`: all events as JSON lines, and the verdict as the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launchpad.output.mark import Resumed
from launchpad.record.event_lines import EventLines
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets.outlet import Ended, Outlet, adds


class EventsOutlet(Outlet):
    """The outlet."""

    name = "--events"

    def __init__(self, reports: ReportOptions, post: Callable[[Any], None], resumed: Resumed | None) -> None:
        """`post` takes the head's own events. `resumed`: where to go on."""
        assert reports.events is not None
        add = adds(reports.events, reports.add_to_reports)
        self.sink: EventLines = EventLines(reports.events, post, adds=add, resumed=resumed)

    def conclude(self, ended: Ended) -> None:
        """Write the verdict on a failed job."""
        if ended.verdict is not None:
            diagnosis = ended.diagnosis
            self.sink.verdict(diagnosis.history, ended.verdict, ended.report, diagnosis.earlier)
