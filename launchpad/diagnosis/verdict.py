"""The verdict: which rank failed first, why, and what that did to the others. Pure; it needs only the job's events.

candidates.py classifies the failures, blame.py finds the first one: its rules say who is a victim and who is not. Two
failures so close in time that clocks or the kernel can't order them are both named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from launchpad.diagnosis import tracebacks
from launchpad.diagnosis.blame import BlameKind, Evidence, blame, gather
from launchpad.diagnosis.candidates import Candidate, Candidates, candidates_in, meant_code
from launchpad.diagnosis.history import History
from launchpad.job.outcome import NODE_LOST, NOT_STARTED, OUTPUT_CLOSED, TIMED_OUT

# The cause that stopped the job, or none, running, cut off, unknown.
Kind = Literal[BlameKind, "timeout", "stall", "signal", "console", "running", "cut off", "unknown", "none"]


class Victim(NamedTuple):
    """A rank that died because another did."""

    rank: int
    why: str


class Verdict(NamedTuple):
    """How a job ended, and why. Lists of ranks are sorted; after a failure, no list contains the cause."""

    kind: Kind
    exit_code: int
    cause: Candidate | None = None  # for failure, early, waited, start; lost: its node and text
    close: tuple[int, ...] = ()  # ranks that may have failed first, as far as the clocks tell
    apart: int = 0  # ns between the cause and the last of these
    doubt: int = 0  # ns that would have been needed to order them
    early: tuple[int, ...] = ()  # ranks that exited with 0 while the others waited for them
    alike: tuple[int, ...] = ()  # ranks that failed independently, in the same way
    victims: tuple[Victim, ...] = ()
    stopped: tuple[int, ...] = ()
    failed_too: tuple[int, ...] = ()
    threads: tuple[Candidate, ...] = ()  # threads that had died earlier, in ranks that went on
    lost: tuple[int, ...] = ()  # nodes, besides the cause
    running: tuple[int, ...] = ()  # ranks that are still running
    elsewhere: bool = False  # of ranks that only waited, the cause waited at another line than most


def judge(events: Iterable[Any]) -> Verdict:
    """The verdict on a job, or on the part of it that is recorded; if it was restarted, on the last attempt."""
    return verdict_on(History(events))


def verdict_on(history: History) -> Verdict:
    """The verdict on the current attempt."""
    found = candidates_in(history)
    kind = history.kind
    if not kind and history.ended and history.signum:  # the signal came while only output was left to drain
        kind = "signal"
    if kind in ("failure", "start", "lost") or (not kind and (found.own or found.secondary_failures or history.lost)):
        return _failure(history, found)
    running = tuple(rank for rank, one in history.ranks.items() if one.started and one.exited is None)
    stopped = tuple(sorted(history.stopped))
    lost = tuple(history.lost)
    common: dict[str, Any] = {"threads": tuple(found.threads), "lost": lost, "running": running, "stopped": stopped}
    # The others waited because this rank raised and could not exit.
    failed = [one for one in found.own + found.stuck if one.kind != "lost"]
    hung = min(failed, key=lambda one: one.time, default=None)
    match kind:
        case "timeout" | "stall":
            return Verdict(kind, TIMED_OUT, hung or _holder(history), **common)
        case "signal":
            return Verdict("signal", 128 + history.signum, hung, **common)
        case "console":
            return Verdict("console", OUTPUT_CLOSED, **common)
    if history.ended:
        return Verdict("none", 0, **common)
    return Verdict("running", 0, hung, **common)


def _failure(history: History, found: Candidates) -> Verdict:
    """The verdict if ranks failed, or a node was lost: the cause, and into which lists the other ranks go."""
    evidence = gather(found, _holder(history))
    if history.planned.roles:
        from launchpad.diagnosis.role_blame import over_worlds

        evidence = over_worlds(history, evidence, lambda down: verdict_on(down).cause)
    blamed = blame(evidence)
    if blamed is None:  # the record doesn't say what ended the job
        return Verdict("cut off", 1, lost=tuple(history.lost))
    kind, cause, early, elsewhere = blamed
    own = evidence.own
    close, apart, doubt = _too_close(history, own)
    first = {cause.rank, *close}
    alike = tuple(one.rank for one in own[1:] if one.rank >= 0 and one.is_like(cause) and one.rank not in first)
    known = {*first, *alike, *early}
    victims = _victims(evidence, known)
    known |= {one.rank for one in victims}
    gone = {rank for node in history.lost for rank in history.planned.nodes[node][1]}
    known |= gone
    stopped = tuple(sorted(history.stopped - known))
    known |= {*stopped}
    failed_too = sorted({one.rank for one in own} | set(found.failed_later))
    return Verdict(
        kind,
        _exit_code(history, cause, evidence.victim),
        cause,
        close,
        apart,
        doubt,
        early,
        alike,
        victims,
        stopped,
        tuple(rank for rank in failed_too if rank not in known and rank >= 0),
        tuple(one for one in evidence.threads if one is not cause),
        _lost_too(history, cause.node if kind == "lost" else -1),
        elsewhere=elsewhere,
    )


def _lost_too(history: History, known: int) -> tuple[int, ...]:
    """The nodes that were lost, besides a known one; of those of several roles on one host, the first."""
    names = {history.node_name(node): node for node in reversed(history.lost)}
    names.pop(history.node_name(known), None)
    return tuple(node for node in history.lost if node in names.values())


def _victims(evidence: Evidence, known: set[int]) -> tuple[Victim, ...]:
    """The ranks that died because of the cause, without those that are named elsewhere."""
    found = sorted(evidence.secondary, key=lambda one: one.rank)
    return tuple(Victim(one.rank, one.loss) for one in found if one.rank not in known)


def _holder(history: History) -> Candidate | None:
    """The rank that the others wait for, by their stacks."""
    held = history.held
    if held is None or not held.ranks:
        return None
    rank = held.ranks[0]
    waits = Candidate("hang", rank, history.of(rank).node, held.time, text=held.lines[0] if held.lines else "")
    raising = tracebacks.from_event(held.raising) if held.raising else None
    if held.why != "failure" or raising is None:
        return waits
    found = waits._replace(kind="exception", text="", traceback=raising, under_way=True)
    return found._replace(code=meant_code(found))


def _too_close(history: History, own: Sequence[Candidate]) -> tuple[tuple[int, ...], int, int]:
    """Ranks that may have failed first as well, how far apart they are, and the least time that can be ordered (ns)."""
    close, apart, needed = [], 0, 0
    for one in own[1:]:
        if own[0].kind in ("lost", "start") or one.kind in ("lost", "start") or one.rank == own[0].rank:
            continue
        if history.passed_on(one.code, one.node) and one.is_like(own[0]):  # we sent it to all at once
            continue
        clocks = 0 if one.node == own[0].node else history.doubts.get(one.node, 0) + history.doubts.get(own[0].node, 0)
        doubt = clocks + one.blur + own[0].blur
        if one.time - own[0].time < doubt:
            close.append(one.rank)
            apart, needed = max(apart, one.time - own[0].time), max(needed, doubt)
    return tuple(sorted(close)), apart, needed


def _exit_code(history: History, cause: Candidate, victim: Candidate | None) -> int:
    """The exit code of the rank that failed first, or of the first victim if that rank exited with 0."""
    if cause.kind == "lost":
        return NODE_LOST
    if cause.kind == "start":
        return NOT_STARTED
    code = 0 if cause.kind == "thread" and cause.rank in history.stopped else cause.code
    if code == 0 and victim is not None:
        code = victim.code
    if code == 0 and history.over:
        return history.over.code
    return code if code > 0 else 128 - code if code < 0 else 1
