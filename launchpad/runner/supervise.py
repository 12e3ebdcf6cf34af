"""Runs a planned job to its exit code: makes the sinks, supervises the ranks, reports the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launchpad.console.console import (
    Console,
    ConsoleOutput,
    StandardStreams,
    restore_terminal,
    terminal_modes,
    terminal_size,
)
from launchpad.console.notes import STANDING_STILL
from launchpad.console.prefix import template_of
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.errors import UsageError
from launchpad.head.arrivals import Door, Reopen
from launchpad.head.bringup import BringUp
from launchpad.head.cluster import Cluster
from launchpad.head.sink import Sink
from launchpad.head.supervisor import Supervisor
from launchpad.job.outcome import STOPPING, Cause
from launchpad.job.spec import JobSpec, StreamMap
from launchpad.protocol.events import STDOUT, JobOver
from launchpad.record import job_store
from launchpad.runner.observers import Observers, waited
from launchpad.runner.options import ReportOptions
from launchpad.runner.stale_store import StaleStores
from launchpad.runner.suggestion import suggestion

if TYPE_CHECKING:
    from launchpad.diagnosis.verdict import Verdict
    from launchpad.record.console_record import ConsoleRecord
    from launchpad.record.event_lines import EventLines
    from launchpad.record.log_dir import Files
    from launchpad.runner.departure import Departure

Taker = Callable[[Callable[[Any], None]], Sink]  # called with a function that posts the head's own events
Tell = Callable[[list[str], int], None]  # tells nodes that have joined why the job ended, and its exit code

# CI systems set one of these.
_CI_VARIABLES = ("GITHUB_ACTIONS", "GITLAB_CI", "TEAMCITY_VERSION", "BUILDKITE")

# How much of the verdict the launchpads of nodes that have joined show.
TOLD_LINES = 12


def supervise(
    bringup: BringUp,
    spec: JobSpec,
    cluster: Cluster,
    tell: Tell,
    reopen: Reopen | None,
    reports: ReportOptions,
    taker: Taker | None,
    door: Door | None = None,
    departure: Departure | None = None,
) -> int:
    """Run the job on these nodes and return its exit code. Raises UsageError for files that can't be written.

    `reopen` makes a new link to a lost node; `taker` makes a sink that gets the ranks' standard output instead of the
    console. `departure`: leave the terminal before the ranks start.
    """
    plan = cluster.plan
    if spec.faults is not None:
        from launchpad.job.faults import check_noticed

        watched = bringup.nodes.remote if bringup.nodes.silence else []
        check_noticed(spec.faults, [plan.nodes[node].name for node in watched])
    job = os.urandom(4).hex()
    shows: list[Sink] = []
    files: Files | None = None
    if spec.log_dir is not None or spec.redirects or spec.tee or any(spec.filters.values()):
        from launchpad.record.log_dir import Files, temporary_folder

        log_dir = spec.log_dir or temporary_folder()
        files = Files(spec, plan, log_dir, bringup.post, job, keep_alive=bringup.nodes.keep_alive)
        shows.append(files)
    shown = spec
    if taker is not None:
        shows.append(taker(bringup.post))
        shown = spec._replace(redirects=StreamMap(everywhere=STDOUT), tee=StreamMap())
    record: ConsoleRecord | None = None
    if departure is not None:
        from launchpad.record.console_record import ConsoleRecord

        record = ConsoleRecord(bringup.post)
    destination: ConsoleOutput = record or StandardStreams(
        len(plan.ranks), os.environ, bringup.post, reports.fold, template=template_of(spec.line_prefix, spec.role)
    )
    console = Console(shown, plan, destination, shows=reports.events != "-")
    adds_to_junit = False
    if reports.junit is not None:
        from launchpad.record.junit import check

        adds_to_junit = _adds(reports.junit, reports.add_to_reports)
        check(reports.junit, adds=adds_to_junit)
    if reports.report is not None:
        from launchpad.report import page

        page.check(reports.report)
    machine: EventLines | None = None
    if reports.events is not None:
        from launchpad.record.event_lines import EventLines

        machine = EventLines(reports.events, bringup.post, adds=_adds(reports.events, reports.add_to_reports))
    observers = Observers(
        job, spec, plan, bringup.post, console.say, quiet=reports.quiet, verbose=reports.verbose, files=files
    )
    diagnosis, journal, folder = observers.diagnosis, observers.journal, observers.folder
    shows += [console, StaleStores(spec.target, spec.environ.values(), observers.note)]
    if reports.report is not None and not journal.folder:
        raise UsageError(
            f"--report {reports.report}: this job's record can't be kept, and the report is written from it"
        )
    if machine:
        shows.append(machine)
    sinks = observers.begin(shows)
    if departure is not None and record is not None:
        _leave(departure, job, observers, record)
    if spec.faults is not None and spec.faults.random is not None:
        observers.note(f"ranks are killed at random (--inject {spec.faults.random})")
    reader = plan.node_of(spec.input_rank)
    here = not bringup.nodes[reader.index].link.remote
    terminal = terminal_size(os.environ, console.margin)
    if spec.input_rank and terminal and plan.world_size > 1:
        observers.note(f"rank {spec.input_rank} has the terminal; while it is at a prompt, {STANDING_STILL}")
    modes = terminal_modes()
    try:
        supervisor = Supervisor(
            bringup,
            cluster,
            sinks,
            terminal=terminal,
            reopen=reopen,
            door=door,
            sends_input=not (here or reader.shown_there),
            waited=waited,
            may_restart=observers.restart_judge(spec),
        )
        code, cause = supervisor.run()
    finally:
        observers.end()
        restore_terminal(modes)
    history = diagnosis.history
    if here and history.started and not diagnosis.earlier:
        imported = (history.started - history.planned.time) / 1e9
        if text := suggestion(spec.preload, imported, os.environ):
            observers.note(text)
    if not reports.no_advice and (slow := history.slow()):
        observers.note(slow)
    lines: list[str] = []
    told: list[str] = []
    if cause is not None:
        verdict, lines = observers.conclude()
        code = _exit_code(cause, verdict)
        if machine:
            machine.verdict(history, verdict, lines, diagnosis.earlier)
        told = lines[:TOLD_LINES] + ([f"more: launchpad why {job}, on {os.uname().nodename}"] if journal.folder else [])
        lines += [f"logs: {folder}"] if folder else []
        if journal.folder:
            lines.append(f"more: launchpad why {job}")
    if any(name in os.environ for name in _CI_VARIABLES):
        _report_to_ci(console, diagnosis, lines, code, reports)
    tell(told, code)

    def last() -> None:
        if reports.report is not None:
            journal.finish()
            if problem := page.write(reports.report, journal.folder):
                console.say(f"--report {problem}", bad=True)
        if reports.notify is not None:
            from launchpad.runner.notify import run_command, variables

            for line in run_command(reports.notify, variables(diagnosis, lines, code, folder)):
                console.say(line)

    if reports.junit is not None:
        from launchpad.record import junit

        suite = junit.suite(history, diagnosis.verdict(), lines, reports.job or "")
        problem = junit.write(reports.junit, suite, adds=adds_to_junit)
        if problem:
            console.say(problem, bad=True)
    over = JobOver(time.monotonic_ns(), code)
    if supervisor.leaving:  # all that is left is output that nobody reads
        console.say_and_leave("\n".join(lines))
        journal.on(over)
        journal.finish()
        last()
        os._exit(code)
    console.flush()
    if lines:
        console.say("\n".join(diagnosis.besides_stacks(lines)), bad=True)
    for sink in sinks:
        sink.on(over)
    # Only a slow reader, --report or --notify can hold us up from here on: Ctrl-C ends the wait.
    for signum in (*STOPPING, signal.SIGTSTP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    last()
    for sink in reversed(sinks):  # the record comes first among them: until it is closed, others wait for the job
        sink.close()
    return code


def _report_to_ci(console: Console, diagnosis: Diagnosis, lines: list[str], code: int, reports: ReportOptions) -> None:
    """Show the job in the ways of the CI system that this is; `lines`: the report on a failed one."""
    from launchpad.record import ci
    from launchpad.record.annotations import annotation

    system, history, verdict = ci.system_of(os.environ), diagnosis.history, diagnosis.verdict()
    console.flush()
    if system == "github" and lines:
        console.print(annotation(history, verdict, lines, os.environ))
    if lines and not reports.quiet and (sections := ci.sections(system, history, verdict)):
        console.print("\n".join(sections))
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if system == "github" and path:
        problem = ci.write_page(path, ci.page(history, verdict, lines, code, reports.job or ""))
        if problem:
            console.say(problem, bad=True)


def _adds(path: str, since: float | None) -> bool:
    """Whether to add to a report: if an earlier job of the same file has written it since then."""
    try:
        return since is not None and os.stat(path).st_mtime >= since
    except OSError:
        return False


def _leave(departure: Departure, job: str, observers: Observers, record: ConsoleRecord) -> None:
    """Leave the terminal, as soon as others can attach to the job. Raises UsageError if they can't."""
    folder = observers.journal.folder
    try:
        if not os.path.samefile(folder, os.path.join(job_store.jobs_folder(os.environ), job)):
            raise FileNotFoundError
        observers.take_requests()
        record.begin(folder)
    except OSError:
        raise UsageError(
            f"--detach: nobody could attach to this job, as no record of it can be kept in "
            f"{job_store.jobs_folder(os.environ)}; set XDG_STATE_HOME to a writable folder"
        ) from None
    departure.leave(job)


def _exit_code(cause: Cause, verdict: Verdict) -> int:
    """The blamed rank's exit code. Its failure need not be the first one reported."""
    return verdict.exit_code if cause.kind in ("failure", "lost") and verdict.cause is not None else cause.exit_code
