"""Runs a planned job for the command: with a console, the terminal, and the reports that were asked for."""

from __future__ import annotations

import os
import signal
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
from launchpad.errors import UsageError
from launchpad.head.arrivals import Door, Reopen
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.head.sink import Sink
from launchpad.job.outcome import STOPPING
from launchpad.job.plan import Plan, Stdin
from launchpad.job.spec import JobSpec, StreamMap
from launchpad.protocol.events import STDOUT
from launchpad.record import job_store
from launchpad.record.journal import unfinished
from launchpad.runner.conductor import Conductor
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets import outlets_of
from launchpad.runner.outlets.outlet import Ended
from launchpad.runner.stale_store import StaleStores
from launchpad.runner.suggestion import suggestion

if TYPE_CHECKING:
    from launchpad.diagnosis.verdict import Verdict
    from launchpad.output.mark import Resumed
    from launchpad.record.console_record import ConsoleRecord
    from launchpad.runner.departure import Departure
    from launchpad.runner.takeover import Before, Settings

Taker = Callable[[Callable[[Any], None]], Sink]  # called with a function that posts the head's own events
Tell = Callable[[list[str], int], None]  # tells nodes that have joined why the job ended, and its exit code

# How much of the verdict the launchpads of nodes that have joined show.
TOLD_LINES = 12


