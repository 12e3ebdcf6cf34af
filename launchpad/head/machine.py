"""The job's state machine: events and times in, actions out. It does no I/O and reads no clock.

    running ──first failure, stop signal, time-out, stall, lost node──► stopping ──all ranks have left──► over
       ▲ └───────────────────────── all ranks have left with 0 ──────────────────────────────────►  ▲
       └─────── clearing ◄── all ranks have left after a failure, and restarts are allowed ──┘      │
                   └──── a stop signal, the time-out, a lost node that does not come back ──────────┘

While stopping, the ladder says which signal the ranks get next and how long they have to obey it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from launchpad.commands import Signal as SendSignal
from launchpad.events import (
    ConsoleClosed,
    Drained,
    NodeBack,
    NodeLost,
    PeerFailed,
    PhaseChanged,
    RankExited,
    RankFailed,
    StartFailed,
    StopRequested,
)
from launchpad.failures import ExceptionRaised
from launchpad.job.outcome import Cause
from launchpad.stacks import StacksTaken, Stalled

# Seconds for the ranks to obey: after a rank's failure the others have little left to save; when the user asked us
# to stop, they may have a checkpoint to write.
GRACE_AFTER_FAILURE = 5.0
GRACE_AFTER_REQUEST = 30.0

# After a second Ctrl-C, so long for a reader to take the output that is left.
HURRY_SECONDS = 1.0

# After the job's time-out, so long; a reader that is only slow can take a few MB in it.
TIMEOUT_DRAIN_SECONDS = 10.0

# At the time-out the ranks are asked where they are; so long at most.
LOOK_SECONDS = 3.0

# A killed process that is still there waits in the kernel (uninterruptible sleep); we don't wait with it.
KILL_SECONDS = 10.0

Phase = Literal["running", "stopping", "clearing", "over"]


class Finish(NamedTuple):
    """Have the agents sweep and send what was written; then leave, or be ready to start the ranks again."""

    leave: bool


class Restart(NamedTuple):
    """Start all ranks again; `attempt` is 1 for the first restart. Why: a rank's failure, or a lost node."""

    attempt: int
    cause: Cause


class Reopen(NamedTuple):
    """Reach lost nodes again; each is to come back as NodeBack, or be lost once more."""

    nodes: tuple[int, ...]


class Look(NamedTuple):
    """Have it told where the ranks are; the job ends when that was told, a StacksTaken, or could not be."""

    why: str  # "timeout", "failure"


class Leave(NamedTuple):
    """Stop at once, whatever is still unsent or alive."""


class Suspend(NamedTuple):
    """Stop the ranks, then ourselves (Ctrl-Z); continue them when we are continued."""


