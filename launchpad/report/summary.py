"""What is said about a job: notes while it stops, and after a failure a few lines on which rank failed, and how."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from launchpad.events import (
    STDERR,
    LogFailed,
    NodeLost,
    NoMpi,
    NotForked,
    Output,
    PhaseChanged,
    RankExited,
    RankRaised,
    RanksSpawned,
    RankStarted,
    Restarted,
    StraysEnded,
)
from launchpad.job.outcome import Cause, exit_in_words, ranks_in_words, signal_name
from launchpad.job.plan import Plan

# Of each rank's last error output this much is kept, and this many lines are shown.
TAIL_BYTES = 8192
TAIL_LINES = 20


class Exit(NamedTuple):
    """One rank's end."""

    time: int
    code: int
    memory: int
    memory_killed: bool


class Summary:
    """A sink that remembers; `report` puts it into words."""

    def __init__(self, say: Callable[[str], None], quiet: bool, plan: Plan, clock: float) -> None:
        """`say` shows a note at once, unless `quiet`; `clock` turns an event's time in seconds into one since 1970."""
        several = len(plan.nodes) > 1
        self._nodes = [node.name for node in plan.nodes]
        self._names = {
            rank.rank: f"rank {rank.rank} on {node.name}" if several else f"rank {rank.rank}"
            for node in plan.nodes
            for rank in node.ranks
        }
        self._ranks = [[rank.rank for rank in node.ranks] for node in plan.nodes]
        self._lost: dict[int, str] = {}  # nodes, and why
        self._say = say if not quiet else lambda _: None
        self._tails: dict[int, bytes] = {}
        self._raised: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exit] = {}
        self._started = 0
        self._clock = clock
        self._stopping_at = 0
        self._stopped: list[int] = []
        self._history: list[str] = []  # of the attempts before this one

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing here waits for time."""

    def close(self) -> None:
        """Nothing is held open."""

    def on(self, event: Any) -> bool:
        """Remember what the report will need; say what the user should know now."""
        match event:
            case Output(_, rank, stream, data):
                if stream == STDERR:
                    self._tails[rank] = (self._tails.get(rank, b"") + data[-TAIL_BYTES:])[-TAIL_BYTES:]
            case NodeLost(_, node, reason):
                self._lost[node] = reason
            case RankStarted(at, rank, pid):
                self._started = self._started or at
                self._pids[rank] = pid
            case RankRaised(_, rank, error):
                self._raised[rank] = error
            case RankExited(at, rank, code, memory, memory_killed):
                self._exits[rank] = Exit(at, code, memory, memory_killed)
            case NotForked(_, reason):
                self._say(f"ranks are executed one by one, and each imports torch itself: {reason}")
            case NoMpi():
                self._say(
                    "no rank has called MPI_Init of an MPICH (pip install mpich) or an Intel MPI; under any other MPI "
                    "each rank is a world of its own"
                )
            case RanksSpawned():
                self._names.update((rank, f"rank {rank}, spawned by rank {event.by},") for rank in event.ranks)
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
        return False

    def _phase(self, event: PhaseChanged) -> None:
        if event.phase != "stopping":
            return
        if not self._stopping_at:
            self._stopping_at = event.time
            self._stopped = event.ranks
            if event.cause == "signal" and event.ranks:
                name = signal_name(event.signum)
                self._say(
                    f"sent {name} to {ranks_in_words(event.ranks)}; they have {event.seconds:g} s"
                    + (", Ctrl-C kills them at once" if name == "SIGINT" else "")
                )
        elif event.ranks:
            name = signal_name(event.signum)
            self._say(f"{ranks_in_words(event.ranks)} still running: sent {name}")

    def _restarted(self, event: Restarted) -> None:
        if event.rank >= 0:
            after = (self._exits[event.rank].time - self._started) / 1e9
            failure = f"{self._names[event.rank]}, {exit_in_words(event.code)} after {after:.2f} s"
        else:
            failure = f"{self._nodes[event.node]} was lost ({self._lost[event.node]})"
        self._say(f"failed: {failure}; all ranks are started again (restart {event.attempt} of {event.most})")
        self._history.append(failure)
        self._tails, self._raised, self._exits, self._lost = {}, {}, {}, {}
        self._started = self._stopping_at = 0
        self._stopped = []

    def report(self, cause: Cause, folder: str | None, timeout: float | None) -> str:
        """The account of a job that failed: the cause first, then what the cause did to the others, then the logs."""
        match cause.kind:
            case "failure":
                lines = self._failure(cause)
            case "start":
                lines = [f"{self._names[cause.rank]} could not be started: {cause.text}"]
            case "lost":
                lines = [self._loss(cause.node, cause.text)]
            case "peer":
                lines = [f"the world failed on another node: {cause.text}"]
            case "timeout":
                lines = [f"the job was ended: it ran longer than --timeout {timeout:g} s"]
            case "stall":
                lines = [f"the job was ended: it hangs, no rank has written or got on for {cause.seconds:.0f} s"]
            case "signal":
                lines = [f"the job was ended by {signal_name(cause.signum)}"]
            case "console":
                lines = [f"the job was ended: standard output takes no more ({cause.text})"]
        lines += [self._loss(node, reason) for node, reason in self._lost.items() if node != cause.node]
        gone = {rank for node in self._lost for rank in self._ranks[node]}
        others = [rank for rank in self._stopped if rank != cause.rank and rank not in gone]
        if others:
            lines.append(f"stopped because of it: {ranks_in_words(others)}")
        told = {cause.rank, *others}
        also = [rank for rank, end in self._exits.items() if end.code != 0 and rank not in told]
        if also and cause.kind in ("failure", "lost"):
            lines.append(f"failed too: {ranks_in_words(also)}")
        if self._history:
            lines.append(f"the {len(self._history)} attempts before: {'; '.join(self._history[-5:])}")
        if folder:
            lines.append(f"logs: {folder}")
        return "\n".join(lines)

    def _loss(self, node: int, reason: str) -> str:
        if len(self._nodes) == 1:
            return f"the job's node was lost: {reason}; its ranks were killed"
        return f"{self._nodes[node]} was lost: {reason}; it ran {ranks_in_words(self._ranks[node])}"

    def _failure(self, cause: Cause) -> list[str]:
        rank = cause.rank
        end = self._exits[rank]
        date = time.strftime("%H:%M:%S", time.localtime(self._clock + end.time / 1e9))
        after = (end.time - self._started) / 1e9
        how = cause.text or exit_in_words(cause.code)
        if end.memory_killed:
            how += f", by the kernel for want of memory: it had {end.memory / 2**20:.0f} MiB"
        elif cause.code == -9 and not cause.text:
            how += "; the kernel's memory counters did not rise, so somebody sent the signal"
        when = f"pid {self._pids.get(rank, 0)}, {after:.2f} s after the start, {date}"
        lines = [f"{self._names[rank]} failed first: {how} ({when})"]
        return lines + [f"    {line}" for line in self._last_words(rank)]

    def _last_words(self, rank: int) -> list[str]:
        text = _error_file_text(self._raised.get(rank, ""))
        if not text:
            text = self._tails.get(rank, b"").decode(errors="replace")
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip().split("\n") if line]
        if len(lines) > TAIL_LINES:
            lines = [f"… ({len(lines) - TAIL_LINES} lines above)", *lines[-TAIL_LINES:]]
        return lines


def _error_file_text(error: str) -> str:
    """The traceback in an error file as torch's @record writes it; "" where it holds none.

    {"message": {"message": "Type: text", "extraInfo": {"py_callstack": "…", "timestamp": "…"}}}, or a plain string
    as the inner message.
    """
    try:
        message = json.loads(error)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        return str(stack or message.get("message") or "")
    return message if isinstance(message, str) else ""
