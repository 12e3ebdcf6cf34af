"""The job's state machine: turns events and times into actions. It does no I/O and reads no clock.

    running ──first failure, stop signal, timeout, stall, node lost, new or leaving──► stopping ──all have left──► over
       ▲ └───────────────────────── all ranks have left with 0 ─────────────────────────────────────────────►  ▲
       └─────── clearing ◄── all ranks have left, and the job may go on: a restart, or other nodes ──┘         │
                   └──── a stop signal, the timeout, too few nodes for too long ───────────────────────────────┘

Clearing waits until the last attempt's output is here, enough nodes are connected, and these have met.

While stopping, the ladder lists the signals that the ranks get next, and how long they have to obey each.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from launchpad.job.duration import duration
from launchpad.job.limits import Limits
from launchpad.job.membership import Membership, Seat, seated
from launchpad.job.outcome import STOPPING, Cause
from launchpad.named import NamedTuple
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.events import (
    AtPrompt,
    ConsoleClosed,
    Drained,
    ExceptionRaised,
    GaveWay,
    LeftoversAwaited,
    NodeDoubted,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodesAwaited,
    NotRestarted,
    PhaseChanged,
    RankExited,
    RankFailed,
    SeatsReady,
    StacksTaken,
    Stalled,
    StartFailed,
    StopRequested,
)
from launchpad.protocol.message import Message

# Seconds for the ranks to exit. After a failure the others have little left to save; when the user stops the job, or
# its time is up, they may have a checkpoint to write.
GRACE_AFTER_FAILURE = 5.0
GRACE_AFTER_REQUEST = 30.0

# A rank at a prompt has nothing to save: pdb takes Ctrl-C for itself, and so it gets the next signal soon.
GRACE_AT_PROMPT = 3.0

# After a second Ctrl-C, how long to wait for a reader to take the remaining output.
HURRY_SECONDS = 1.0

# The same after the job's timeout: long enough for a slow reader to take a few MB.
TIMEOUT_DRAIN_SECONDS = 10.0

# How long to wait for the ranks' stacks before stopping them: longer than it takes if an agent does not answer
# (head/stack_requests.py).
STACKS_SECONDS = 11.0

# How long before the timeout the ranks are asked for their stacks, so that these are there in time: so many seconds,
# and no more than this part of the timeout.
ASK_EARLIER_SECONDS = 5.0
ASK_EARLIER_SHARE = 0.1

# How long to wait for enough nodes: a lost host may be rebooting.
NODES_SECONDS = 120.0

# A process that survives SIGKILL is in uninterruptible sleep; we don't wait for it any longer than this.
KILL_SECONDS = 10.0

# An agent with such ranks hangs up within processes.SWEEP_SECONDS. One that a rank has stopped never does.
SWEEP_SECONDS = 15.0

# A silent node is found lost up to a ping's interval after its time.
SILENCES = 1.5

# Of the nodes of a job that may go on without its head, the head's own.
HEADS_OWN = 0

Phase = Literal["running", "stopping", "clearing", "over"]

# The arrows of the diagram above.
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "running": ("stopping", "clearing", "over"),
    "stopping": ("clearing", "over"),
    "clearing": ("running", "over"),
    "over": (),
}


class Judgement(NamedTuple):
    """What the last attempt means for the next one."""

    refusal: str = ""  # why the ranks must not start again
    doubted: Mapping[int, tuple[int, str]] = {}  # nodes whose own hardware has failed: how often, and how the last time


class FinishAttempt(Message):
    """Have the agents sweep up and drain the output, then exit or get ready to start the ranks again."""

    leave: bool
    grace: float = 0.0  # seconds for what the ranks left behind to end by itself


class Meet(Message):
    """Find an address at which these nodes can meet: report SeatsReady, or NodeLost for those that can't reach it."""

    seats: tuple[Seat, ...]


class Restart(Message):
    """Start all ranks again; `attempt` is 1 for the first time."""

    attempt: int
    cause: Cause
    restarts: int  # how many of the restarts that the user allows have been used
    counted: bool  # this is one of them
    seats: tuple[Seat, ...]


