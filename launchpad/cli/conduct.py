"""A planned job from its start to what is said about its end: its sinks, the supervisor, the verdict, the exit code."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.events import STDOUT
from launchpad.failures import ExceptionRaised, JobOver, JobPlanned, RanksHeld
from launchpad.head.control import Control
from launchpad.head.gathering import Gathering
from launchpad.head.sink import Sink
from launchpad.head.supervisor import Supervisor
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec, StreamMap
from launchpad.report.console import Console, restore_terminal, terminal_modes, terminal_size
from launchpad.report.journal import Journal
from launchpad.report.stacks import Stacks
from launchpad.report.stale_store import StaleStores
from launchpad.report.summary import Summary
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.report.event_lines import EventLines
    from launchpad.report.files import Files
    from launchpad.report.verdict import Verdict

Reopen = Callable[[int], Link]
Taker = Callable[[Callable[[Any], None]], Sink]  # from what takes events of the head's own
Tell = Callable[[str, int], None]  # what the launchpads of other nodes are to know of our end: why, exit code


class Reports(NamedTuple):
    """What a machine is to read of the job, beside the console."""

    junit: str | None = None  # a file
    events: str | None = None  # a file, or "-"
    taker: Taker | None = None  # of the ranks' standard output, which is not shown then


def conduct(
    gathering: Gathering,
    spec: JobSpec,
    plan: Plan,
    tell: Tell,
    reopen: Reopen | None,
    reports: Reports,
    *,
    here: bool,
    quiet: bool,
) -> int:
    """Run the job; returns its exit code. Raises UsageError for files that can't be written."""
    job = os.urandom(4).hex()
    sinks: list[Sink] = []
    files: Files | None = None
    if spec.log_dir is not None or spec.redirects or spec.tee or any(spec.filters.values()):
        from launchpad.report.files import Files, temporary_folder

        files = Files(spec, plan, spec.log_dir or temporary_folder(), gathering.post, job)
        sinks.append(files)
    shown = spec
    if reports.taker is not None:
        sinks.append(reports.taker(gathering.post))
        shown = dataclasses.replace(spec, redirects=StreamMap(everywhere=STDOUT), tee=StreamMap())
    console = Console(shown, plan, os.environ, gathering.post, shows=reports.events != "-")
    say = _say_nothing if quiet else console.say
    summary = Summary(console.say, quiet)
    journal = Journal(job, plan, files, say, gathering.post, os.environ)
    sinks += [journal, console, summary, StaleStores(spec.target, spec.environ.values(), say)]
    machine: EventLines | None = None
    if reports.junit is not None:
        from launchpad.report.junit import check

        check(reports.junit)
    if reports.events is not None:
        from launchpad.report.event_lines import EventLines

        machine = EventLines(reports.events, gathering.post)
        sinks.append(machine)
    control = Control(job, gathering.post)
    sinks.append(control)

    def note(event: RanksHeld) -> None:
        for sink in sinks:
            sink.on(event)

    folder = files.folder if files else journal.folder
    sinks.append(Stacks(console.say, folder, plan, control.answer, note))
    first = planned(job, spec, plan, journal.folder)
    for sink in sinks:
        sink.on(first)
    supervisor = Supervisor(gathering)
    modes = terminal_modes()
    try:
        code, cause = supervisor.run(
            plan,
            sinks,
            grace=spec.grace,
            timeout=spec.timeout,
            stall_timeout=spec.stall_timeout,
            max_restarts=spec.max_restarts,
            terminal=terminal_size(os.environ, console.margin) if here else (),
            reopen=reopen,
            sends_input=not here,
            waited=waited,
        )
    finally:
        control.close()
        restore_terminal(modes)
    lines: list[str] = []
    shown_before: set[str] = set()  # with the stacks, a moment ago
    if cause is not None:
        verdict = summary.verdict()
        code = _exit_code(cause, verdict)
        lines = summary.report(verdict)
        held = summary.story.held
        shown_before = {f"    {line}" for line in held.lines} if held and held.why != "failure" else set()
        journal.conclude(summary.story, verdict, lines, summary.history)
        if machine:
            machine.verdict(summary.story, verdict, lines, summary.history)
        lines += [f"logs: {folder}"] if folder else []
        if journal.folder:
            lines.append(f"more: launchpad why {job}")
        if os.environ.get("GITHUB_ACTIONS") == "true":
            from launchpad.report.annotations import annotation

            console.print(annotation(summary.story, verdict, lines, os.environ))
    tell(lines[0] if lines else "", code)
    if reports.junit is not None:
        from launchpad.report import junit

        problem = junit.write(reports.junit, summary.story, summary.verdict(), lines)
        if problem:
            console.say(problem, bad=True)
    over = JobOver(time.monotonic_ns(), code)
    if supervisor.leaving:  # output that nobody takes is all that is left
        console.say_and_leave("\n".join(lines))
        journal.on(over)
        journal.close()
        os._exit(code)
    console.flush()
    if lines:
        console.say("\n".join(line for line in lines if line not in shown_before), bad=True)
    for sink in sinks:
        sink.on(over)
    # From here on nobody is left but a slow reader: Ctrl-C ends the wait for him.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    for sink in sinks:
        sink.close()
    return code


def _exit_code(cause: Cause, verdict: Verdict) -> int:
    """The blamed rank's: it need not be the one whose failure was heard of first."""
    return verdict.exit_code if cause.kind in ("failure", "lost") and verdict.cause is not None else cause.exit_code


def waited(event: ExceptionRaised) -> bool:
    """Whether an exception says that its rank has waited for others in vain, or lost them."""
    from launchpad.report import echoes  # a job that goes well needs none

    return echoes.waited(event)


def _say_nothing(_: str) -> None:
    """--quiet was given."""


def planned(job: str, spec: JobSpec, plan: Plan, folder: str) -> JobPlanned:
    """The first event of a job; `folder` is where it is recorded."""
    several = len(plan.nodes) > 1
    return JobPlanned(
        time=time.monotonic_ns(),
        wall=time.time(),
        job=job,
        pid=os.getpid(),
        run_id=plan.run_id,
        words=[*(["-m"] if spec.target.kind == "module" else []), spec.target.name, *spec.target.args],
        cwd=spec.cwd,
        nodes=[[node.name, [rank.rank for rank in node.ranks]] for node in plan.nodes],
        folders={str(rank.rank): str(rank.rank if several else rank.local_rank) for rank in plan.ranks},
        timeout=spec.timeout or 0.0,
        logs=folder,
    )
