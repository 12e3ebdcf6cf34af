"""The job's state machine: turns events and times into actions. It does no I/O and reads no clock.

    running ──first failure, stop signal, timeout, stall, lost node───► stopping ──all ranks have left──► over
       ▲ └───────────────────────── all ranks have left with 0 ──────────────────────────────────►  ▲
       └─────── clearing ◄── all ranks have left after a failure, and restarts are allowed ──┘      │
                   └──── a stop signal, the timeout, a lost node that does not come back ───────────┘

While stopping, the ladder lists the signals that the ranks get next, and how long they have to obey each.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from launchpad.job.outcome import Cause
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.events import (
    ConsoleClosed,
    Drained,
    ExceptionRaised,
    NodeBack,
    NodeLost,
    PhaseChanged,
    RankExited,
    RankFailed,
    StacksTaken,
    Stalled,
    StartFailed,
    StopRequested,
)

# Seconds for the ranks to exit. After a failure the others have little left to save; when the user stops the job, or
# its time is up, they may have a checkpoint to write.
GRACE_AFTER_FAILURE = 5.0
GRACE_AFTER_REQUEST = 30.0

# After a second Ctrl-C, how long to wait for a reader to take the remaining output.
HURRY_SECONDS = 1.0

# The same after the job's timeout: long enough for a slow reader to take a few MB.
TIMEOUT_DRAIN_SECONDS = 10.0

# How long to wait for the ranks' stacks before stopping them.
STACKS_SECONDS = 3.0

# A process that survives SIGKILL is in uninterruptible sleep; we don't wait for it any longer than this.
KILL_SECONDS = 10.0

Phase = Literal["running", "stopping", "clearing", "over"]

# The arrows of the diagram above.
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "running": ("stopping", "clearing", "over"),
    "stopping": ("clearing", "over"),
    "clearing": ("running", "over"),
    "over": (),
}


class FinishAttempt(NamedTuple):
    """Have the agents sweep up and drain the output, then exit or get ready to start the ranks again."""

    leave: bool


class Restart(NamedTuple):
    """Start all ranks again after a rank's failure or the loss of a node; `attempt` is 1 for the first restart."""

    attempt: int
    cause: Cause


class Reopen(NamedTuple):
    """Reconnect to lost nodes; each one reports NodeBack, or NodeLost again."""

    nodes: tuple[int, ...]


class TakeStacks(NamedTuple):
    """Take the stacks of the ranks; the job ends when StacksTaken arrives, or when that takes too long."""

    why: str  # "timeout", "failure"


class Leave(NamedTuple):
    """Exit at once, whatever is still unsent or alive."""


class Suspend(NamedTuple):
    """Suspend the ranks, then ourselves (Ctrl-Z); resume them when we are resumed."""


Action = SendSignal | PhaseChanged | FinishAttempt | Restart | Reopen | TakeStacks | Leave | Suspend


