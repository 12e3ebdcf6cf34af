"""The verdict: which rank failed first, why, and what that did to the others; from the events of a job alone. Pure.

Who failed of its own accord, and when, is in suspects.py. Here the first of them is found:

- A rank that died because another was gone (echoes.py) is a victim, as long as any other failed on its own before, or
  so shortly after that its end was only noticed later; so is one that we stopped.
- Where there are only victims, one whose lost connection may have been its own is the cause; or somebody left with 0
  while the others still worked with him; or the stacks tell for whom they waited; or a thread had died in one that
  lived on; else the first victim is all there is, and is told as one.
- Two failures that are closer in time than clocks or the kernel can tell apart are both told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from launchpad.job.outcome import NODE_LOST, NOT_STARTED, TIMED_OUT
from launchpad.report.story import Story
from launchpad.report.suspects import Suspect, Suspects, suspects_in

Kind = Literal[
    "none",
    "running",
    "cut off",
    "failure",
    "early",
    "waited",
    "held",
    "start",
    "lost",
    "timeout",
    "stall",
    "signal",
    "console",
    "peer",
]

# An end of its own is noticed so much later, in ns, than the others notice it.
LATE_NS = 1_000_000_000


class Victim(NamedTuple):
    """A rank that died because another did."""

    rank: int
    why: str


class Verdict(NamedTuple):
    """What a job has come to. Ranks are in order, the cause in none of the lists but `close`."""

    kind: Kind
    exit_code: int
    cause: Suspect | None = None  # for failure, early, waited, start; lost: its node and text
    close: tuple[int, ...] = ()  # ranks that may as well have been the first, for all that clocks can tell
    apart: int = 0  # ns between the cause and the last of these
    doubt: int = 0  # ns that would have been needed
    early: tuple[int, ...] = ()  # ranks that had left with 0 while the others waited
    alike: tuple[int, ...] = ()  # ranks that failed on their own in the same way
    victims: tuple[Victim, ...] = ()
    stopped: tuple[int, ...] = ()
    failed_too: tuple[int, ...] = ()
    threads: tuple[Suspect, ...] = ()  # threads that had died before, in ranks that went on
    lost: tuple[int, ...] = ()  # nodes, beside the cause
    running: tuple[int, ...] = ()  # ranks that ran when it was judged


def judge(events: Iterable[Any]) -> Verdict:
    """The verdict on a job, or on what is recorded of it; of several attempts, on the last."""
    return verdict_on(Story(events))


def verdict_on(story: Story) -> Verdict:
    """The verdict on the present attempt."""
    found = suspects_in(story)
    kind = story.kind
    if not kind and story.ended and story.signum:  # only output was still on its way
        kind = "signal"
    if kind in ("failure", "start", "lost") or (not kind and (found.own or found.echoes or story.lost)):
        return _failure(story, found)
    running = tuple(rank for rank, one in story.ranks.items() if one.started and one.exited is None)
    stopped = tuple(sorted(story.stop.ranks)) if story.stop else ()
    lost = tuple(story.lost)
    common: dict[str, Any] = {"threads": tuple(found.threads), "lost": lost, "running": running, "stopped": stopped}
    # Who had raised, and could not get out, is why the others have waited.
    hung = next(iter(sorted(found.own + found.stuck, key=lambda one: one.time)), None)
    match kind:
        case "timeout" | "stall":
            return Verdict(kind, TIMED_OUT, hung or _holder(story), **common)
        case "signal":
            return Verdict("signal", 128 + story.signum, hung, **common)
        case "console":
            return Verdict("console", 141, **common)
        case "peer":
            return Verdict("peer", story.peer.code if story.peer else 1, **common)
    if story.ended:
        return Verdict("none", 0, **common)
    return Verdict("running", 0, hung, **common)


def _failure(story: Story, found: Suspects) -> Verdict:
    own, echoes, threads = found.own, found.echoes, found.threads
    first_echo = min((one.time for one in echoes), default=None)
    if own and first_echo is not None:
        strong = [one for one in echoes if one.echo != "weak"]
        # A broken pipe with no failure before it may well be the rank's own.
        if not strong and min(one.time for one in own) > first_echo + LATE_NS:
            own, echoes = [*own, *echoes], []
    weak = [one for one in echoes if one.echo == "weak"]
    if not own and 0 < len(weak) < len(echoes):
        own, echoes = weak, [one for one in echoes if one.echo != "weak"]
    own = sorted(own, key=lambda one: one.time)
    early: tuple[int, ...] = ()
    if own:
        kind: Kind = {"start": "start", "lost": "lost"}.get(own[0].kind, "failure")  # type: ignore[assignment]
        cause = own[0]
    elif echoes:
        cause = min(echoes, key=lambda one: one.time)
        before = [one for one in threads if one.time < cause.time]
        # A process that closes its connections is seen to be gone a little later.
        holder = _holder(story)
        gone_before = dict.fromkeys(rank for at, rank in sorted(found.left) if at < cause.time + LATE_NS)
        if gone_before and cause.echo != "weak":
            kind, early = "early", tuple(gone_before)
        elif holder is not None and holder.rank not in {one.rank for one in echoes}:
            kind, cause = "held", holder
        elif before and cause.echo != "weak":
            kind, cause = "failure", before[0]
        else:
            kind = "failure" if cause.echo == "weak" else "waited"
    else:  # what ended the job is not in the record
        return Verdict("cut off", 1, lost=tuple(story.lost))
    close, apart, doubt = _too_close(story, own)
    alike = tuple(one.rank for one in own[1:] if one.is_like(cause) and one.rank not in close)
    gone = {rank for node in story.lost for rank in story.planned.nodes[node][1]}
    known = {cause.rank, *close, *alike, *early}
    victims = tuple(
        Victim(one.rank, one.short) for one in sorted(echoes, key=lambda one: one.rank) if one.rank not in known
    )
    known |= {one.rank for one in victims}
    stopped = tuple(rank for rank in sorted(story.stop.ranks if story.stop else ()) if rank not in known | gone)
    known |= set(stopped)
    failed_too = sorted({one.rank for one in own} | set(found.others))
    return Verdict(
        kind,
        _exit_code(story, cause, echoes),
        cause,
        close,
        apart,
        doubt,
        early,
        alike,
        victims,
        stopped,
        tuple(rank for rank in failed_too if rank not in known | gone and rank >= 0),
        tuple(one for one in threads if one is not cause),
        tuple(node for node in story.lost if not (kind == "lost" and node == cause.node)),
    )


def _holder(story: Story) -> Suspect | None:
    """The rank that the others wait for, by the stacks that were taken."""
    held = story.held
    if held is None or not held.ranks:
        return None
    rank = held.ranks[0]
    return Suspect("hang", rank, story.of(rank).node, held.time, text=held.lines[0])


def _too_close(story: Story, own: list[Suspect]) -> tuple[tuple[int, ...], int, int]:
    """Who else may have been the first; how far apart they are, and what would have been needed, in ns."""
    close, apart, needed = [], 0, 0
    for one in own[1:]:
        if own[0].kind in ("lost", "start") or one.kind in ("lost", "start") or one.rank == own[0].rank:
            continue
        clocks = 0 if one.node == own[0].node else story.doubts.get(one.node, 0) + story.doubts.get(own[0].node, 0)
        doubt = clocks + one.blur + own[0].blur
        if one.time - own[0].time < doubt:
            close.append(one.rank)
            apart, needed = max(apart, one.time - own[0].time), max(needed, doubt)
    return tuple(sorted(close)), apart, needed


def _exit_code(story: Story, cause: Suspect, echoes: list[Suspect]) -> int:
    """The first failed rank's own code; where it has left with 0, the first victim's."""
    if cause.kind == "lost":
        return NODE_LOST
    if cause.kind == "start":
        return NOT_STARTED
    code = cause.code
    if code == 0 and echoes:
        code = min(echoes, key=lambda one: one.time).code
    if code == 0 and story.over:
        return story.over.code
    return code if code > 0 else 128 - code if code < 0 else 1
