"""The sinks that every job has besides its output: the record, the diagnosis, and answers to `launchpad stacks`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.console.debugger_sink import DebuggerSink
from launchpad.console.message import say_nothing
from launchpad.console.notes import Notes
from launchpad.console.stack_sink import StackSink
from launchpad.console.top_sink import TopSink
from launchpad.console.world_requests import WorldRequests
from launchpad.control.server import ControlServer
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.held_sink import HeldSink
from launchpad.diagnosis.straggler_sink import StragglerSink
from launchpad.head.machine import Judgement
from launchpad.head.sink import Sink
from launchpad.job.masking import masked_words
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.protocol.events import (
    STDOUT,
    ArrivalsCompared,
    ExceptionRaised,
    HeadLost,
    HeadResumed,
    JobPlanned,
    RanksHeld,
)
from launchpad.record.job_store import rank_folders
from launchpad.record.journal import Journal
from launchpad.record.liveness import own_process

if TYPE_CHECKING:
    from launchpad.diagnosis.verdict import Verdict
    from launchpad.job.succession import EarlierHead
    from launchpad.output.mark import Resumed
    from launchpad.record.log_dir import Files


class Observers:
    """The sinks of one job, run by the command or by `launchpad.run`."""

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        plan: Plan,
        post: Callable[[Any], None],
        say: Callable[[str], None],
        *,
        quiet: bool = False,
        verbose: bool = False,
        files: Files | None = None,
        earlier: Sequence[EarlierHead] = (),
        resumed: Resumed | None = None,
        since: int | None = None,
    ) -> None:
        """`post` takes the head's own events. `say` shows answers and, unless `quiet`, notes; if `verbose`, more.

        `earlier`: who has led the job before. `resumed`: where to go on with its record. `since`: as in `planned`.
        """
        self.note: Callable[[str], None] = say_nothing if quiet else say
        self.diagnosis = Diagnosis()
        notes = Notes(
            *(self.diagnosis, say, quiet, verbose),
            reports_bindings=spec.report_bindings,
            hides=lambda local_rank: spec.hides(local_rank, STDOUT),
        )
        self.journal = Journal(
            job, plan, files if files and files.has_streams else None, self.note, post, os.environ, resumed
        )
        self.folder = files.folder if files else self.journal.folder  # "" if nothing is kept
        self._control = ControlServer(job, post)
        stacks = StackSink(say, self.folder, plan, self._control.answer)
        debuggers = DebuggerSink(say, self._control.answer)
        top = TopSink(self.diagnosis.history, spec.limits.max_restarts.most, self._control.answer)
        held = HeldSink(plan, self._tell_all)
        requests = WorldRequests(self._control.answer)
        stragglers = StragglerSink(self.diagnosis.history, self._tell_all)
        self._own: list[Sink] = [
            notes,
            self.diagnosis,
            held,
            stragglers,
            self._control,
            stacks,
            debuggers,
            top,
            requests,
        ]
        if plan.roles:  # collectives of different worlds can't be compared
            self._own.remove(stragglers)
        self.sinks: list[Sink] = []
        self._first: list[JobPlanned | HeadLost | HeadResumed] = [planned(job, spec, plan, self.journal.folder, since)]
        self._first += [HeadLost(time.monotonic_ns(), *one) for one in earlier]

    def begin(self, shown: Sequence[Sink], resumed: HeadResumed | None = None) -> list[Sink]:
        """Announce the job to all sinks, including the given ones that show its output. Returns them all.

        If we have taken it over, its record tells the diagnosis what there was.
        """
        self.sinks = [self.journal, *shown, *self._own]
        if resumed is not None:
            from launchpad.record.replay import read_events

            events = list(read_events(self.journal.folder))
            ahead = resumed.ahead + sum(event.ahead for event in events if isinstance(event, HeadResumed))
            for event in events:
                self.diagnosis.on(event._replace(time=event.time + ahead) if event.time else event)
            self._first = [resumed]
        for first in self._first:
            self._tell_all(first)
        return self.sinks

    def _tell_all(self, event: JobPlanned | HeadLost | HeadResumed | RanksHeld | ArrivalsCompared) -> None:
        for sink in self.sinks:
            sink.on(event)

    def take_requests(self) -> None:
        """Take questions and signals of other terminals from now on, instead of a little later. Raises OSError."""
        self._control.begin()

    def end(self) -> None:
        """The ranks are gone: take no more questions about where they are."""
        self._control.close()

    def restart_judge(self, spec: JobSpec) -> Callable[..., Judgement]:
        """What says what the attempt that has failed means for the next one.

        Called before the ranks start for the first time: it looks for the files of --progress. With several worlds it
        is asked about one of them, by its name.
        """
        if spec.roles:
            from launchpad.runner.restart_judge import WorldJudges

            return WorldJudges(self.diagnosis, spec.roles).judge
        if not spec.limits.max_restarts.most:
            return Judgement
        from launchpad.runner.restart_judge import RestartJudge

        return RestartJudge(self.diagnosis, spec.cwd, spec.limits).judge

    def conclude(self) -> tuple[Verdict, list[str]]:
        """Record the verdict on a failed job. Returns it, and its text."""
        verdict = self.diagnosis.verdict()
        lines = self.diagnosis.report(verdict)
        self.journal.conclude(self.diagnosis.history, verdict, lines, self.diagnosis.earlier)
        return verdict, lines


def waited(event: ExceptionRaised) -> bool:
    """Whether an exception means that its rank waited for others in vain, or lost them."""
    from launchpad.diagnosis import secondary  # a successful job doesn't need it

    return secondary.waited(event)


def _words(spec: JobSpec) -> list[str]:
    """The target and its arguments; with several programs, theirs, as they were typed."""
    found: list[str] = []
    for role in spec.roles:
        found += [*([":"] if found else []), f"{role.name}:", role.spec.target.name, *role.spec.target.args]
    if found:
        return found
    for target in [program.target for program in spec.programs] or [spec.target]:
        found += [*([":"] if found else []), *target.words]
    return found


def planned(job: str, spec: JobSpec, plan: Plan, folder: str, since: int | None = None) -> JobPlanned:
    """The first event of a job; `folder` is where it is recorded. `since`: when it began, if not now."""
    now = time.monotonic_ns()
    begun = since or now
    return JobPlanned(
        time=begun,
        wall=time.time() - (now - begun) / 1e9,
        job=job,
        pid=os.getpid(),
        run_id=plan.run_id,
        words=masked_words(_words(spec)),
        cwd=spec.cwd,
        nodes=plan.by_node,
        folders={str(rank): name for rank, name in rank_folders(plan).items()},
        timeout=spec.limits.timeout or 0.0,
        logs=folder,
        line_prefix=spec.line_prefix,
        role=spec.role,
        input_rank=plan.input_rank,
        programs=plan.programs,
        roles=plan.roles,
        **own_process()._asdict(),
    )
