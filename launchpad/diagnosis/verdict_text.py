"""The verdict in words: the cause first, with the rank's own lines of code, then what it did to the others. Pure."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

from launchpad.diagnosis import apart, tracebacks
from launchpad.diagnosis.candidates import Candidate
from launchpad.diagnosis.history import History
from launchpad.diagnosis.reasons import OOM_KILLER
from launchpad.diagnosis.secondary import secondary_kind
from launchpad.diagnosis.tracebacks import Traceback
from launchpad.diagnosis.verdict import Verdict
from launchpad.job.outcome import exit_in_words, signal_name
from launchpad.protocol.events import HeadLost
from launchpad.protocol.printable import printable, printable_line

# The most lines of evidence; the whole report then fits on a screen.
MOST_LINES = 20

# An address as gloo writes it: [127.0.0.1]:20115.
_ADDRESS = re.compile(r" ?\[[0-9a-fA-F.:%\w]*\]:\d+")

# The job is over, but there is no JobOver in its record.
CUT_OFF = "the record is incomplete: launchpad was killed, or could not write the rest"

# How many earlier attempts are listed.
MOST_ATTEMPTS = 5


def describe(history: History, verdict: Verdict, earlier: Sequence[str] = ()) -> list[str]:
    """The report on a job; `earlier` has a line for each earlier attempt."""
    lines = _cause(history, verdict)
    lines += [_loss(history, node) for node in verdict.lost]
    if history.injected:
        lines.append(f"injected: {_injected(history)}")
    if verdict.close:
        lines.append(_also_first(history, verdict))
    if verdict.alike:
        lines.append(f"failed in the same way: {history.in_words(list(verdict.alike))}")
    lines += _threads(history, verdict)
    if verdict.victims:
        lines.append(f"failed because of it: {_victims(history, verdict)}")
    if verdict.stopped:
        lines.append(f"stopped because of it: {history.in_words(list(verdict.stopped))}")
    if history.never_started:
        lines.append(f"never started: {history.in_words(history.never_started)}")
    if verdict.failed_too:
        lines.append(f"failed too: {history.in_words(list(verdict.failed_too))}")
    if earlier:
        attempts = "attempt" if len(earlier) == 1 else "attempts"
        if len(earlier) > MOST_ATTEMPTS:
            attempts += f" (the last {MOST_ATTEMPTS} of {len(earlier)})"
        lines.append(f"earlier {attempts}: {'; '.join(earlier[-MOST_ATTEMPTS:])}")
    lines += [_led(one) for one in history.heads]
    if history.not_restarted:
        lines.append(history.not_restarted)
    return _shown(lines)


def _led(one: HeadLost) -> str:
    until = f" until {time.strftime('%H:%M:%S', time.localtime(one.lost))}" if one.lost else ""
    there = f": launchpad why {one.job}, there" if one.job else ""
    return f"led by {one.name}{until}{there}"


def _shown(lines: Sequence[str]) -> list[str]:
    """These, each on one line whatever ranks and nodes have put into it."""
    return list(map(printable_line, lines))


def around(history: History, verdict: Verdict, lines: Sequence[str]) -> list[str]:
    """What the report, `lines`, adds to the exception of the rank that failed, which is raised to the user.

    Where the ranks were and in what they waited, who left early or held up the others, and why they were not started
    again.
    """
    cause = verdict.cause
    known = _evidence(history, cause) if cause is not None and cause.kind != "hang" else []
    if verdict.kind == "failure" and history.held is None:
        known += [line for line in lines if line is lines[0] or line.startswith("stopped because of it: ")]
    return [line for line in lines if line not in known]


def besides_stacks(history: History, lines: Sequence[str]) -> list[str]:
    """What the report, `lines`, adds to the stacks that were shown when the job hung or timed out."""
    known = _held(history) if history.held is not None and history.held.why != "failure" else []
    return [line for line in lines if line not in known]


def last_output(history: History, verdict: Verdict) -> list[str]:
    """The last that the blamed rank wrote, if the report shows nothing of it."""
    cause = verdict.cause
    if cause is None or cause.rank < 0 or (cause.kind != "hang" and _evidence(history, cause)):
        return []
    one = history.of(cause.rank)
    lines = _last_lines(tracebacks.unmarked(one.errors, one.rank) or one.output)
    head = f"the last output of {history.name(cause.rank)}:"
    return _shown([head, *(f"    {line}" for line in lines)]) if lines else []


def summarize(history: History, verdict: Verdict) -> str:
    """An attempt's failure in a few words, for the list of earlier attempts."""
    return printable(_in_few_words(history, verdict))


