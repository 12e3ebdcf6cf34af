"""Turns a job's events into a timeline: a row for the job, each host and each rank, and curves. Pure.

Times are in ns since the job was planned, by the one clock to which the head converts the times of all hosts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from launchpad.diagnosis import tracebacks
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.history import History, RankHistory
from launchpad.diagnosis.verdict import Verdict, verdict_on
from launchpad.diagnosis.verdict_text import summarize
from launchpad.job.hosts import some_of
from launchpad.job.outcome import exit_in_words, ranks_in_words, signal_name
from launchpad.protocol.events import (
    AtPrompt,
    CollectivesEntered,
    ConsoleClosed,
    ContactLost,
    ContactRegained,
    Crashed,
    ExceptionRaised,
    FaultInjected,
    JobOver,
    LeftoversAwaited,
    MilestoneReached,
    ModulesImported,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NotForked,
    OrphansKilled,
    Output,
    PhaseChanged,
    RankExited,
    RankFailed,
    RanksHeld,
    RanksSpawned,
    RankStarted,
    Restarted,
    Stalled,
    StartFailed,
    StopRequested,
    WorldRestarted,
)
from launchpad.record.attempts import NONE, Passed

Outcome = Literal["", "well", "failed", "victim", "stopped", "lost", "running"]

# Most events are such, or exits; nothing is marked for them.
_QUIET = (RankStarted, Output)

# The rows that are no rank's.
JOB, HOST = -1, -2


class Span(NamedTuple):
    """Something that took time."""

    start: int
    end: int
    kind: Literal["attempt", "import", "start", "run", "prompt", "collective"]
    text: str
    outcome: Outcome = ""
    flow: str = ""  # what the spans of one collective, in all its ranks, have in common
    pid: int = 0  # of the process that ran

    @property
    def words(self) -> str:
        """The text, with the process."""
        return f"pid {self.pid}: {self.text}" if self.pid else self.text


class Mark(NamedTuple):
    """Something that happened at one moment."""

    time: int
    kind: Literal["milestone", "exception", "signal", "exit", "lost", "joined", "restart", "hang", "note"]
    text: str


class TimelineRow(NamedTuple):
    """What happened in the job as such (rank JOB), at a host (rank HOST), or in a rank."""

    name: str
    rank: int
    node: int
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Curve:
    """A quantity over time."""

    name: str
    unit: str
    by_rank: Mapping[int, tuple[tuple[int, float], ...]]  # (time, value) each; rank JOB: of all ranks together


class RankOutcome(NamedTuple):
    """How a rank ended, in the last attempt in which it ran."""

    rank: int
    host: str
    pid: int
    started: int
    ended: int
    how: str
    outcome: Outcome
    memory: int  # the peak resident set size, in bytes


@dataclass(frozen=True)
class Timeline:
    """The whole job."""

    wall: float  # the date of time 0, in seconds since 1970
    end: int
    rows: tuple[TimelineRow, ...]
    ranks: tuple[RankOutcome, ...]
    hosts: tuple[str, ...]  # by the numbers of the nodes
    curves: tuple[Curve, ...] = ()


class TimelineBuilder:
    """Takes the events of a recorded job one by one."""

    def __init__(self, diagnosis: Diagnosis, passed: Passed = NONE) -> None:
        """`diagnosis` gets the events, too. `passed`: attempts of which only the job's row tells."""
        self._diagnosis = diagnosis
        self._history = diagnosis.history
        self._begin = self._since(self._history.begun)  # of the attempt
        self._begins: dict[int, int] = {}  # by rank of a world that was started again alone: when
        self._last = self._begin
        self._spans: dict[tuple[int, int], list[Span]] = {}  # by rank and node
        self._marks: dict[tuple[int, int], list[Mark]] = {}
        self._prompts: dict[int, int] = {}
        self._collectives: dict[str, list[tuple[int, int, int, str]]] = {}  # by flow: (time, ns, rank, text) each
        self._ranks: dict[int, RankOutcome] = {}
        self._hosts = [name for name, _ in self._history.planned.nodes]
        self.begins = [one.ended for one in passed.attempts]  # when each attempt but the first began, as in the events
        for number, one in enumerate(passed.attempts):
            outcome: Outcome = "failed" if one.failed else "stopped"
            text = f"attempt {number}: {one.how}"
            self._span(Span(self._since(one.began), self._since(one.ended), "attempt", text, outcome), JOB)

    def on(self, event: Any) -> None:
        """Add an event."""
        at = self._at(event)
        if isinstance(event, Restarted):
            self._end_attempt(at)
            self._begin = at
            self.begins.append(event.time)
        if isinstance(event, WorldRestarted):
            self._end_world(event, at)
        self._diagnosis.on(event)
        self._hosts[len(self._hosts) :] = [name for name, _ in self._history.planned.nodes[len(self._hosts) :]]
        if type(event) not in _QUIET:
            self._note(at, event)
        self._last = max(self._last, self._at(event))

    def _at(self, event: Any) -> int:
        """When it was; an Output that read_events makes up has no time."""
        time = getattr(event, "time", 0)
        return max(0, time - self._history.planned.time) if time and self._history.planned.time else 0

    def _note(self, at: int, event: Any) -> None:
        match event:
            case ExceptionRaised(rank=rank, thread=thread, traceback=said):
                traceback = tracebacks.from_event(said)
                if traceback is not None and (traceback.type, traceback.message) != ("SystemExit", "0"):
                    where = f" at {place.file}:{place.line}" if (place := traceback.place) else ""
                    self._mark(at, rank, "exception", f"{thread and f'thread {thread}: '}{traceback.title}{where}")
            case Crashed(rank=rank):
                self._mark(at, rank, "exception", "crashed")
            case RankFailed(rank=rank, reason=reason):
                self._mark(at, rank, "exception", reason)
            case StartFailed(rank=rank, reason=reason):
                self._mark(at, rank, "exit", f"could not be started: {reason}")
            case RankExited(rank=rank, code=code):
                if code:
                    self._mark(at, rank, "exit", exit_in_words(code))
            case ModulesImported(seconds=seconds, modules=modules, node=node):
                text = f"importing {', '.join(modules)}"
                self._span(Span(max(0, at - int(seconds * 1e9)), at, "import", text), HOST, node)
            case MilestoneReached(rank=rank, what=what):
                texts = {"torch": "has imported torch.distributed", "group": "begins its first process group"}
                self._mark(at, rank, "milestone", texts.get(what, what))
            case CollectivesEntered(rank=rank, entries=entries):
                for group, number, what, before, took in entries:
                    flow = f"{self._history.attempt}/{group}/{number}"
                    self._collectives.setdefault(flow, []).append((at - before, took, rank, f"{what} {number}"))
            case AtPrompt(rank=rank, waits=waits):
                if waits:
                    self._prompts.setdefault(rank, at)
                elif rank in self._prompts:
                    self._span(Span(self._prompts.pop(rank), at, "prompt", "at a prompt"), rank)
            case _:
                self._note_of_job(at, event)

    def _note_of_job(self, at: int, event: Any) -> None:
        match event:
            case FaultInjected(rank=rank, node=node):
                self._mark(at, rank if rank >= 0 else HOST, "signal", f"injected: {self._history.fault(event)}", node)
            case NodeLost(node=node, reason=reason):
                self._mark(at, HOST, "lost", f"lost: {reason}", node)
            case NodeJoined(node=node, name=name):
                self._mark(at, HOST, "joined", f"{name} can take part", node)
            case NodeLeaving(node=node, signum=signum):
                self._mark(at, HOST, "signal", f"leaves the job: its launchpad got {signal_name(signum)}", node)
            case StopRequested(signum=signum, reason=reason):
                self._mark(at, JOB, "signal", reason or f"launchpad got {signal_name(signum)}")
            case PhaseChanged(phase="stopping", signum=signum, ranks=ranks) if signum and ranks:
                self._mark(at, JOB, "signal", f"{signal_name(signum)} to {ranks_in_words(ranks)}")
                for rank in ranks:
                    self._mark(at, rank, "signal", signal_name(signum))
            case Restarted(attempt=attempt):
                self._mark(at, JOB, "restart", f"restart {attempt}")
            case Stalled(seconds=seconds):
                self._mark(at, JOB, "hang", f"no output or progress for {seconds:.0f} s")
            case RanksHeld(why="idle", lines=lines):
                self._mark(at, JOB, "note", f"no output or progress; {'; '.join(lines[:1])}")
            case RanksHeld(why=why, ranks=ranks, lines=lines):
                self._mark(at, JOB, "hang", "; ".join(lines[:1]) or why)
                for rank in ranks:
                    self._mark(at, rank, "hang", "the others wait for it")
            case ConsoleClosed(reason=reason):
                self._mark(at, JOB, "signal", f"standard output can't be written to: {reason}")
            case NotForked(reason=reason, node=node):
                self._mark(at, HOST, "note", f"the ranks are not forked: {reason}", node)
            case RanksSpawned(by=by, ranks=ranks):
                self._mark(at, by, "note", f"spawned {ranks_in_words(ranks)}")
            case ContactLost(node=node):
                self._mark(at, HOST, "note", "lost contact; its ranks go on", node)
            case ContactRegained(seconds=seconds, node=node):
                self._mark(at, HOST, "note", f"in contact again, after {seconds:.1f} s", node)
            case OrphansKilled(processes=processes, node=node):
                self._mark(at, HOST, "note", f"killed what ranks had left behind: {some_of(processes)}", node)
            case LeftoversAwaited(processes=processes, node=node):
                self._mark(at, HOST, "note", f"waiting for what ranks have left behind: {some_of(processes)}", node)
            case JobOver(code=code):
                self._mark(at, JOB, "exit", exit_in_words(code))

    def _mark(self, at: int, rank: int, kind: Any, text: str, node: int = -1) -> None:
        self._marks.setdefault(self._key(rank, node), []).append(Mark(at, kind, text))

    def _span(self, span: Span, rank: int, node: int = -1) -> None:
        self._spans.setdefault(self._key(rank, node), []).append(span)

    def _key(self, rank: int, node: int) -> tuple[int, int]:
        return (rank, -1 if rank == JOB else node if rank == HOST else self._history.of(rank).node)

    def _end_attempt(self, at: int) -> None:
        history = self._history
        if not history.planned.time:
            return
        verdict = verdict_on(history)
        ended = verdict.kind == "none" or (verdict.kind == "running" and history.over is None)
        how = {"none": "every rank exited with code 0", "running": "running"}.get(
            verdict.kind, summarize(history, verdict) if verdict.cause else verdict.kind
        )
        outcome: Outcome = "failed" if not ended else "running" if verdict.kind == "running" else "well"
        self._span(Span(self._begin, at, "attempt", f"attempt {history.attempt}: {how}", outcome), JOB)
        for rank, since in self._prompts.items():
            self._span(Span(since, at, "prompt", "at a prompt"), rank)
        self._prompts.clear()
        self._end_ranks(history.ranks.values(), verdict, at)
        self._end_collectives()

    def _end_world(self, event: WorldRestarted, at: int) -> None:
        own = self._history.world(event.world)
        verdict = verdict_on(own)
        why = f": {summarize(own, verdict)}" if event.counted else ", as somebody had asked for it"
        self._mark(at, JOB, "restart", f"{event.world} started again{why}")
        self._end_ranks(own.ranks.values(), verdict, at)
        self._begins |= dict.fromkeys(event.ranks, at)

    def _end_ranks(self, ranks: Iterable[RankHistory], verdict: Verdict, at: int) -> None:
        judged, stopped = _judged(verdict), frozenset(verdict.stopped)
        for one in ranks:
            if one.started:
                self._end_rank(one, judged.get(one.rank) or _outcome(self._history, one, stopped), at)

    def _end_rank(self, one: RankHistory, outcome: Outcome, at: int) -> None:
        history, rank, started = self._history, one.rank, self._since(one.started)
        if one.exited is not None:
            end, how = self._since(one.exited.time), exit_in_words(one.exited.code)
        elif one.node in history.lost:
            end, how = self._since(history.lost[one.node].time), "its host was lost"
        else:
            end, how = at, "running"
        begin = self._begins.pop(rank, self._begin)
        self._span(Span(begin, started, "start", "connecting, importing and forking"), rank)
        self._span(Span(started, max(started, end), "run", how, outcome, pid=one.pid), rank)
        memory = one.exited.memory if one.exited else 0
        host = history.node_name(one.node)
        self._ranks[rank] = RankOutcome(rank, host, one.pid, started, max(started, end), how, outcome, memory)

    def _end_collectives(self) -> None:
        """Where it isn't known how long a collective took, it is shown until the last rank has entered it."""
        for flow, entered in self._collectives.items():
            last = max(at for at, _, _, _ in entered)
            for at, took, rank, text in entered:
                self._span(Span(max(0, at), at + took if took else last, "collective", text, flow=flow), rank)
        self._collectives.clear()

    def _since(self, time: int) -> int:
        return max(0, time - self._history.planned.time)

    def done(self, curves: Sequence[Curve] = ()) -> Timeline:
        """The timeline. `curves` are drawn below it; if the job's end is not recorded, it still ran at theirs."""
        if self._history.over is None:
            points = (points for curve in curves for points in curve.by_rank.values())
            self._last = max(self._last, max((at for one in points for at, _ in one), default=0))
        self._end_attempt(self._last)
        several = len(self._hosts) > 1
        by_node: dict[int, set[int]] = {}
        for rank, node in (*self._spans, *self._marks):
            if rank != JOB:
                by_node.setdefault(node, set()).add(rank)
        rows = [self._row("job", JOB, -1)]
        for node, here in sorted(by_node.items()):
            name = self._hosts[node] if 0 <= node < len(self._hosts) else f"node {node}"
            if several or HOST in here:
                rows.append(self._row(name, HOST, node))
            rows += [self._row(self._history.in_words([rank]), rank, node) for rank in sorted(here) if rank >= 0]
        ranks = tuple(self._ranks[rank] for rank in sorted(self._ranks))
        wall, end = self._history.planned.wall, max(1, self._last)
        return Timeline(wall, end, tuple(rows), ranks, tuple(self._hosts), tuple(curves))

    def _row(self, name: str, rank: int, node: int) -> TimelineRow:
        key = (rank, node)
        return TimelineRow(name, rank, node, tuple(self._spans.get(key, ())), tuple(self._marks.get(key, ())))


def _judged(verdict: Verdict) -> dict[int, Outcome]:
    """The ranks that the verdict says something about, but for those that were stopped."""
    found: dict[int, Outcome] = dict.fromkeys((victim.rank for victim in verdict.victims), "victim")
    if verdict.cause is not None:
        found[verdict.cause.rank] = "victim"
    found |= dict.fromkeys((*verdict.close, *verdict.alike, *verdict.failed_too, *verdict.early), "failed")
    if verdict.cause is not None and verdict.kind not in ("early", "waited"):
        found[verdict.cause.rank] = "failed"
    return found


def _outcome(history: History, one: RankHistory, stopped: Container[int]) -> Outcome:
    if one.node in history.lost:
        return "lost"
    if one.exited is None:
        return "running"
    return "stopped" if one.rank in stopped else "failed" if one.exited.code else "well"
