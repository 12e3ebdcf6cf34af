"""What the user is told about a job while it runs and stops: notes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.job.duration import duration
from launchpad.job.hosts import some_of
from launchpad.job.limits import IDLE_SECONDS
from launchpad.job.outcome import ranks_in_words, signal_name
from launchpad.protocol.events import (
    SILENT,
    AtPrompt,
    CantLead,
    ContactLost,
    ContactRegained,
    FaultInjected,
    FaultMissed,
    HeadResumed,
    ImageUnused,
    LeftoversAwaited,
    LogFailed,
    NodeDoubted,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    NodesAwaited,
    NodeUnwell,
    NoMpi,
    NotForked,
    NotResumable,
    OrphansKilled,
    OwnWorld,
    PhaseChanged,
    RanksBound,
    RanksHeld,
    RanksSpawned,
    RecordDropped,
    Restarted,
    RoleAwaited,
    StdinUnused,
    WorldAsked,
    WorldRestarted,
)
from launchpad.protocol.printable import printable

# What a person's pause at a prompt or in a debugger does to the others.
STANDING_STILL = (
    "--timeout and --stall-timeout are paused, but torch's own time-outs in the ranks that wait for it are not "
    "(default: 30 minutes for gloo, 10 for NCCL)"
)

# So many groups of ranks are named if all are quiet.
IDLE_PLACES = 3

# When to remind the user of that.
PROMPT_SECONDS = 300.0


def not_forked(reason: str, where: str = "") -> str:
    """The note that ranks are executed although they should have been forked. `where`: " on NAME", or ""."""
    return f"ranks{where} can't be forked, so each imports everything itself: {reason}"


def no_kept_image(reason: str, where: str) -> str:
    """The note that a node was started cold, although it keeps an image. `where`: " on NAME", or ""."""
    return f"no kept image was used{where}: {reason}"


class Notes:
    """A sink. It comes before the diagnosis: what an event means to the user depends on what was known before."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        say: Callable[[str], None],
        quiet: bool,
        verbose: bool = False,
        *,
        reports_bindings: bool = False,
        hides: Callable[[int], str] = lambda _: "",
    ) -> None:
        """`say` shows a note; `quiet` suppresses the notes; `verbose`: also say why no kept image was used.

        `reports_bindings`: say which CPUs each rank is bound to. `hides`: the option that keeps a local rank's standard
        output, and so its prompts, off the console, or "".
        """
        self._show = say if not quiet else lambda _: None
        self._verbose = verbose
        self._reports_bindings = reports_bindings
        self._hides = hides
        self._told_of_prompt = False  # that it can't be seen
        self._bound: list[Any] = []  # as it was said
        self._diagnosis = diagnosis
        self._history = diagnosis.history
        self._own_worlds: set[int] = set()  # ranks
        self._unwell: set[int] = set()  # nodes that are about to be lost for that
        self._stopping = False
        self._prompt = -1  # the rank that is at a prompt
        self._tellers: dict[type, Callable[[Any], None]] = {  # of what takes more than a sentence
            RanksBound: self._ranks_bound,
            RoleAwaited: self._role_awaited,
            ContactLost: self._contact,
            ContactRegained: self._contact,
            NodesAwaited: self._nodes_awaited,
            CantLead: self._cant_lead,
            NodeUnwell: self._left_out,
            NodeDoubted: self._doubted,
            NodeLost: self._lost,
            PhaseChanged: self._phase,
            Restarted: self._restarted,
            WorldRestarted: self._of_world,
            WorldAsked: self._of_world,
        }
        self.deadline: float | None = None

    def _say(self, text: str) -> None:
        """Show a note: one line, whatever names and reasons there are in it."""
        self._show(printable(text))

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Remind the user of ranks that wait for the one at a prompt."""
        self.deadline = None
        minutes = f"{PROMPT_SECONDS / 60:.0f} minutes"
        self._say(f"rank {self._prompt} has been at a prompt for {minutes}: {STANDING_STILL}")

    def close(self) -> None:
        """There is nothing to close."""

    def on(self, event: Any) -> bool:
        """Say what the user should know now."""
        self._tellers.get(type(event), self._tell)(event)
        return False

    def _tell(self, event: Any) -> None:
        match event:
            case NotForked(reason=reason, node=node):
                self._say(not_forked(reason, self._on(node)))
            case ImageUnused(reason=reason, node=node):
                if self._verbose:
                    self._say(no_kept_image(reason, self._on(node)))
            case NoMpi(library=library, why=why, node=node):
                self._say(_no_mpi(library, why, self._of_role(node) + self._on(node)))
            case OwnWorld(rank=rank):
                self._own_world(rank)
            case RanksSpawned():
                by, ranks = self._history.in_words([event.by]), self._history.in_words(event.ranks)
                self._say(f"{by} spawned {ranks}: {' '.join(event.argv)}")
            case RecordDropped(rank=rank, what=what, why=why):
                self._say(f"{self._history.name(rank)}: {what} can't be used: {why}")
            case LogFailed(path=path, reason=reason):
                self._say(f"{path}: {reason}; the rank's output is missing there from now on")
            case OrphansKilled(processes=processes, node=node):
                self._say(f"killed {_left_behind(processes, self._on(node))}")
            case LeftoversAwaited(processes=processes, seconds=seconds, node=node):
                them, left = "it" if len(processes) == 1 else "them", _left_behind(processes, self._on(node))
                self._say(f"waiting up to {seconds:g} s for {left}; Ctrl-C kills {them} at once")
            case NodeJoined(node=node, name=name):
                known = node < len(self._history.planned.nodes)
                self._say(f"{name} is back" if known else f"{name} has joined")
            case NodeLeaving(node=node, signum=signum):
                self._say(f"{self._history.node_name(node)} leaves the job: its launchpad got {signal_name(signum)}")
            case NodeRefused(name=name, reason=reason):
                self._say(f"{name} can't join: {reason}")
            case FaultInjected():
                self._say(f"injected: {self._history.fault(event)}")
            case FaultMissed(fault=fault):
                self._say(f"not injected: {fault}; the job ended first")
            case StdinUnused(size=size):
                what = f"read {size} byte{'s' if size > 1 else ''} of standard input that no rank used"
                self._say(f"{what}; run it with < /dev/null to leave standard input to other commands")
            case AtPrompt(rank=rank, waits=waits):
                self._at_prompt(rank, waits=waits)
            case HeadResumed(away=away):
                job, before = self._history.planned.job, duration(round(away)) if away >= 1 else f"{away:.1f} s"
                self._say(f"took over job {job} after {before} without launchpad; `launchpad logs {job}` shows all")
            case NotResumable(reason=reason):
                self._say(f"`launchpad resume` can't take over if launchpad is killed from now on: {reason}")
            case RanksHeld(why="idle", lines=lines):
                self._say(_idle(lines))

    def _contact(self, event: ContactLost | ContactRegained) -> None:
        name = self._history.node_name(event.node)
        if isinstance(event, ContactLost):
            goes_on = f"its ranks go on for {duration(event.seconds)}, and launchpad tries to reach it"
            self._say(f"lost contact with {name}: {goes_on}")
        else:
            self._say(f"{name} is in contact again, after {event.seconds:.1f} s")

    def _left_out(self, event: NodeUnwell) -> None:
        self._unwell.add(event.node)
        name = self._history.node_name(event.node)
        self._say(f"{name} is left out: its health check {event.reason}{':' if event.lines else ''}")
        for line in event.lines:
            self._say(f"  {line}")

    def _doubted(self, event: NodeDoubted) -> None:
        where = self._history.node_name(event.node)
        self._say(
            f"{where} has failed {event.times} times because of its own hardware ({event.reason}): "
            "from now on it comes last, after all spares"
        )

    def _lost(self, event: NodeLost) -> None:
        if event.node in self._unwell:
            self._unwell.discard(event.node)
        elif not self._history.takes_part(event.node):
            self._say(f"{self._history.node_name(event.node)}, which runs no ranks, was lost ({event.reason})")

    def _cant_lead(self, event: CantLead) -> None:
        name, by = self._history.node_name, some_of([self._history.node_name(node) for node in event.by])
        reach = "doesn't reach" if len(event.by) == 1 else "don't reach"
        lost = f"if {name(0)} is lost, {name(event.node)} can't lead the job"
        self._say(f"{lost}: {by} {reach} it at {event.place} ({event.why})")

    def _nodes_awaited(self, event: NodesAwaited) -> None:
        names = [self._history.node_name(node) for node in event.nodes]
        reasons = {loss.reason for loss in self._history.lost.values()}
        why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
        was = "was" if len(names) == 1 else "were"
        self._say(f"{some_of(names)} {was} lost{why}; waiting up to {event.seconds:.0f} s for a replacement")

    def _ranks_bound(self, event: RanksBound) -> None:
        if self._reports_bindings and event.ranks != self._bound:
            from launchpad.job.binding import in_words

            self._bound = event.ranks
            lines = [f"rank {rank} on {node}: {in_words(*where)}" for rank, node, *where in event.ranks]
            self._show("\n".join(map(printable, lines)))

    def _on(self, node: int) -> str:
        return f" on {self._history.node_name(node)}" if self._history.several else ""

    def _of_role(self, node: int) -> str:
        """Whose ranks those of the node are, if the job has roles."""
        nodes = self._history.planned.nodes
        ranks = nodes[node][1] if 0 <= node < len(nodes) else ()  # the number may be an agent's own invention
        role = self._history.role(next(iter(ranks), -1))
        return f" of {role}" if role else ""

    def _own_world(self, rank: int) -> None:
        self._own_worlds.add(rank)
        if len(self._own_worlds) == 2:
            them = ranks_in_words(sorted(self._own_worlds))
            self._say(f"{them} use MPI, each in a world of its own; --backend mpi makes all ranks one world")

    def _at_prompt(self, rank: int, *, waits: bool) -> None:
        if waits and not self._told_of_prompt:
            self._tell_of_hidden_prompt(rank)
        waits = waits and len(self._history.ranks) > 1 and not self._stopping
        self._prompt = rank if waits else -1
        self.deadline = time.monotonic() + PROMPT_SECONDS if waits else None

    def _tell_of_hidden_prompt(self, rank: int) -> None:
        nodes = self._history.planned.nodes
        local_rank = next((ranks.index(rank) for _, ranks in nodes if rank in ranks), 0)
        option = self._hides(local_rank)
        if option:
            self._told_of_prompt = True
            remedy = "--tee 1 shows it" if option == "--redirects" else f"add {local_rank} to it"
            self._say(f"rank {rank} waits at a prompt that {option} hides; {remedy}")

    def _role_awaited(self, event: RoleAwaited) -> None:
        who = ", ".join(event.waiting) or "the job"
        self._say(f"{who} waits for {event.role}, which is not ready after {event.seconds:.0f} s ({event.why})")

    def _phase(self, event: PhaseChanged) -> None:
        self._prompt, self.deadline = -1, None
        if event.phase != "stopping":
            return
        name = signal_name(event.signum)
        if self._stopping and event.ranks:
            self._say(f"{self._history.in_words(event.ranks)} still running: sent {name}")
        elif event.cause in ("signal", "timeout") and event.ranks:
            again = event.cause == "signal" and self._history.signum == signal.SIGINT
            self._say(
                f"sent {name} to {self._history.in_words(event.ranks)}; they have {event.seconds:g} s"
                + (" to exit; Ctrl-C kills them at once" if again else " to exit")
            )
        self._stopping = True

    def _restarted(self, event: Restarted) -> None:
        self._stopping = False
        nodes = event.nodes or self._history.planned.nodes
        taking_part = sorted((ranks[0], name) for name, ranks in nodes if ranks)
        names = some_of([name for _, name in taking_part])
        if self._diagnosis.changes_nodes:
            self._say(f"starting all ranks again on {names}")
            return
        failure = self._diagnosis.summary()
        if event.counted:
            of = f" of {event.most}" if not event.period else f"; at most {event.most} in {duration(event.period)}"
            self._say(f"failed: {failure}; restarting all ranks (restart {event.restarts}{of})")
        else:
            self._say(f"failed: {failure}; going on with {names}")

    def _of_world(self, event: WorldRestarted | WorldAsked) -> None:
        if isinstance(event, WorldAsked):
            what = "stopping" if event.what == "stop" else "restarting"
            self._say(f"{what} {event.world}, as somebody has asked for it")
            return
        if not event.counted:
            return
        failure = self._diagnosis.world(event.world).summary()
        of = f" of {event.most}" if not event.period else f"; at most {event.most} in {duration(event.period)}"
        self._say(f"failed: {failure}; restarting {event.world} (restart {event.restarts}{of})")


def _idle(lines: Sequence[str]) -> str:
    """`no output or progress for 60 s: rank 3 is in …; ranks 0-2 wait in …; …`."""
    # Nobody has asked for this: a rank that would have to be interrupted for its stacks was not asked for them either.
    places = [line.replace(f" ({SILENT})", "") for line in lines[:IDLE_PLACES]]
    where = "; ".join([*places, *(["…"] if len(lines) > IDLE_PLACES else [])])
    remedy = "launchpad stacks shows more, and --stall-timeout SECONDS would end a job that hangs"
    return f"no output or progress for {IDLE_SECONDS:.0f} s: {where}; {remedy} (--no-advice: don't say this)"


def _left_behind(processes: Sequence[str], where: str) -> str:
    """`2 processes that ranks left behind on node1: 71 python, 72 sleep`."""
    count = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    return f"{count} that ranks left behind{where}: {some_of(processes)}"


def _no_mpi(library: str, why: str, where: str) -> str:
    if not library:
        none = f"no rank{where} called MPI_Init"
        return f"{none}; if they use Open MPI: {why}" if why else none
    if why:
        return f"each rank{where} is a world of its own: {why}"
    served, other = ("Open MPI", "mpich") if library == "openmpi" else ("MPICH or Intel MPI", "openmpi")
    return f"no rank{where} called MPI_Init of {served}; if they use another MPI, name it (--mpi {other})"