def _in_few_words(history: History, verdict: Verdict) -> str:
    cause = verdict.cause
    if cause is None:
        return "cut off"
    injected = ", by --inject" if _is_injected(history, cause) else ""
    if cause.kind == "lost":
        return f"{history.node_name(cause.node)} was lost ({cause.text}{injected})"
    if cause.kind == "hang":
        return f"{history.subject(cause.rank)} held up the others ({cause.text})"
    after = history.since_start(cause.time)
    how = cause.traceback.title if cause.kind == "exception" and cause.traceback else ""
    how = "" if how.startswith("SystemExit") else how
    what = f"{cause.text or how or exit_in_words(cause.code)}{injected and f'{injected},'}"
    return f"{history.name(cause.rank)}, {what} after {after:.2f} s"


def _is_injected(history: History, cause: Candidate) -> bool:
    """Whether --inject did it."""
    return any(
        one.signum == -cause.code if one.rank >= 0 else one.node == cause.node
        for one in history.injected
        if one.rank == cause.rank
    )


def _injected(history: History) -> str:
    return "; ".join(f"{history.fault(one)} ({_date(history, one.time)})" for one in history.injected)


def _cause(history: History, verdict: Verdict) -> list[str]:
    cause = verdict.cause
    match verdict.kind:
        case "failure":
            assert cause is not None
            lines = [f"{history.subject(cause.rank)} failed first: {_how(history, cause)}", *_evidence(history, cause)]
            who = "ranks" if history.held and cause.rank in history.held.ranks else "other ranks"
            return [*lines, f"where the {who} were then:", *held] if (held := _held(history)) else lines
        case "early":
            assert cause is not None
            early = history.in_words(list(verdict.early))
            it = "it" if len(verdict.early) == 1 else "them"
            first = f"{early} exited with code 0 while others still waited for {it}; "
            first += f"then {history.subject(cause.rank)} failed: {_how(history, cause)}"
            return [first, *_evidence(history, cause)]
        case "waited":
            assert cause is not None
            what = "lost its connection to" if cause.secondary == "peer" else "timed out waiting for"
            first = f"{history.subject(cause.rank)} {what} another rank, and no rank had failed before: "
            lines = [f"{first}{_how(history, cause)}", *_evidence(history, cause)]
            if verdict.elsewhere:
                lines.append("it waited elsewhere than the others: did all ranks call the same collectives?")
            return lines
        case "held":
            assert cause is not None
            assert history.held is not None
            first = f"{history.subject(cause.rank)} held up the others, which gave up waiting for it: {cause.text}"
            return [first, *(f"    {line}" for line in history.held.lines[1:])]
        case "start":
            assert cause is not None
            return [f"{history.subject(cause.rank)} could not be started: {cause.text}"]
        case "lost":
            assert cause is not None
            return [_loss(history, cause.node)]
        case "timeout":
            lines = [f"the job was stopped: it ran longer than --timeout {history.planned.timeout:g} s"]
            lines += [*_left(history), *_held(history)]
        case "stall":
            lines = [f"the job was stopped: {_stalled(history, verdict)}"]
            lines += [*_left(history), *_apart(history), *_held(history)]
        case "signal":
            because = f": {history.time_to_stop}" if history.time_to_stop else f" by {signal_name(history.signum)}"
            lines = [f"the job was stopped{because}"]
        case "console":
            return [f"the job was stopped: standard output can't be written to ({history.console})"]
        case "cut off":
            return [CUT_OFF]
        case "unknown":
            where = f"process {history.planned.pid} on {history.planned.host or 'an unknown host'}"
            return [f"the job may still be running: its record has no end; look for launchpad, {where}"]
        case "running":
            running = f": {history.in_words(list(verdict.running))}" if verdict.running else ""
            lines = [f"the job is running{running}"]
        case "none":
            return ["every rank exited with code 0"]
    if cause is not None and cause.kind != "hang":
        before = "" if verdict.kind == "running" else "before that, "
        lines.append(f"{before}{history.subject(cause.rank)} {_hung(history, cause)}:")
        lines += _evidence(history, cause)
    return lines


