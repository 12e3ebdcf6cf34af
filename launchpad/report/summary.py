"""What is said about a job: notes while it runs and stops, and at its end the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launchpad.events import (
    LogFailed,
    NoMpi,
    NotForked,
    PhaseChanged,
    RanksSpawned,
    Restarted,
    StraysEnded,
)
from launchpad.job.outcome import ranks_in_words, signal_name
from launchpad.report.story import Story

if TYPE_CHECKING:  # a job that goes well needs none
    from launchpad.report.verdict import Verdict


class Summary:
    """A sink that remembers; `report` puts it into words."""

    def __init__(self, say: Callable[[str], None], quiet: bool) -> None:
        """`say` shows a note at once, unless `quiet`."""
        self._say = say if not quiet else lambda _: None
        self.story = Story()
        self.history: list[str] = []  # of the attempts before this one
        self._stopping = False
        self.deadline: float | None = None

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Load what a verdict needs, which takes milliseconds, while the agents of a failed job leave."""
        self.deadline = None
        import launchpad.report.telling  # noqa: F401

    def close(self) -> None:
        """Nothing is held open."""

    def on(self, event: Any) -> bool:
        """Remember what the report will need; say what the user should know now."""
        match event:
            case NotForked(_, reason):
                self._say(f"ranks are executed one by one, and each imports torch itself: {reason}")
            case NoMpi():
                self._say(
                    "no rank has called MPI_Init of an MPICH (pip install mpich) or an Intel MPI; under any other MPI "
                    "each rank is a world of its own"
                )
            case RanksSpawned():
                self._say(f"rank {event.by} has spawned {ranks_in_words(event.ranks)}: {' '.join(event.argv)}")
            case LogFailed(_, path, reason):
                self._say(f"{path}: {reason}; what the rank writes from here on is missing there")
            case StraysEnded(_, processes):
                many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
                self._say(f"ended {many} that ranks left behind: {', '.join(processes[:5])}")
            case PhaseChanged():
                self._phase(event)
            case Restarted():
                self._restarted(event)
        self.story.on(event)
        return False

    def _phase(self, event: PhaseChanged) -> None:
        if event.phase == "over" and event.cause:
            self.deadline = 0.0
        if event.phase != "stopping":
            return
        name = signal_name(event.signum)
        if self._stopping and event.ranks:
            self._say(f"{ranks_in_words(event.ranks)} still running: sent {name}")
        elif event.cause == "signal" and event.ranks:
            self._say(
                f"sent {name} to {ranks_in_words(event.ranks)}; they have {event.seconds:g} s"
                + (", Ctrl-C kills them at once" if name == "SIGINT" else "")
            )
        self._stopping = True

    def _restarted(self, event: Restarted) -> None:
        from launchpad.report.telling import in_short

        failure = in_short(self.story, self.verdict())
        self._say(f"failed: {failure}; all ranks are started again (restart {event.attempt} of {event.most})")
        self.history.append(failure)
        self._stopping = False

    def verdict(self) -> Verdict:
        """On the present attempt."""
        from launchpad.report.verdict import verdict_on

        return verdict_on(self.story)

    def report(self, verdict: Verdict) -> list[str]:
        """The account of a job: the cause first, then what the cause did to the others."""
        from launchpad.report.telling import tell

        return tell(self.story, verdict, self.history)