Action = SendSignal | PhaseChanged | Finish | Restart | Reopen | Look | Leave | Suspend


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
    ) -> None:
        """`ranks` are about to be started at `now`, in seconds of a monotonic clock; so are all later times.

        `waited`: whether an exception says that other ranks were waited for in vain.
        """
        self.phase: Phase = "running"
        self.cause: Cause | None = None
        self.attempt = 0
        self.running = set(ranks)
        self.deadline: float | None = None if timeout is None else now + timeout
        self._ranks = tuple(ranks)
        self._nodes = set(nodes)  # those that are there
        self._missing: set[int] = set()  # those that are lost
        self._reopening: set[int] = set()  # of these, those that are to come back
        self._draining: set[int] = set()  # those that have not sent all of the last attempt's output
        self._max_restarts = max_restarts
        self._timeout_at = self.deadline
        self._grace_after_failure = GRACE_AFTER_FAILURE if grace is None else grace
        self._grace_after_request = GRACE_AFTER_REQUEST if grace is None else grace
        self._ladder: list[tuple[int, float]] = []
        self._failed_at = 0  # the first failure's time in ns, by the head's clock
        self._hurried = False  # Ctrl-C came while stopping
        self._looked = False  # the time-out has come
        self._waited = waited
        self._in_vain: set[int] = set()  # the ranks that have waited so

    @property
    def exit_code(self) -> int:
        """The job's exit code, as things stand."""
        return self.cause.exit_code if self.cause else 0

    def on(self, event: Any, now: float, node: int = 0) -> list[Action]:
        """What to do about an event, which came from that node."""
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
            case PeerFailed(_, reason, code) if self.phase in ("running", "clearing"):
                return self._stop(Cause("peer", code=code, text=reason), self._after_failure(), now)
            case ExceptionRaised() if self._waited(event):
                self._in_vain.add(event.rank)
            case StacksTaken(_, "failure") if self.phase == "running" and self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case StacksTaken(_, "timeout") if self.phase == "running":
                return self._stop(Cause("timeout"), self._after_failure(), now)
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
        """These have been started too, by one that runs."""
        self.running.update(ranks)

    def tick(self, now: float) -> list[Action]:
        """What to do because time has passed."""
        if self.deadline is None or now < self.deadline:
            return []
        match self.phase:
            case "running" if self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case "running" if not self._looked:
                self._looked = True
                self.deadline = now + LOOK_SECONDS
                return [Look("timeout")]
            case "running" | "clearing":
                return self._stop(Cause("timeout"), self._after_failure(), now)
            case "stopping":
                return self._step(now)
            case "over":
                return [Leave()]

    def _left(self, rank: int, failure: Cause | None, at: int, now: float) -> list[Action]:
        """A rank is gone, or never was."""
        if self.phase == "over":
            return []
        self.running.discard(rank)
        actions = self._fail(failure, at, now) if failure else []
        return actions if self.running else [*actions, *self._all_left(now)]

    def _fail(self, failure: Cause, at: int, now: float) -> list[Action]:
        """What happens to a rank while we are stopping is no failure of its own.

        Unless it happened, on another node, before the one that was heard of first. Where it is not the rank's own, but
        came of what another does, or doesn't do, the others are looked at before they are stopped.
        """
        if self.phase == "running":
            of_others = failure.rank in self._in_vain or failure.code == -signal.SIGABRT
            if self.cause:  # they are being looked at
                return [] if of_others else self._stop(self.cause, self._after_failure(), now)
            self._failed_at = at
            if of_others and self.running:
                self.cause = failure
                self.deadline = now + LOOK_SECONDS
                return [Look("failure")]
            return self._stop(failure, self._after_failure(), now)
        if self.cause and self.cause.kind == "failure" and at < self._failed_at:
            self._failed_at = at
            self.cause = failure
        return []

    def _lose(self, lost: NodeLost, now: float) -> list[Action]:
        """A node is gone with its ranks, or when they had all left: then with what they wrote last."""
        again = lost.node in self._reopening
        if not self.cause or (self.cause.kind in ("failure", "start") and lost.time < self._failed_at):
            self.cause = Cause("lost", node=lost.node, text=lost.reason)  # ranks elsewhere may have failed for it
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
        """No rank runs any more: that is the end, or another attempt is due."""
        if self._starts_again:
            self.phase = "clearing"
            self.deadline = self._timeout_at
            self._draining = set(self._nodes)
            return [Finish(leave=False)] if self._nodes else self._cleared()
        return self._over(now)

    @property
    def _starts_again(self) -> bool:
        return self.cause is not None and self.cause.kind in ("failure", "lost") and self.attempt < self._max_restarts

    def _cleared(self) -> list[Action]:
        """Go on, if nothing of the last attempt is left and all nodes are there."""
        if self._draining:
            return []
        if self._missing:
            new = tuple(sorted(self._missing - self._reopening))
            self._reopening |= self._missing
            return [Reopen(new)] if new else []
        assert self.cause is not None  # it brought us here
        failed, self.cause = self.cause, None
        self._in_vain.clear()
        self.phase = "running"
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
        if self.phase == "over":  # only output is still on its way, and perhaps nobody reads it
            self.cause = self.cause or Cause("signal", signum=signum)
            return [Leave()]
        if self.phase == "stopping":
            return self._on_another_signal(signum, now)
        grace = self._grace_after_request
        ladder: list[tuple[int, float]] = [(signum, grace), (signal.SIGKILL, KILL_SECONDS)]
        if signum == signal.SIGINT:
            ladder.insert(1, (signal.SIGTERM, min(grace, GRACE_AFTER_FAILURE)))
        return self._stop(Cause("signal", signum=signum), ladder, now)

    def _on_another_signal(self, signum: int, now: float) -> list[Action]:
        """A request to stop while we are stopping."""
        if self._starts_again:
            self.cause = Cause("signal", signum=signum)  # we would have gone on
        if signum != signal.SIGINT:
            return [SendSignal(signum)]
        self._hurried = True
        self._ladder = [(signal.SIGKILL, KILL_SECONDS)]
        return self._step(now)

    def _after_failure(self) -> list[tuple[int, float]]:
        return [(signal.SIGTERM, self._grace_after_failure), (signal.SIGKILL, KILL_SECONDS)]

    def _stop(self, cause: Cause, ladder: list[tuple[int, float]], now: float) -> list[Action]:
        self.cause = cause
        if self.phase == "clearing":  # no rank is there to be stopped
            return self._over(now)
        self.phase = "stopping"
        self._ladder = ladder
        return self._step(now)

    def _step(self, now: float) -> list[Action]:
        if not self._ladder:
            return self._over(now)
        signum, seconds = self._ladder.pop(0)
        self.deadline = now + seconds
        actions: list[Action] = [self._changed(now, signum, seconds)]
        return [*actions, SendSignal(signum)] if self.running else actions

    def _over(self, now: float) -> list[Action]:
        self.phase = "over"
        # A paused reader may want the rest of the output, however late: there is no limit unless the user hurries, or
        # has set one.
        self.deadline = None
        if self._hurried or (self.cause and self.cause.kind in ("timeout", "stall")):
            self.deadline = now + (HURRY_SECONDS if self._hurried else TIMEOUT_DRAIN_SECONDS)
        return [self._changed(now, 0, 0.0), Finish(leave=True)]

    def _changed(self, now: float, signum: int, seconds: float) -> PhaseChanged:
        kind = self.cause.kind if self.cause else ""
        return PhaseChanged(int(now * 1e9), self.phase, kind, signum, seconds, sorted(self.running))
