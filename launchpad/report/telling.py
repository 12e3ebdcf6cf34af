"""A verdict in words: the cause first, with the rank's own lines of code, then what it did to the others. Pure."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

from launchpad.job.outcome import exit_in_words, ranks_in_words, signal_name
from launchpad.report import accounts
from launchpad.report.story import Story
from launchpad.report.suspects import Suspect
from launchpad.report.verdict import Verdict

# So many lines of evidence are shown: with the rest they fit a screen.
MOST_LINES = 20

# [127.0.0.1]:20115, as gloo writes it.
_ADDRESS = re.compile(r" ?\[[0-9a-fA-F.:%\w]*\]:\d+")

# Of the attempts before the last so many are told.
MOST_ATTEMPTS = 5


def tell(story: Story, verdict: Verdict, history: Sequence[str] = ()) -> list[str]:
    """The account of a job: `history` has a line for each attempt before."""
    lines = _cause(story, verdict)
    lines += [_loss(story, node) for node in verdict.lost]
    if verdict.close:
        lines.append(_closeness(story, verdict))
    if verdict.alike:
        lines.append(f"failed in the same way: {ranks_in_words(list(verdict.alike))}")
    lines += _threads(verdict)
    if verdict.victims:
        lines.append(f"died of it: {_victims(verdict)}")
    if verdict.stopped:
        lines.append(f"stopped because of it: {ranks_in_words(list(verdict.stopped))}")
    if verdict.failed_too:
        lines.append(f"failed too: {ranks_in_words(list(verdict.failed_too))}")
    if history:
        many = "attempt" if len(history) == 1 else f"{len(history)} attempts"
        lines.append(f"the {many} before: {'; '.join(history[-MOST_ATTEMPTS:])}")
    return lines


def in_short(story: Story, verdict: Verdict) -> str:
    """An attempt's failure in a few words, for the history of restarts."""
    cause = verdict.cause
    if cause is None:
        return "cut off"
    if cause.kind == "lost":
        return f"{story.node_name(cause.node)} was lost ({cause.text})"
    after = (cause.time - story.started) / 1e9
    how = cause.account.title if cause.kind == "exception" and cause.account else ""
    how = "" if how.startswith("SystemExit") else how
    return f"{story.name(cause.rank)}, {cause.text or how or exit_in_words(cause.code)} after {after:.2f} s"


def _cause(story: Story, verdict: Verdict) -> list[str]:
    cause = verdict.cause
    match verdict.kind:
        case "failure":
            assert cause is not None
            lines = [f"{story.name(cause.rank)} failed first: {_how(story, cause)}", *_evidence(story, cause)]
            return [*lines, "where the others were then:", *held] if (held := _held(story)) else lines
        case "early":
            assert cause is not None
            left = ranks_in_words(list(verdict.early))
            head = f"{left} left with exit code 0 while others still waited for {_them(verdict.early)}:"
            first = f"{head} then {story.name(cause.rank)} failed: {_how(story, cause)}"
            return [first, *_evidence(story, cause)]
        case "waited":
            assert cause is not None
            what = "lost the connection to another rank" if cause.echo == "peer" else "waited for another rank in vain"
            first = f"{story.name(cause.rank)} {what}, and none failed on its own before: {_how(story, cause)}"
            return [first, *_evidence(story, cause)]
        case "held":
            assert cause is not None
            assert story.held is not None
            first = f"{story.name(cause.rank)} held up the others, which waited for it in vain: {cause.text}"
            return [first, *(f"    {line}" for line in story.held.lines[1:])]
        case "start":
            assert cause is not None
            return [f"{story.name(cause.rank)} could not be started: {cause.text}"]
        case "lost":
            assert cause is not None
            return [_loss(story, cause.node)]
        case "peer":
            return [f"the world failed on another node: {story.peer.reason if story.peer else ''}"]
        case "timeout":
            lines = [f"the job was ended: it ran longer than --timeout {story.planned.timeout:g} s"]
            lines += _held(story)
        case "stall":
            lines = [f"the job was ended: it hangs, no rank has written or got on for {story.stalled:.0f} s"]
            lines += _held(story)
        case "signal":
            lines = [f"the job was ended by {signal_name(story.signum)}"]
        case "console":
            return [f"the job was ended: standard output takes no more ({story.console})"]
        case "cut off":
            return ["the record ends before the job did: launchpad itself was killed"]
        case "running":
            lines = [f"the job is running: {ranks_in_words(list(verdict.running))}"]
        case "none":
            return ["every rank left with exit code 0"]
    if cause is not None and cause.kind != "hang":
        lines.append(f"before that {story.name(cause.rank)} had raised {cause.short}{_at(cause)}, and was still there:")
        lines += _evidence(story, cause)
    return lines