def _hung(history: History, cause: Candidate) -> str:
    """What a rank did before the job was stopped for another reason."""
    if cause.kind == "start":
        return f"could not be started: {cause.text}"
    if cause.traceback is not None and cause.code <= 0:
        return f"raised {cause.short}{_at(cause)} and did not exit"
    return f"failed: {_how(history, cause)}"


def _stalled(history: History, verdict: Verdict) -> str:
    if history.in_vain:
        wait = "waits" if len(verdict.stopped) == 1 else "wait"
        return f"{history.in_words(list(verdict.stopped))} {wait} in torch's store for a key that no rank can set"
    return f"{history.stalled_role or 'it'} hung, with no output or progress for {history.stalled:.0f} s"


def _held(history: History) -> list[str]:
    return _shown([f"    {line}" for line in history.held.lines]) if history.held else []


def _left(history: History) -> list[str]:
    """Which ranks had ended well by themselves: the others may still wait for them."""
    stopped = history.stopped
    left = [
        rank
        for rank, one in sorted(history.ranks.items())
        if rank not in stopped and one.exited is not None and one.exited.code == 0
    ]
    return [f"{history.in_words(left)} had exited with code 0 before that"] if left else []


def _apart(history: History) -> list[str]:
    """Which nodes can't reach each other."""
    names = [history.node_name(node) for node in range(len(history.planned.nodes))]
    found = apart.sentences(history.apart, names)
    return [*found, "launchpad reaches all of them; check the network between them"] if found else []


def _how(history: History, cause: Candidate) -> str:
    code, traceback = cause.code, cause.traceback
    ended, end = history.of(cause.rank).exited, exit_in_words(code)
    if cause.kind == "mpi":
        how, end = cause.text, ""
    elif cause.kind == "thread" and traceback is not None:
        how, end = f"its thread {cause.thread!r} died, and the rank went on without it: {traceback.title}", ""
    elif cause.kind == "exception" and traceback is not None and traceback.kind != "SystemExit":
        how = ": ".join(filter(None, (cause.text, _title(traceback))))
    else:
        how, end = ": ".join(filter(None, (cause.text, end))), ""
    if cause.kind == "exception" and cause.under_way:
        end = "stopped while it was handling that"
    elif cause.kind == "exception" and ended is not None and ended.code != code:
        end = "stopped while it was exiting"
    if cause.kind == "memory":
        how += f", by {OOM_KILLER}; it used {cause.memory / 2**20:.0f} MiB"
    elif _is_injected(history, cause):
        how += ", by --inject"
    elif cause.kind in ("signal", "exit") and (signum := history.passed_on(code, cause.node)):
        of_it = f"; a command in it died of {signal_name(signum)}" if code > 0 else ""
        how += f"{of_it}, which launchpad was sent and passed on; the program has no handler"
    elif code == -signal.SIGKILL and cause.kind == "signal" and ended is not None and ended.memory_killed is False:
        how += "; the kernel's OOM-kill counters did not rise, so a process sent the signal"
    elif ended is not None and ended.oom_kills and code != -signal.SIGKILL and OOM_KILLER not in cause.text:
        how += f"; {OOM_KILLER} had killed another process on its host before that"
    if ended is not None and ended.why and cause.kind in ("signal", "exit"):
        how += f"; {ended.why}"
    if cause.finished:
        how += ", after its program had finished"
    if cause.again:
        how += ", and was being started again"
    pid = history.of(cause.rank).pid
    after = f"{history.since_start(cause.time):.2f} s after the start"
    return f"{how} ({', '.join(filter(None, (end, f'pid {pid}', after, _date(history, cause.time))))})"


def _title(traceback: Traceback) -> str:
    """The exception; if the program was about to fail of its own when it lost another rank, that first."""
    root = traceback.roots[0]
    if root is traceback or traceback.inside or secondary_kind(root):
        return traceback.title
    lost = secondary_kind(traceback._replace(before=None, group=(), kept=()))
    return f"{root.title}; then {traceback.title}" if lost else traceback.title


def _date(history: History, at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall(history, at)))


