"""A job from its first event to the end of its record: `begin`, `run`, `conclude`, `over`, `close`.

The command, launchers that have joined, `launchpad.run` and `launchpad.ranks` all run their jobs by this, so what works
for one works for all. They differ in where the ranks' output goes, and in who is told the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launchpad.head.arrivals import Door, Reopen
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.head.sink import Sink
from launchpad.head.supervisor import Supervisor
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan, Stdin
from launchpad.job.spec import JobSpec
from launchpad.protocol.events import JobOver
from launchpad.runner.observers import Observers, waited
from launchpad.runner.outlets.outlet import Ended, Outlet

if TYPE_CHECKING:
    from launchpad.diagnosis.verdict import Verdict
    from launchpad.output.mark import Resumed
    from launchpad.record.keeper import CheckpointKeeper
    from launchpad.record.log_dir import Files
    from launchpad.runner.takeover import Before, Settings


class Conductor:
    """One planned job. The methods are called in their order."""

    def __init__(
        self,
        bringup: BringUp,
        planner: Planner,
        say: Callable[[str], None],
        *,
        quiet: bool = False,
        verbose: bool = False,
        outlets: Sequence[Outlet] = (),
        settings: Settings | None = None,
        before: Before | None = None,
    ) -> None:
        """`say` shows answers and, unless `quiet`, notes; if `verbose`, more. `settings`: for a head that takes over.

        `before`: the head that we take over from.

        Raises UsageError for faults that nobody would notice, and for a folder of log files that can't be written.
        """
        spec, plan = planner.spec, planner.plan
        if spec.faults is not None:
            from launchpad.job.faults import check_noticed

            watched = bringup.nodes.remote if bringup.nodes.silence else []
            check_noticed(spec.faults, [plan.nodes[node].name for node in watched])
        self.job = bringup.job
        self.cause: Cause | None = None
        self.leaving = False  # there is output that nobody takes
        self._bringup = bringup
        self._planner = planner
        self._outlets = outlets
        self._say = say
        self._sinks: list[Sink] = []
        self._guests: Sequence[Sink] = ()
        self._code = 1
        self._settings = settings
        self._before = before
        self._keeper: CheckpointKeeper | None = None
        resumed = before.resumed if before else None
        files = _files(bringup, spec, plan, self.job, resumed)
        self._files = [files] if files else []
        self.observers = Observers(
            *(self.job, spec, plan, bringup.post, say),
            quiet=quiet,
            verbose=verbose,
            files=files,
            earlier=planner.before.earlier if planner.before else (),
            resumed=resumed,
            since=bringup.since,
        )
        self.diagnosis = self.observers.diagnosis
        self.note = self.observers.note

    def begin(self, shows: Sequence[Sink], *, guests: Sequence[Sink] = ()) -> None:
        """Announce the job to all that follow it: to what `shows` its output, and to `guests`, which others close.

        Raises UsageError if an outlet can't report.
        """
        for outlet in self._outlets:
            outlet.begin(self.observers.journal.folder)
        if self._planner.spec.limits.keep_running and self.observers.journal.folder:
            self._keeper = self._make_keeper(self.observers.journal.folder)
        self._guests = guests
        followers = [outlet.sink for outlet in self._outlets if outlet.sink is not None]
        event = self._before.event if self._before else None
        self._sinks = self.observers.begin([*self._files, *shows, *guests, *followers], event)

    def _make_keeper(self, folder: str) -> CheckpointKeeper:
        from launchpad.record.keeper import CheckpointKeeper

        return CheckpointKeeper(folder, self._settings, self._before.checkpoint if self._before else None)

    def run(
        self,
        *,
        stdin: Stdin,
        reopen: Reopen | None = None,
        door: Door | None = None,
        advises: bool = False,
    ) -> None:
        """Run the ranks to their end. The parameters are the supervisor's."""
        spec = self._planner.spec
        try:
            supervisor = Supervisor(
                self._bringup,
                self._planner,
                self._sinks,
                stdin=stdin,
                reopen=reopen,
                door=door,
                advises=advises,
                waited=waited,
                judge=self.observers.restart_judge(spec),
                keeper=self._keeper,
                before=self._before.head if self._before else None,
            )
            self._code, self.cause = supervisor.run()
            self.leaving = supervisor.leaving
        finally:
            self.observers.end()

    def conclude(self, door: Door | None = None) -> Ended:
        """The verdict, for the record, the outlets and the caller. The outlets don't report a job that goes on."""
        verdict: Verdict | None = None
        report: list[str] = []
        lines: list[str] = []
        folder = self.observers.folder
        if self.cause is not None:
            verdict, report = self.observers.conclude()
            self._code = _exit_code(self.cause, verdict)
            lines = [*report, *([f"logs: {folder}"] if folder else [])]
            if self.observers.journal.folder:
                lines.append(f"more: launchpad why {self.job}")
        ended = Ended(self._code, self.diagnosis, verdict, report, lines, folder)
        if door is not None and door.goes_on(self._code):
            self._outlets = ()
        for outlet in self._outlets:
            self._report(outlet, outlet.conclude, ended)
        return ended

    def over(self) -> None:
        """Tell all who follow the job that it is over."""
        over = JobOver(time.monotonic_ns(), self._code)
        for sink in self._sinks:
            sink.on(over)

    def close(self, ended: Ended | None = None) -> None:
        """Have the outlets finish, if it is known how the job `ended`, and close the record."""
        if ended is not None:
            self._finish(ended)
        for sink in reversed(self._sinks):  # the record comes first among them: until it is closed, others wait for it
            if sink not in self._guests:
                sink.close()
        if self._keeper is not None:
            self._keeper.close()

    def leave(self, ended: Ended) -> None:
        """The same as `over` and `close`, without waiting for anybody who takes no output."""
        self.observers.journal.on(JobOver(time.monotonic_ns(), self._code))
        self.observers.journal.finish()
        if self._keeper is not None:
            self._keeper.close()
        self._finish(ended)

    def _finish(self, ended: Ended) -> None:
        for outlet in self._outlets:
            if outlet.reads_record:
                self.observers.journal.finish()
            self._report(outlet, outlet.finish, ended)

    def _report(self, outlet: Outlet, step: Callable[[Ended], None], ended: Ended) -> None:
        """Have an outlet report. Whatever goes wrong there, the job ended as it did."""
        try:
            step(ended)
        except Exception as error:
            import traceback  # late: nothing else here needs it

            what = traceback.format_exception_only(error)[-1].strip()
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{os.path.basename(place.filename)}:{place.lineno}"
            self._say(f"{outlet.name} failed because of a bug in launchpad: {what} ({at})")


def _files(bringup: BringUp, spec: JobSpec, plan: Plan, job: str, resumed: Resumed | None) -> Files | None:
    """The log files, if any are asked for."""
    if spec.log_dir is None and not spec.redirects and not spec.tee and not any(spec.filters.values()):
        return None
    from launchpad.record.log_dir import Files, temporary_folder

    log_dir = spec.log_dir or temporary_folder()
    attempt = resumed.states["journal"].attempt if resumed else 0
    return Files(spec, plan, log_dir, bringup.post, job, attempt, bringup.nodes.keep_alive, resumed)


def _exit_code(cause: Cause, verdict: Verdict) -> int:
    """The blamed rank's exit code. Its failure need not be the first one reported."""
    return verdict.exit_code if cause.kind in ("failure", "lost") and verdict.cause is not None else cause.exit_code