def _held(story: Story) -> list[str]:
    return [f"    {line}" for line in story.held.lines] if story.held else []


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _how(story: Story, cause: Suspect) -> str:
    code, account = cause.code, cause.account
    end = exit_in_words(code)
    if cause.kind == "mpi":
        how, end = cause.text, ""
    elif cause.kind == "thread" and account is not None:
        how, end = f"its thread {cause.thread!r} died, and it went on without: {account.title}", ""
    elif cause.kind == "exception" and account is not None and account.kind != "SystemExit":
        how = account.title
    else:
        how, end = end, ""
    if cause.kind == "memory":
        how += f", by the kernel for want of memory: it had {cause.memory / 2**20:.0f} MiB"
    elif code == -signal.SIGKILL and cause.kind == "signal":
        how += "; the kernel's memory counters did not rise, so somebody sent the signal"
    if cause.leaving:
        how += ", after its program had come to its end"
    pid = story.of(cause.rank).pid
    date = time.strftime("%H:%M:%S", time.localtime(wall(story, cause.time)))
    after = f"{(cause.time - story.started) / 1e9:.2f} s after the start"
    return f"{how} ({', '.join(filter(None, (end, f'pid {pid}', after, date)))})"


def wall(story: Story, at: int) -> float:
    """An event's time in seconds since 1970."""
    return story.planned.wall + (at - story.planned.time) / 1e9


def _evidence(story: Story, cause: Suspect) -> list[str]:
    lines: list[str] = []
    account = cause.account
    words = story.of(cause.rank).tail.decode(errors="replace")
    if cause.crash:
        frames = accounts.crash_frames(cause.crash)
        own = [frame for frame in frames if frame.own] or frames[:1]
        lines += ["It was here (most recent call last):"] if own else []
        lines += [line for frame in reversed(own[: accounts.SHOWN_FRAMES]) for line in frame.lines]
        if frames and not frames[0].own and own:
            lines.append(f'  … and on into "{frames[0].file}", line {frames[0].line}, in {frames[0].function}')
        words = words.partition("Fatal Python error:")[0]
    if account is not None and account.kind == "SystemExit":
        if account.before is not None:
            lines += account.before.lines
        lines = [*_last_words(words), *lines]
        place = account.place
        if place is not None and account.frames and not account.before:
            lines += ["It exited here:", *place.lines]
    elif account is not None:
        lines += account.lines
    else:
        lines += _last_words(words)
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[: half - 1], f"… ({len(lines) - MOST_LINES + 1} lines left out)", *lines[-half:]]
    return [f"    {line}".rstrip() for line in lines]


def _last_words(text: str) -> list[str]:
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip().split("\n") if line]
    if len(lines) > MOST_LINES:
        lines = [f"… ({len(lines) - MOST_LINES} lines above)", *lines[-MOST_LINES + 1 :]]
    return lines


def _at(one: Suspect) -> str:
    place = one.account.place if one.account else None
    return f" at {place.file}:{place.line}" if place else ""


def _closeness(story: Story, verdict: Verdict) -> str:
    others = ranks_in_words(list(verdict.close))
    by = "their nodes' clocks" if story.several else "the order in which processes end"
    return (
        f"or {others}: failed within {verdict.apart / 1e6:.2g} ms of it, and {by} can't tell less than "
        f"{verdict.doubt / 1e6:.2g} ms apart"
    )


def _threads(verdict: Verdict) -> list[str]:
    by_reason: dict[str, list[int]] = {}
    for one in verdict.threads:
        by_reason.setdefault(f"thread {one.thread!r}: {one.short}{_at(one)}", []).append(one.rank)
    return [f"{ranks_in_words(ranks)} had lost a thread before, {why}" for why, ranks in by_reason.items()]


def _victims(verdict: Verdict) -> str:
    by_reason: dict[str, list[int]] = {}
    for one in verdict.victims:
        by_reason.setdefault(_family(one.why), []).append(one.rank)
    return "; ".join(f"{ranks_in_words(ranks)} ({why})" for why, ranks in by_reason.items())


def _family(why: str) -> str:
    """A reason without what differs from rank to rank: addresses, numbers in brackets."""
    short = _ADDRESS.sub("", why).strip()
    return short if len(short) <= 120 else short[:118] + " …"


def _loss(story: Story, node: int) -> str:
    loss = story.lost[node]
    if not story.several:
        return f"the job's node was lost: {loss.reason}; its ranks were killed"
    ranks = story.planned.nodes[node][1]
    return f"{story.node_name(node)} was lost: {loss.reason}; it ran {ranks_in_words(ranks)}"