def supervise(
    bringup: BringUp,
    planner: Planner,
    tell: Tell,
    reopen: Reopen | None,
    reports: ReportOptions,
    taker: Taker | None,
    door: Door | None = None,
    departure: Departure | None = None,
    before: Before | None = None,
) -> int:
    """Run the job on these nodes and return its exit code. Raises UsageError for files that can't be written.

    `reopen` makes a new link to a lost node; `taker` makes a sink that gets the ranks' standard output instead of the
    console. `departure`: leave the terminal before the ranks start. `before`: the head that we take over from.
    """
    spec, plan = planner.spec, planner.plan
    takers = [taker(bringup.post)] if taker is not None else []
    resumed = before.resumed if before else None
    record = _console_record(bringup, resumed) if departure is not None else None
    shown = spec._replace(redirects=StreamMap(everywhere=STDOUT), tee=StreamMap()) if takers else spec
    destination: ConsoleOutput = record or StandardStreams(
        len(plan.ranks), os.environ, bringup.post, reports.fold, template=template_of(spec.line_prefix, spec.role)
    )
    console = Console(shown, plan, destination, shows=reports.events != "-")
    outlets = outlets_of(reports, console, bringup.post, os.environ, console, resumed)
    conductor = Conductor(
        *(bringup, planner, console.say),
        quiet=reports.quiet,
        verbose=reports.verbose,
        outlets=outlets,
        settings=_settings(spec, reports, departure) if not takers else None,
        before=before,
    )
    stale = StaleStores(spec.target, spec.environ.values(), conductor.note)
    conductor.begin([*takers, console, stale])
    if departure is not None and record is not None:
        _leave(departure, conductor, record)
    elif resumed is not None:
        for output in unfinished(resumed):
            console.on(output)
    reader = plan.node_of(spec.input_rank)
    here = before is None and not bringup.nodes[reader.index].link.remote
    advises = os.isatty(2) and departure is None and not (reports.quiet or reports.no_advice) and plan.world_size > 1
    _run(conductor, spec, plan, console, reopen, door, sent=not (here or before or reader.shown_there), advises=advises)
    _advise(conductor, spec, reports, here=here)
    ended = conductor.conclude(door)
    tell(_told(conductor, ended), ended.code)
    if conductor.leaving:  # all that is left is output that nobody reads
        console.say_and_leave("\n".join(ended.lines))
        conductor.leave(ended)
        os._exit(ended.code)
    console.flush()
    if ended.lines:
        console.say("\n".join(conductor.diagnosis.besides_stacks(ended.lines)), bad=True)
    if ended.verdict is not None:
        _advise_sync_env(conductor, bringup, planner, ended.verdict)
    conductor.over()
    # Only a slow reader, --report or --notify can hold us up from here on: Ctrl-C ends the wait.
    for signum in (*STOPPING, signal.SIGTSTP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    conductor.close(ended)
    return ended.code


def _settings(spec: JobSpec, reports: ReportOptions, departure: Departure | None) -> Settings | None:
    """For a launchpad that takes over, if one may have to."""
    if not spec.limits.keep_running:
        return None
    from launchpad.runner.takeover import Settings

    return Settings(reports.absolute, detached=departure is not None)


def _console_record(bringup: BringUp, resumed: Resumed | None) -> ConsoleRecord:
    from launchpad.record.console_record import ConsoleRecord

    return ConsoleRecord(bringup.post, resumed)


def _run(
    conductor: Conductor,
    spec: JobSpec,
    plan: Plan,
    console: Console,
    reopen: Reopen | None,
    door: Door | None,
    *,
    sent: bool,
    advises: bool,
) -> None:
    """Run the ranks, one of which may have the terminal. `sent`: it is on another machine, and gets our stdin there.

    `advises`: tell the user where the ranks are if nothing moves for long.
    """
    if spec.faults is not None and spec.faults.random is not None:
        conductor.note(f"ranks are killed at random (--inject {spec.faults.random})")
    stdin = Stdin(os.isatty(0), sent, terminal_size(os.environ, console.margin))
    if spec.input_rank and stdin.typed and plan.world_size > 1:
        conductor.note(f"rank {spec.input_rank} has the terminal; while it is at a prompt, {STANDING_STILL}")
    modes = terminal_modes()
    try:
        conductor.run(stdin=stdin, reopen=reopen, door=door, advises=advises)
    finally:
        restore_terminal(modes)


def _advise(conductor: Conductor, spec: JobSpec, reports: ReportOptions, *, here: bool) -> None:
    """Say what would have made the start quicker, if that was `here`, and for which rank the others waited."""
    history = conductor.diagnosis.history
    if here and history.started and not conductor.diagnosis.earlier:
        imported = (history.started - history.planned.time) / 1e9
        if text := suggestion(spec.preload, imported, os.environ):
            conductor.note(text)
    if not reports.no_advice and (slow := history.slow()):
        conductor.note(slow)


def _advise_sync_env(conductor: Conductor, bringup: BringUp, planner: Planner, verdict: Verdict) -> None:
    """Say if a rank on another host would have found its module with --sync-env."""
    if verdict.cause is None or planner.brings_environment or not bringup.nodes[verdict.cause.node].link.remote:
        return
    from launchpad.runner.missing_module import advice, missing_module  # few jobs fail so

    package = missing_module(verdict)
    if package and (text := advice(package, planner.spec.python, bringup.nodes.name(verdict.cause.node))):
        conductor.note(text)


def _told(conductor: Conductor, ended: Ended) -> list[str]:
    """What the launchpads of nodes that have joined show of the verdict."""
    if ended.verdict is None:
        return []
    recorded = conductor.observers.journal.folder
    more = [f"more: launchpad why {conductor.job}, on {os.uname().nodename}"] if recorded else []
    return ended.report[:TOLD_LINES] + more


def _leave(departure: Departure, conductor: Conductor, record: ConsoleRecord) -> None:
    """Leave the terminal, as soon as others can attach to the job. Raises UsageError if they can't."""
    folder = conductor.observers.journal.folder
    try:
        if not os.path.samefile(folder, os.path.join(job_store.jobs_folder(os.environ), conductor.job)):
            raise FileNotFoundError
        conductor.observers.take_requests()
        record.begin(folder)
    except OSError:
        raise UsageError(
            f"--detach: nobody could attach to this job, as no record of it can be kept in "
            f"{job_store.jobs_folder(os.environ)}; set XDG_STATE_HOME to a writable folder"
        ) from None
    departure.leave(conductor.job)