class Machine:
    """One job's state."""

    def __init__(
        self,
        ranks: Sequence[int],
        grace: float | None,
        timeout: float | None,
        now: float,
        max_restarts: int = 0,
        nodes: Sequence[int] = (0,),
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
        stop_signal: int | None = None,
    ) -> None:
        """`ranks` are about to start at `now`. All times are in seconds of one monotonic clock.

        `waited`: whether an exception says that a rank waited for other ranks in vain. `stop_signal`: what the ranks
        get first when the job is stopped on request or because its time is up; None: the signal that we got, or TERM.
        """
        self.phase: Phase = "running"
        self.cause: Cause | None = None
        self.attempt = 0
        self.running = set(ranks)
        self.deadline: float | None = None if timeout is None else now + timeout
        self._ranks = tuple(ranks)
        self._nodes = set(nodes)  # those that are connected
        self._missing: set[int] = set()  # those that are lost
        self._reopening: set[int] = set()  # the lost ones that we are reconnecting to
        self._draining: set[int] = set()  # those that still send output of the last attempt
        self._max_restarts = max_restarts
        self._timeout_at = self.deadline
        self._grace_after_failure = GRACE_AFTER_FAILURE if grace is None else grace
        self._grace_after_request = GRACE_AFTER_REQUEST if grace is None else grace
        self._stop_signal = stop_signal
        self._ladder: list[tuple[int, float]] = []
        self._failed_at = 0  # when the first failure happened, in ns of the head's clock
        self._hurried = False  # Ctrl-C while stopping
        self._timed_out = False
        self._waited = waited
        self._in_vain: set[int] = set()  # ranks that waited in vain for others

    @property
    def exit_code(self) -> int:
        """The job's exit code so far."""
        return self.cause.exit_code if self.cause else 0

    def on(self, event: Any, now: float, node: int = 0) -> list[Action]:
        """The actions for an event from `node`."""
        match event:
            case RankExited(at, rank, code):
                return self._left(rank, Cause("failure", rank=rank, code=code) if code != 0 else None, at, now)
            case RankFailed(at, rank, code, reason) if self.phase != "over":
                return self._fail(Cause("failure", rank=rank, code=code, text=reason), at, now)
            case StartFailed(at, rank, reason):
                return self._left(rank, Cause("start", rank=rank, text=reason), at, now)
            case StopRequested(_, signum):
                return self._on_signal(signum, now)
            case ConsoleClosed(_, reason) if self.phase in ("running", "clearing"):
                return self._stop(Cause("console", text=reason), self._after_failure(), now)
            case ExceptionRaised() if self._waited(event):
                self._in_vain.add(event.rank)
            case StacksTaken(_, "failure") if self.phase == "running" and self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case StacksTaken(_, "timeout") if self.phase == "running":
                return self._stop(Cause("timeout"), self._on_request(signal.SIGTERM), now)
            case Stalled(_, seconds) if self.phase == "running":
                return self._stop(Cause("stall", seconds=seconds), self._after_failure(), now)
            case Drained() if self.phase == "clearing":
                self._draining.discard(node)
                return self._cleared()
            case NodeLost():
                return self._lose(event, now)
            case NodeBack() if self.phase == "clearing":
                self._missing.discard(event.node)
                self._reopening.discard(event.node)
                self._nodes.add(event.node)
                return self._cleared()
        return []

    def join(self, ranks: Sequence[int]) -> None:
        """A running rank has spawned these."""
        self.running.update(ranks)

    def tick(self, now: float) -> list[Action]:
        """The actions that are due at `now`."""
        if self.deadline is None or now < self.deadline:
            return []
        match self.phase:
            case "running" if self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case "running" if not self._timed_out:
                self._timed_out = True
                self.deadline = now + STACKS_SECONDS
                return [TakeStacks("timeout")]
            case "running" | "clearing":
                return self._stop(Cause("timeout"), self._on_request(signal.SIGTERM), now)
            case "stopping":
                return self._step(now)
            case "over":
                return [Leave()]

    def _left(self, rank: int, failure: Cause | None, at: int, now: float) -> list[Action]:
        """A rank has exited, or could not start."""
        if self.phase == "over":
            return []
        self.running.discard(rank)
        actions = self._fail(failure, at, now) if failure else []
        return actions if self.running else [*actions, *self._all_left(now)]

    def _fail(self, failure: Cause, at: int, now: float) -> list[Action]:
        """A rank has failed. While we are stopping that is a consequence, not a cause.

        Unless it happened earlier, on another node, than the one we heard of first: then it becomes the cause. If the
        failure was caused by what other ranks do or don't do, their stacks are taken before they are stopped.
        """
        if self.phase == "running":
            is_secondary = failure.rank in self._in_vain or failure.code == -signal.SIGABRT
            if self.cause:  # their stacks are being taken
                return [] if is_secondary else self._stop(self.cause, self._after_failure(), now)
            self._failed_at = at
            if is_secondary and self.running:
                self.cause = failure
                self.deadline = now + STACKS_SECONDS
                return [TakeStacks("failure")]
            return self._stop(failure, self._after_failure(), now)
        if self.cause and self.cause.kind == "failure" and at < self._failed_at:
            self._failed_at = at
            self.cause = failure
        return []

    def _lose(self, lost: NodeLost, now: float) -> list[Action]:
        """A node is gone, with its ranks or, if they had all left, with the last of their output."""
        again = lost.node in self._reopening
        if not self.cause or (self.cause.kind in ("failure", "start") and lost.time < self._failed_at):
            self.cause = Cause("lost", node=lost.node, text=lost.reason)  # other ranks may have failed because of it
        self._nodes.discard(lost.node)
        self._missing.add(lost.node)
        self._draining.discard(lost.node)
        self.running.difference_update(lost.ranks)
        if self.phase == "over":
            return []
        if self.running:
            return self._stop(self.cause, self._after_failure(), now) if self.phase == "running" else []
        if self.phase == "clearing":
            return self._over(now) if again else self._cleared()
        return self._all_left(now)

    def _all_left(self, now: float) -> list[Action]:
        """No rank is running any more: end the job, or start the next attempt."""
        if self._starts_again:
            self._enter("clearing")
            self.deadline = self._timeout_at
            self._draining = set(self._nodes)
            return [FinishAttempt(leave=False)] if self._nodes else self._cleared()
        return self._over(now)

    @property
    def _starts_again(self) -> bool:
        return self.cause is not None and self.cause.kind in ("failure", "lost") and self.attempt < self._max_restarts

    def _cleared(self) -> list[Action]:
        """Restart once nothing of the last attempt is left and all nodes are connected."""
        if self._draining:
            return []
        if self._missing:
            new = tuple(sorted(self._missing - self._reopening))
            self._reopening |= self._missing
            return [Reopen(new)] if new else []
        assert self.cause is not None  # the reason for the restart
        failed, self.cause = self.cause, None
        self._in_vain.clear()
        self._enter("running")
        self.attempt += 1
        self.running = set(self._ranks)
        return [Restart(self.attempt, failed)]

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if signum == signal.SIGQUIT:
            return []
        if signum == signal.SIGTSTP:
            return [Suspend()] if self.phase != "over" else []
        if signum not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return [SendSignal(signum)] if self.phase in ("running", "stopping") else []
        if self.phase == "over":  # only output is left, and perhaps nobody reads it
            self.cause = self.cause or Cause("signal", signum=signum)
            return [Leave()]
        if self.phase == "stopping":
            return self._on_another_signal(signum, now)
        return self._stop(Cause("signal", signum=signum), self._on_request(signum), now)

    def _on_another_signal(self, signum: int, now: float) -> list[Action]:
        """A stop signal while we are stopping."""
        if self._starts_again:
            self.cause = Cause("signal", signum=signum)  # cancel the restart
        if signum != signal.SIGINT:
            return [SendSignal(signum)]
        self._hurried = True
        self._ladder = [(signal.SIGKILL, KILL_SECONDS)]
        return self._step(now)

    def _on_request(self, signum: int) -> list[tuple[int, float]]:
        """The ladder of a stop that the user asked for or planned, so that the ranks can save their state."""
        grace = self._grace_after_request
        first = self._stop_signal or signum
        ladder: list[tuple[int, float]] = [(first, grace), (signal.SIGKILL, KILL_SECONDS)]
        if first != signal.SIGTERM and (self._stop_signal or first == signal.SIGINT):
            ladder.insert(1, (signal.SIGTERM, min(grace, GRACE_AFTER_FAILURE)))
        return ladder

    def _after_failure(self) -> list[tuple[int, float]]:
        return [(signal.SIGTERM, self._grace_after_failure), (signal.SIGKILL, KILL_SECONDS)]

    def _stop(self, cause: Cause, ladder: list[tuple[int, float]], now: float) -> list[Action]:
        self.cause = cause
        if self.phase == "clearing":  # there is no rank to stop
            return self._over(now)
        self._enter("stopping")
        self._ladder = ladder
        return self._step(now)

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} → {phase}"
        self.phase = phase

    def _step(self, now: float) -> list[Action]:
        if not self._ladder:
            return self._over(now)
        signum, seconds = self._ladder.pop(0)
        self.deadline = now + seconds
        actions: list[Action] = [self._changed(now, signum, seconds)]
        return [*actions, SendSignal(signum, stops=signum == self._stop_signal)] if self.running else actions

    def _over(self, now: float) -> list[Action]:
        self._enter("over")
        # A paused reader may still want the rest of the output, so wait without limit, unless the user hurries us or
        # has set a timeout.
        self.deadline = None
        if self._hurried or (self.cause and self.cause.kind in ("timeout", "stall")):
            self.deadline = now + (HURRY_SECONDS if self._hurried else TIMEOUT_DRAIN_SECONDS)
        return [self._changed(now, 0, 0.0), FinishAttempt(leave=True)]

    def _changed(self, now: float, signum: int, seconds: float) -> PhaseChanged:
        kind = self.cause.kind if self.cause else ""
        return PhaseChanged(int(now * 1e9), self.phase, kind, signum, seconds, sorted(self.running))
