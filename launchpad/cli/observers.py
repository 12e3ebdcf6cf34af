"""What every job has beside the ones who show its output: the record, the story, and answers where its ranks are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.failures import ExceptionRaised, JobPlanned, RanksHeld
from launchpad.head.control import Control
from launchpad.head.sink import Sink
from launchpad.job.plan import Plan
from launchpad.job.spec import JobSpec
from launchpad.report.journal import Journal
from launchpad.report.stacks import Stacks
from launchpad.report.summary import Summary

if TYPE_CHECKING:
    from launchpad.report.files import Files
    from launchpad.report.verdict import Verdict


class Observers:
    """One job's, whether the command runs it or `launchpad.run`."""

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        plan: Plan,
        post: Callable[[Any], None],
        say: Callable[[str], None],
        *,
        quiet: bool = False,
        files: Files | None = None,
    ) -> None:
        """`post` takes events of the head's own. `say` shows what is asked for; notes too, unless `quiet`."""
        self.note: Callable[[str], None] = _say_nothing if quiet else say
        self.summary = Summary(say, quiet)
        self.journal = Journal(job, plan, files, self.note, post, os.environ)
        self.folder = files.folder if files else self.journal.folder  # "" where nothing is kept
        self._control = Control(job, post)
        stacks = Stacks(say, self.folder, plan, self._control.answer, self._tell_all)
        self._own: list[Sink] = [self.summary, self._control, stacks]
        self.sinks: list[Sink] = []
        self._first = planned(job, spec, plan, self.journal.folder)

    def begin(self, shown: Sequence[Sink]) -> list[Sink]:
        """All sinks, with those that show the output; they have heard what is about to run."""
        self.sinks = [self.journal, *shown, *self._own]
        self._tell_all(self._first)
        return self.sinks

    def _tell_all(self, event: JobPlanned | RanksHeld) -> None:
        for sink in self.sinks:
            sink.on(event)

    def end(self) -> None:
        """The ranks are gone: nobody can ask where they are."""
        self._control.close()

    def conclude(self) -> tuple[Verdict, list[str]]:
        """The verdict on a job that has failed, and in words; both are in the record then."""
        verdict = self.summary.verdict()
        lines = self.summary.report(verdict)
        self.journal.conclude(self.summary.story, verdict, lines, self.summary.history)
        return verdict, lines


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
