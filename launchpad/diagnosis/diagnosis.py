"""A sink: the history of a job over all its attempts, and what follows from it: the verdict, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launchpad.diagnosis.history import History
from launchpad.protocol.events import PhaseChanged, Restarted, WorldRestarted

if TYPE_CHECKING:  # a job that succeeds needs no verdict
    from launchpad.diagnosis.verdict import Verdict


class Diagnosis:
    """The sink. The job's exit code, its restarts and all reports on it are decided by what this one knows."""

    def __init__(self) -> None:
        self.history = History()  # of the current attempt
        self.earlier: list[str] = []  # a line for each earlier attempt that failed
        self.deadline: float | None = None

    def on(self, event: Any) -> bool:
        """Add an event; sum up the attempt that ends with it."""
        if type(event) is Restarted and not self.changes_nodes:
            self.earlier.append(self.summary())
        elif type(event) is WorldRestarted and event.counted:
            self.earlier.append(self.world(event.world).summary())
        if type(event) is PhaseChanged:
            self.deadline = 0.0 if event.phase == "over" and event.cause else None
        self.history.on(event)
        return False

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Import what the verdict needs while the agents of a failed job exit, because that takes milliseconds."""
        import launchpad.diagnosis.verdict_text  # noqa: F401

        self.deadline = None

    def close(self) -> None:
        """Nothing is held open."""

    @property
    def changes_nodes(self) -> bool:
        """Whether the ranks were stopped only to start again on other nodes."""
        return self.history.kind in ("joined", "left")

    def world(self, name: str) -> WorldDiagnosis:
        """What follows for one of several worlds."""
        return WorldDiagnosis(self, name)

    def verdict(self) -> Verdict:
        """The verdict on the current attempt."""
        from launchpad.diagnosis.verdict import verdict_on

        return verdict_on(self.history)

    def summary(self) -> str:
        """How the current attempt failed, in a few words."""
        from launchpad.diagnosis.verdict_text import summarize

        return summarize(self.history, self.verdict())

    def report(self, verdict: Verdict) -> list[str]:
        """The report on the job: the cause first, then what it did to the other ranks."""
        from launchpad.diagnosis.verdict_text import describe

        return describe(self.history, verdict, self.earlier)

    def around(self, verdict: Verdict, lines: list[str]) -> list[str]:
        """What the report, `lines`, adds to the exception of the rank that failed."""
        from launchpad.diagnosis.verdict_text import around

        return around(self.history, verdict, lines)

    def besides_stacks(self, lines: list[str]) -> list[str]:
        """What the report, `lines`, adds to the stacks that were shown when the job hung or timed out."""
        from launchpad.diagnosis.verdict_text import besides_stacks

        return besides_stacks(self.history, lines)

    def last_output(self, verdict: Verdict) -> list[str]:
        """The last that the blamed rank wrote, if the report shows nothing of it."""
        from launchpad.diagnosis.verdict_text import last_output

        return last_output(self.history, verdict)


class WorldDiagnosis:
    """What follows for one of a job's worlds, as if it were alone."""

    def __init__(self, whole: Diagnosis, name: str) -> None:
        self._whole = whole
        self._name = name

    @property
    def history(self) -> History:
        """Of its current attempt."""
        return self._whole.history.world(self._name)

    def verdict(self) -> Verdict:
        """The verdict on its current attempt."""
        from launchpad.diagnosis.verdict import verdict_on

        return verdict_on(self.history)

    def summary(self) -> str:
        """How its current attempt failed, in a few words."""
        from launchpad.diagnosis.verdict_text import summarize

        return summarize(self.history, self.verdict())