class Reopen(Message):
    """Try to reconnect to these lost nodes until they are back (NodeJoined)."""

    nodes: tuple[int, ...]


class Release(Message):
    """Let this node go: nothing of the job is left on it."""

    node: int
    signum: int  # what its launchpad got


class HandOver(Message):
    """Our own node is to leave, and no rank is running: have the others go on. GaveWay once they can."""


class TakeStacks(Message):
    """Take the stacks of the ranks; the job ends when StacksTaken arrives, or when that takes too long.

    Unless they are wanted only soon, when the job's time is up.
    """

    why: str  # "soon", "timeout", "failure"


class Leave(Message):
    """Exit at once, whatever is still unsent or alive."""


class GiveUp(Message):
    """Count the nodes of these ranks as lost: they don't answer."""

    ranks: list[int]


class Suspend(Message):
    """Suspend the ranks, then ourselves (Ctrl-Z); resume them when we are resumed."""


Action = (
    SendSignal
    | PhaseChanged
    | NotRestarted
    | NodeDoubted
    | NodesAwaited
    | FinishAttempt
    | Meet
    | Restart
    | Reopen
    | Release
    | HandOver
    | TakeStacks
    | Leave
    | GiveUp
    | Suspend
)


class Machine:
    """One job's state."""

    def __init__(
        self,
        seats: Sequence[Seat],
        limits: Limits,
        now: float,
        *,
        spares: Mapping[int, int] | None = None,
        membership: Membership | None = None,
        waited: Callable[[ExceptionRaised], bool] = lambda _: False,
        judge: Callable[[], Judgement] = Judgement,
        silence: float = 0.0,
        restarts: int = 0,
        first: int = 0,
    ) -> None:
        """The ranks are about to start at `now`. All times are in seconds of one monotonic clock.

        `seats`: the nodes that they run on. `spares`: how many ranks each other node takes. `membership`: None if the
        job needs the nodes that it has. `waited`: whether an exception says that a rank waited for others in vain.
        `judge` is asked before each restart, when everything that the last attempt had to say is known. `silence`:
        after so many seconds a silent node is lost; 0: none can be silent. `restarts`: how many were used up under
        another head. `first`: the number of the first rank.
        """
        self.phase: Phase = "running"
        self.cause: Cause | None = None
        self.attempt = 0
        self._first = first
        self.running = self._ranks(seats)
        self.deadline: float | None = None
        self._seats = tuple(seats)
        self._taking_part = {seat.node for seat in seats}
        self._here = {seat.node: seat.ranks for seat in seats} | dict(spares or {})  # the connected nodes
        self._reopening: set[int] = set()  # the lost ones that are being reconnected to
        self._leaving: dict[int, int] = {}  # those that are to leave the job, by the signal that said so
        self._draining: set[int] = set()  # those that still send output of the last attempt
        self._meeting: tuple[Seat, ...] = ()  # the nodes that are about to take part
        self._membership = membership or Membership(len(seats), len(seats))
        self._limits = limits
        self._restarted = [now] * restarts  # when; only those that are counted
        self._judge = judge
        self._doubted: set[int] = set()  # nodes whose own hardware has failed repeatedly
        self._judged = False  # it has been asked about the last attempt
        self._awaited_until: float | None = None  # when to give up waiting for nodes
        self._counted = False  # the coming attempt is a restart that the user must have allowed
        self._left_well = False  # a rank of this attempt has exited with 0 by itself
        self._timeout_at: float | None = None
        self._ask_at: float | None = None  # when to ask for the stacks that the timeout will need; None: not any more
        if (timeout := limits.timeout) is not None:
            self._timeout_at = now + timeout
            self.deadline = self._ask_at = now + timeout - min(ASK_EARLIER_SECONDS, ASK_EARLIER_SHARE * timeout)
        self._grace_after_failure = GRACE_AFTER_FAILURE if limits.grace is None else limits.grace
        self._grace_after_request = GRACE_AFTER_REQUEST if limits.grace is None else limits.grace
        # Whether a silent node is lost must be known before its ranks count as unkillable.
        self._kill = (signal.SIGKILL, max(KILL_SECONDS, SILENCES * silence))
        self._ladder: list[tuple[int, float]] = []
        self._step_at = 0.0  # when the ranks get the next signal on it
        self._at_prompt: set[int] = set()  # ranks that wait for what a person types
        self._failed_at = 0  # when the first failure happened, in ns of the head's clock
        self._hurried = False  # Ctrl-C while stopping
        self._timed_out = False
        self._unanswered = False  # SIGKILL to the ranks that are running
        self._leftovers = False  # the job has ended well, and what its ranks left behind is waited for
        self._outvoted = ""  # why others may go on without us
        self._hands_over = False
        self._sent = 0  # the last signal that the ranks got from the ladder
        self._waited = waited
        self._in_vain: set[int] = set()  # ranks that waited in vain for others

    def __getstate__(self) -> dict[str, Any]:
        """For another head: everything but whom to ask."""
        return {name: value for name, value in vars(self).items() if name not in ("_waited", "_judge")}

    def go_on(self, before: "Machine") -> None:
        """Go on where another head's was."""
        vars(self).update(before.__getstate__())

    def move_clock(self, by: int) -> None:
        """The clock of events is ahead by so many ns from now on."""
        self._failed_at += by if self._failed_at else 0

    def underway(self) -> list[Action]:
        """What another head was doing for this."""
        actions: list[Action] = [Reopen(tuple(sorted(self._reopening)))] if self._reopening else []
        return [*actions, Meet(self._meeting)] if self.phase == "clearing" and self._meeting else actions

    @property
    def exit_code(self) -> int:
        """The job's exit code so far."""
        return self.cause.exit_code if self.cause else 0

    @property
    def stops_at(self) -> float | None:
        """When the job's timeout ends; while it is stopping, when the ranks that are left are killed."""
        if self.phase == "stopping":
            return self._step_at + sum(seconds for _, seconds in self._ladder[:-1])
        return self._timeout_at

    def on(self, event: Any, now: float, node: int = 0) -> list[Action]:
        """The actions for an event from `node`."""
        match event:
            case RankExited(time=at, rank=rank, code=code):
                return self._left(rank, Cause("failure", rank=rank, code=code) if code != 0 else None, at, now)
            case RankFailed(time=at, rank=rank, code=code, reason=reason) if self.phase != "over":
                return self._fail(Cause("failure", rank=rank, code=code, text=reason), at, now)
            case StartFailed(time=at, rank=rank, reason=reason):
                return self._left(rank, Cause("start", rank=rank, text=reason), at, now)
            case StopRequested(signum=signum):
                return self._on_signal(signum, now)
            case ConsoleClosed(reason=reason) if self.phase in ("running", "clearing"):
                return self._stop(Cause("console", text=reason), self._after_failure(), now)
            case ConsoleClosed(reason=reason) if self.phase == "stopping" and self._goes_on(now):
                self.cause = Cause("console", text=reason)  # nobody would see what the next attempt prints
            case AtPrompt(rank=rank, waits=waits):
                (self._at_prompt.add if waits else self._at_prompt.discard)(rank)
            case ExceptionRaised() if self._waited(event):
                self._in_vain.add(event.rank)
            case StacksTaken(why="failure") if self.phase == "running" and self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case StacksTaken(why="timeout") if self.phase == "running":
                return self._stop(Cause("timeout"), self._on_request(signal.SIGTERM), now)
            case Stalled(seconds=seconds) if self.phase == "running":
                return self._stop(Cause("stall", seconds=seconds), self._after_failure(), now)
            case LeftoversAwaited() if self.phase == "over":
                self._leftovers = True
            case Drained() if self.phase == "clearing" and node in self._draining:
                self._draining.discard(node)
                return [*self._release(node), *self._cleared(now)]
            case NodeLeaving(node=leaver, signum=signum):
                return self._leave(leaver, signum, now)
            case NodeLost():
                return self._lose(event, now)
            case GaveWay():
                return self._give_way(event, now)
            case NodeJoined():
                return self._welcome(event, now)
            case SeatsReady(seats=seats) if self.phase == "clearing":
                return self._restart(now) if seats == self._meeting else []
        return []

    def join(self, ranks: Sequence[int], node: int) -> None:  # noqa: ARG002
        """A rank of this node has spawned these."""
        self.running.update(ranks)

    def start_again(self, now: float) -> list[Action]:
        """Stop all ranks and start them again, as the user asks for it; the nodes are those that are here."""
        if self.phase != "running" or self.cause:
            return []
        return self._stop(Cause("joined"), self._on_request(signal.SIGTERM), now)

    def tick(self, now: float) -> list[Action]:
        """The actions that are due at `now`."""
        if self.deadline is None or now < self.deadline:
            return []
        match self.phase:
            case "running" if self.cause:
                return self._stop(self.cause, self._after_failure(), now)
            case "running" if self._timeout_at is not None and now < self._timeout_at:
                self.deadline, self._ask_at = self._timeout_at, None
                return [TakeStacks("soon")]
            case "running" if not self._timed_out:
                self._timed_out = True
                self.deadline = now + STACKS_SECONDS
                return [TakeStacks("timeout")]
            case "clearing" if self.deadline != self._timeout_at:
                return self._over(now)  # the nodes are still missing
            case "running" | "clearing":
                return self._stop(Cause("timeout"), self._on_request(signal.SIGTERM), now)
            case "stopping" if now < self._step_at:
                return self._step_at_prompt(now)
            case "stopping":
                return self._step(now)
            case "over" if self._unanswered:
                self.deadline, self._unanswered = None, False
                return [GiveUp(sorted(self.running))]
            case "over":
                return [Leave()]

    def _left(self, rank: int, failure: Cause | None, at: int, now: float) -> list[Action]:
        """A rank has exited, or could not start."""
        if self.phase in ("clearing", "over"):  # one that could not start has said so before it exits
            return []
        self.running.discard(rank)
        self._left_well = self._left_well or (failure is None and self.phase == "running")
        actions = self._fail(failure, at, now) if failure else []
        return actions if self.running else [*actions, *self._all_left(now)]

    def _fail(self, failure: Cause, at: int, now: float) -> list[Action]:
        """A rank has failed. While we are stopping that is a consequence, not a cause.

        Unless it happened earlier, on another node, than the one we heard of first: then it becomes the cause. If the
        failure was caused by what other ranks do or don't do, their stacks are taken before they are stopped.
        """
        if self.phase == "running":
            is_secondary = self._is_secondary(failure)
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

    # Nodes.

    def _lose(self, lost: NodeLost, now: float) -> list[Action]:
        """A node is gone, with its ranks or, if they had all left, with the last of their output."""
        self._here.pop(lost.node, None)
        self._draining.discard(lost.node)
        self._reopening.discard(lost.node)
        takes_part = lost.node in self._taking_part
        expected = self._leaving.pop(lost.node, None) is not None
        if self.phase == "over":
            if self.cause is None and takes_part:  # with the last of its output
                self.cause = Cause("lost", node=lost.node, text=lost.reason)
            return []
        again = self._reopen(lost.node) if self._membership.changes else []
        if self.phase == "clearing":
            self._blame(lost, takes_part and not expected)
            return [*again, *self._cleared(now)]
        if not takes_part:
            return again
        self._blame(lost, takes_part and not expected)
        self.running.difference_update(lost.ranks)
        if not self.running:
            return [*again, *self._all_left(now)]
        assert self.cause is not None
        return [*again, *(self._stop(self.cause, self._after_failure(), now) if self.phase == "running" else [])]

    def _give_way(self, event: GaveWay, now: float) -> list[Action]:
        """End the job here: others may go on with it."""
        self._outvoted = event.reason
        if self.phase == "clearing":
            return self._end_here(now)
        if self.phase == "over":
            return []
        if self.phase == "stopping":
            self._ladder = [self._kill]
            return self._step(now)
        return self._stop(Cause("lost", node=event.node, text=event.reason), [self._kill], now)

    def _end_here(self, now: float) -> list[Action]:
        """The job may go on elsewhere."""
        if HEADS_OWN in self._leaving:
            self.cause = Cause("signal", signum=self._leaving[HEADS_OWN])
        return self._refuse(self._outvoted, now)

    def _blame(self, lost: NodeLost, takes_part: bool) -> None:
        """Other ranks may have failed because of it, and their exits may be heard first."""
        earlier = self.cause and self.cause.kind in ("failure", "start") and lost.time < self._failed_at
        # The host may have killed its ranks as it went down.
        own = self.cause and self.cause.rank in lost.ranks and self.cause.code == -signal.SIGKILL
        # MPICH crashes in ranks that talk to one that has vanished.
        crashed = self.cause and self.cause.kind == "failure" and self.cause.code == -signal.SIGSEGV
        secondary = self.cause and (self._is_secondary(self.cause) or crashed)
        planned = self.cause and self.cause.kind in ("joined", "left")
        if takes_part and (not self.cause or planned or earlier or own or secondary):
            self.cause = Cause("lost", node=lost.node, text=lost.reason)

    def _is_secondary(self, cause: Cause) -> bool:
        """Whether a rank failed because of what others did, or did not do."""
        return cause.kind == "failure" and (cause.rank in self._in_vain or cause.code == -signal.SIGABRT)

    def _welcome(self, joined: NodeJoined, now: float) -> list[Action]:
        """A node can take part: now, with the next attempt, or when another one is lost."""
        self._here[joined.node] = joined.slots
        self._reopening.discard(joined.node)
        if self.phase == "clearing":
            return self._cleared(now)
        of = self._membership
        wanted = of.elastic and not of.waits and len(self._seats) < of.most
        if self.phase != "running" or self.cause or not wanted or self._left_well:
            return []
        return self._stop(Cause("joined", node=joined.node), self._on_request(signal.SIGTERM), now)

    def can_spare(self, node: int, now: float) -> bool:
        """Whether the job goes on if this node leaves, or has been told to leave already."""
        if node in self._leaving:
            return True
        if node not in self._here or not self._membership.changes:
            return False
        if self.phase == "over" or (self.phase == "stopping" and not self._goes_on(now)):
            return False
        here = {one: slots for one, slots in self._staying.items() if one != node}
        return bool(seated(self._membership, self._seats, here))

    def _leave(self, node: int, signum: int, now: float) -> list[Action]:
        """A node is to leave: its ranks may save their work first, so all are stopped as on request."""
        if node in self._leaving:
            if signum == signal.SIGINT and self.phase == "stopping":
                self._ladder = [(signal.SIGKILL, KILL_SECONDS)]
                return self._step(now)
            return []
        self._leaving[node] = signum
        if node not in self._taking_part and node != HEADS_OWN:
            return self._release(node)
        if self.phase == "running" and not self.cause:
            return self._stop(Cause("left", node=node), self._on_request(signum), now)
        if self.phase == "clearing" and node not in self._draining:
            return [*self._release(node), *self._cleared(now)]
        return []

    def _release(self, node: int) -> list[Action]:
        """Let a node go if it is to leave; the head's own goes last."""
        if node not in self._leaving or node == HEADS_OWN:
            return []
        del self._here[node]
        return [Release(node, self._leaving.pop(node))]

    @property
    def _staying(self) -> dict[int, int]:
        """The connected nodes that are not about to leave."""
        return {node: slots for node, slots in self._here.items() if node not in self._leaving}

    def _reopen(self, *nodes: int) -> list[Action]:
        new = tuple(node for node in nodes if node not in self._reopening)
        self._reopening.update(new)
        return [Reopen(new)] if new else []

    # From one attempt to the next.

    def _all_left(self, now: float) -> list[Action]:
        """No rank is running any more: end the job, or start the next attempt."""
        goes_on = self._goes_on(now)
        if goes_on and self._outvoted:
            return self._end_here(now)
        if not goes_on:
            most, period = self._limits.max_restarts
            if self._restartable and most and period is not None:
                return self._refuse(f"{most} restarts in {duration(period)} are used up; not restarted", now)
            return self._over(now)
        self._counted = not self._changes_nodes
        self._judged = not self._counted
        self._awaited_until = None
        self._enter("clearing")
        self.deadline = self._timeout_at
        self._draining = self._taking_part & self._here.keys()
        return [FinishAttempt(leave=False)] if self._draining else self._cleared(now)

    def _goes_on(self, now: float) -> bool:
        """Whether another attempt follows."""
        possible = self._membership.returns or bool(self._next_seats())
        return self._changes_nodes or (self._restartable and self.may_restart(now) and possible)

    def may_restart(self, now: float) -> bool:
        """Whether the restarts that the user allows are not used up."""
        most, period = self._limits.max_restarts
        return sum(period is None or now - at < period for at in self._restarted) < most

    @property
    def _restartable(self) -> bool:
        return self.cause is not None and self.cause.kind in ("failure", "lost")

    @property
    def _changes_nodes(self) -> bool:
        """Whether another attempt follows without being a restart: with other nodes."""
        if self.cause is None or self.cause.kind not in ("lost", "joined", "left") or not self._membership.changes:
            return False
        return self._membership.elastic or bool(self._next_seats())

    def _refuse(self, reason: str, now: float) -> list[Action]:
        return [NotRestarted(int(now * 1e9), reason), *self._over(now)]

    def _next_seats(self) -> tuple[Seat, ...]:
        return seated(self._membership, self._seats, self._staying, self._doubted)

    def _cleared(self, now: float) -> list[Action]:
        """Go on once nothing of the last attempt is left, and enough nodes are connected and have met."""
        if self._draining:
            return []
        if not self._judged:
            self._judged = True
            judgement = self._judge()
            if judgement.refusal:
                return self._refuse(judgement.refusal, now)
            if new := judgement.doubted.keys() - self._doubted:
                self._doubted |= new
                told = [NodeDoubted(int(now * 1e9), node, *judgement.doubted[node]) for node in sorted(new)]
                return [*told, *self._cleared(now)]
        if HEADS_OWN in self._leaving:
            if self._hands_over:
                return []
            self._hands_over = True
            return [HandOver()]
        seats = self._next_seats()
        if not seats:
            self._meeting = ()
            missing = [seat.node for seat in self._seats if seat.node not in self._here]
            actions = self._reopen(*missing)
            if not self._membership.returns:
                return self._over(now)
            if self._awaited_until is None:
                self._awaited_until = now + NODES_SECONDS
                actions.append(NodesAwaited(int(now * 1e9), missing, NODES_SECONDS))
            limit = self._awaited_until
            self.deadline = limit if self._timeout_at is None else min(limit, self._timeout_at)
            return actions
        self.deadline = self._timeout_at
        if seats == self._meeting:
            return []
        self._meeting = seats
        return [Meet(seats)]

    @property
    def restarts(self) -> int:
        """How many of the restarts that the user allows have been used."""
        return len(self._restarted)

    def _restart(self, now: float) -> list[Action]:
        assert self.cause is not None  # the reason for the restart
        failed, self.cause = self.cause, None
        self._seats, self._meeting = self._meeting, ()
        self._taking_part = {seat.node for seat in self._seats}
        self._in_vain.clear()
        self._at_prompt.clear()
        self._left_well = False
        self._enter("running")
        self.deadline = self._ask_at or self._timeout_at
        self.attempt += 1
        self._restarted += [now] * self._counted
        self.running = self._ranks(self._seats)
        return [Restart(self.attempt, failed, self.restarts, self._counted, self._seats)]

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if signum == signal.SIGQUIT:
            return []
        if signum == signal.SIGTSTP:
            return [Suspend()] if self.phase != "over" else []
        if signum not in STOPPING:
            return [SendSignal(signum)] if self.phase in ("running", "stopping") else []
        if self._leftovers:
            self._leftovers = False
            return [SendSignal(signal.SIGKILL)]
        if self.phase == "over":  # only output is left, and perhaps nobody reads it
            if self.cause is None or self._outvoted:  # others may go on: this node is to leave
                self.cause = Cause("signal", signum=signum)
            return [Leave()]
        if self.phase == "stopping":
            return self._on_another_signal(signum, now)
        return self._stop(Cause("signal", signum=signum), self._on_request(signum), now)

    def _on_another_signal(self, signum: int, now: float) -> list[Action]:
        """A stop signal while we are stopping."""
        if self.cause and self.cause.kind in ("joined", "left"):  # the first one for the whole job
            self.cause = Cause("signal", signum=signum)
            ladder = self._on_request(signum)
            if ladder[0][0] == self._sent:
                return []
            self._ladder = ladder
            return self._step(now)
        if self._goes_on(now):
            self.cause = Cause("signal", signum=signum)  # cancel the restart
        if signum != signal.SIGINT:
            return [SendSignal(signum)]
        self._hurried = True
        self._ladder = [(signal.SIGKILL, KILL_SECONDS)]
        return self._step(now)

    def _on_request(self, signum: int) -> list[tuple[int, float]]:
        """The ladder of a stop that the user asked for or planned, so that the ranks can save their state."""
        grace = self._grace_after_request
        first = self._limits.stop_signal or signum
        ladder: list[tuple[int, float]] = [(first, grace), self._kill]
        if first != signal.SIGTERM and (self._limits.stop_signal or first == signal.SIGINT):
            ladder.insert(1, (signal.SIGTERM, min(grace, GRACE_AFTER_FAILURE)))
        return ladder

    def _after_failure(self) -> list[tuple[int, float]]:
        return [(signal.SIGTERM, self._grace_after_failure), self._kill]

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
            over = self._over(now)
            if self.deadline is None:
                self.deadline, self._unanswered = now + SWEEP_SECONDS, True
            return over
        signum, seconds = self._ladder.pop(0)
        self._sent = signum
        self.deadline = self._step_at = now + seconds
        if self._waiting_at_prompt:
            self.deadline = min(self._step_at, now + GRACE_AT_PROMPT)
        actions: list[Action] = [self._changed(now, signum, seconds)]
        return [*actions, SendSignal(signum, stops=signum == self._limits.stop_signal)] if self.running else actions

    @property
    def _waiting_at_prompt(self) -> list[int]:
        """The ranks that can have the next signal early, if that only asks."""
        asks = bool(self._ladder) and self._ladder[0][0] != signal.SIGKILL
        return sorted(self._at_prompt & self.running) if asks else []

    def _step_at_prompt(self, now: float) -> list[Action]:
        """The ranks that are still at a prompt get the next signal; the others have the rest of their time."""
        self.deadline = self._step_at
        ranks = self._waiting_at_prompt
        if not ranks:
            return []
        signum = self._ladder[0][0]
        changed = self._changed(now, signum, self._step_at - now)._replace(ranks=ranks)
        return [changed, SendSignal(signum, stops=signum == self._limits.stop_signal, ranks=ranks)]

    def _over(self, now: float) -> list[Action]:
        self._enter("over")
        # A paused reader may still want the rest of the output, so wait without limit, unless the user hurries us or
        # has set a timeout.
        self.deadline = None
        if self._hurried or (self.cause and self.cause.kind in ("timeout", "stall")):
            self.deadline = now + (HURRY_SECONDS if self._hurried else TIMEOUT_DRAIN_SECONDS)
        grace = 0.0 if self.cause else self._grace_after_request
        return [self._changed(now, 0, 0.0), FinishAttempt(leave=True, grace=grace)]

    def _changed(self, now: float, signum: int, seconds: float) -> PhaseChanged:
        kind = self.cause.kind if self.cause else ""
        return PhaseChanged(int(now * 1e9), self.phase, kind, signum, seconds, sorted(self.running))

    def _ranks(self, seats: Sequence[Seat]) -> set[int]:
        return set(range(self._first, self._first + sum(seat.ranks for seat in seats)))