def wall(history: History, at: int) -> float:
    """An event's time in seconds since 1970."""
    return history.planned.wall + (at - history.planned.time) / 1e9


def _evidence(history: History, cause: Candidate) -> list[str]:
    lines: list[str] = []
    traceback = cause.traceback
    output = tracebacks.unmarked(history.of(cause.rank).errors, cause.rank)
    if cause.crash:
        frames = tracebacks.crash_frames(cause.crash)
        own = [frame for frame in frames if frame.own] or frames[:1]
        lines += ["It crashed here (most recent call last):"] if own else []
        lines += [line for frame in reversed(own[: tracebacks.SHOWN_FRAMES]) for line in frame.lines]
        if own and frames[0] is not own[0] and not frames[0].file.startswith("<"):
            lines.append(f'  … and from there into "{frames[0].file}", line {frames[0].line}, in {frames[0].function}')
        output = output.partition("Fatal Python error:")[0]
    if traceback is not None and traceback.kind == "SystemExit":
        if traceback.before is not None:
            lines += traceback.before.lines
        # With 1 programs exit that have logged the exception which they give up for.
        lines = [*_last_lines(output if cause.code == 1 else tracebacks.after_handled(output)), *lines]
        place = traceback.place
        if place is not None and traceback.frames and not traceback.before:
            lines += ["It exited here:", *place.lines]
    elif traceback is not None:
        lines += traceback.lines
        if cause.secondary == "kept":
            lines.append(f"It had caught this before: {cause.symptom}")
    else:
        lines += _last_lines(tracebacks.after_handled(output, killed=cause.code < 0 and cause.code != -signal.SIGABRT))
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[: half - 1], f"… ({len(lines) - MOST_LINES + 1} lines omitted)", *lines[-half:]]
    return _shown([f"    {line}".rstrip() for line in lines])


def _last_lines(text: str) -> list[str]:
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip().split("\n") if line]
    if len(lines) > MOST_LINES:
        lines = [f"… ({len(lines) - MOST_LINES + 1} earlier lines)", *lines[-MOST_LINES + 1 :]]
    return lines


def _at(one: Candidate) -> str:
    place = one.traceback.place if one.traceback else None
    return f" at {place.file}:{place.line}" if place else ""


def _also_first(history: History, verdict: Verdict) -> str:
    assert verdict.cause is not None
    nodes = {history.of(rank).node for rank in (verdict.cause.rank, *verdict.close)}
    what = "exits" if len(nodes) == 1 else "events on different nodes"
    return (
        f"or {history.in_words(list(verdict.close))}: failed within {verdict.apart / 1e6:.2g} ms of it, and {what} "
        f"less than {verdict.doubt / 1e6:.2g} ms apart can't be ordered"
    )


def _threads(history: History, verdict: Verdict) -> list[str]:
    by_reason: dict[str, list[int]] = {}
    for one in verdict.threads:
        by_reason.setdefault(f"thread {one.thread!r}: {one.short}{_at(one)}", []).append(one.rank)
    return [f"{history.in_words(ranks)} had already lost {why}" for why, ranks in by_reason.items()]


def _victims(history: History, verdict: Verdict) -> str:
    by_reason: dict[str, list[int]] = {}
    for one in verdict.victims:
        by_reason.setdefault(_common(one.why), []).append(one.rank)
    return "; ".join(f"{history.in_words(ranks)} ({why})" for why, ranks in by_reason.items())


def _common(why: str) -> str:
    """A reason without what differs from rank to rank: addresses."""
    short = _ADDRESS.sub("", why).strip()
    return short if len(short) <= 120 else short[:118] + " …"


def _loss(history: History, node: int) -> str:
    loss = history.lost[node]
    trace = "; the traceback is in events.jsonl" if loss.trace and history.planned.logs else ""
    if not history.several:
        whose = f"the node of {history.node_name(node)}" if history.planned.roles else "the job's node"
        return f"{whose} was lost: {loss.reason}; its ranks were killed{trace}"
    same = [one for one in history.lost if history.node_name(one) == history.node_name(node)]  # other roles' there
    ranks = sorted(rank for one in same for rank in history.planned.nodes[one][1])
    return f"{history.node_name(node)} was lost: {loss.reason}; it was running {history.in_words(ranks)}{trace}"
