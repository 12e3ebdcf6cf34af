"""A planned job from its start to what is said about its end: its sinks, the supervisor, the verdict, the exit code."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.cli.observers import Observers, waited
from launchpad.events import STDOUT
from launchpad.failures import JobOver
from launchpad.head.gathering import Gathering
from launchpad.head.sink import Sink
from launchpad.head.supervisor import Supervisor
from launchpad.job.outcome import Cause
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec, StreamMap
from launchpad.report.console import Console, restore_terminal, terminal_modes, terminal_size
from launchpad.report.stale_store import StaleStores
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
    job: str = ""  # its name in a job file
    adds: bool = False  # to the files: others of the job file have begun them


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
    shows: list[Sink] = []
    files: Files | None = None
    if spec.log_dir is not None or spec.redirects or spec.tee or any(spec.filters.values()):
        from launchpad.report.files import Files, temporary_folder

        files = Files(spec, plan, spec.log_dir or temporary_folder(), gathering.post, job)
        shows.append(files)
    shown = spec
    if reports.taker is not None:
        shows.append(reports.taker(gathering.post))
        shown = dataclasses.replace(spec, redirects=StreamMap(everywhere=STDOUT), tee=StreamMap())
    console = Console(shown, plan, os.environ, gathering.post, shows=reports.events != "-")
    observers = Observers(job, spec, plan, gathering.post, console.say, quiet=quiet, files=files)
    summary, journal, folder = observers.summary, observers.journal, observers.folder
    shows += [console, StaleStores(spec.target, spec.environ.values(), observers.note)]
    machine: EventLines | None = None
    if reports.junit is not None:
        from launchpad.report.junit import check

        check(reports.junit, adds=reports.adds)
    if reports.events is not None:
        from launchpad.report.event_lines import EventLines

        machine = EventLines(reports.events, gathering.post, adds=reports.adds)
        shows.append(machine)
    sinks = observers.begin(shows)
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
        observers.end()
        restore_terminal(modes)
    lines: list[str] = []
    shown_before: set[str] = set()  # with the stacks, a moment ago
    if cause is not None:
        verdict, lines = observers.conclude()
        code = _exit_code(cause, verdict)
        held = summary.story.held
        shown_before = {f"    {line}" for line in held.lines} if held and held.why != "failure" else set()
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

        suite = junit.suite(summary.story, summary.verdict(), lines, reports.job)
        problem = junit.write(reports.junit, suite, adds=reports.adds)
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
