"""The verdict as JSON: verdict.json, and `launchpad why --json`. Pure.

kind        failure | early | waited | held | start | lost | timeout | stall | signal | console | peer |
            running | cut off | unknown | none
exit_code   launchpad's; null if the record was cut off
rank, node, host, pid, time (seconds since 1970), after (seconds since the ranks' start)   of the cause; null for none
how         exception | exit | signal | memory | mpi | thread | start | lost | hang
code        the rank's exit code, -n for signal n
type, message, file, line, function   of the exception, or of the crash; in the program's own code if possible
close, early, alike, stopped, failed_too   ranks
apart       [[from, to], …]: names of nodes that could not reach each other when the job hung
victims     [{"rank", "why"}]; for early also first_victim, whose time, exception and place these are
injected    what --inject did in this attempt, in words
history     a line for each earlier attempt
not_restarted   why the ranks were not started again, although restarts were allowed; null if that is not the reason
slow        {"ranks", "last", "late", "share", "operation", "because"}: the ranks for which the others waited
text        what was shown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.diagnosis import tracebacks
from launchpad.diagnosis.candidates import Candidate
from launchpad.diagnosis.history import History
from launchpad.diagnosis.tracebacks import Frame
from launchpad.diagnosis.verdict import Verdict
from launchpad.diagnosis.verdict_text import wall


def as_json(history: History, verdict: Verdict, lines: list[str], earlier: Sequence[str] = ()) -> dict[str, Any]:
    """The verdict as a JSON object; `lines` is the text, and `earlier` has a line for each earlier attempt."""
    cause = verdict.cause
    found: dict[str, Any] = {
        "job": history.planned.job,
        "kind": verdict.kind,
        "exit_code": None if verdict.kind == "cut off" else verdict.exit_code,
        **dict.fromkeys("rank node host pid time after how code type message file line function".split()),
        "attempt": history.attempt,
        "close": list(verdict.close),
        "early": list(verdict.early),
        "alike": list(verdict.alike),
        "victims": [{"rank": one.rank, "why": one.why} for one in verdict.victims],
        "stopped": list(verdict.stopped),
        "failed_too": list(verdict.failed_too),
        "lost": [history.node_name(node) for node in verdict.lost],
        "running": list(verdict.running),
        "injected": [history.fault(one) for one in history.injected],
        "apart": [[history.node_name(node) for node in pair] for pair in history.apart],
        "history": list(earlier),
        "not_restarted": history.not_restarted or None,
        "slow": slow._asdict() if (slow := history.straggler()) else None,
        "text": lines,
    }
    if cause is None:
        return found
    found |= {
        "node": cause.node,
        "host": history.node_name(cause.node),
        "time": wall(history, cause.time),
        "after": history.since_start(cause.time) if history.started else None,
        "how": cause.kind,
    }
    if cause.rank >= 0:
        found |= {"rank": cause.rank, "pid": history.of(cause.rank).pid, "code": cause.code}
    if verdict.early:
        early = history.of(verdict.early[0])
        found |= {"rank": early.rank, "pid": early.pid, "code": 0, "first_victim": cause.rank}
        found |= {"node": early.node, "host": history.node_name(early.node)}
    if cause.traceback is not None:
        shown = cause.traceback if cause.traceback.type else cause.traceback.roots[0]  # of a launcher inside the rank
        found |= {"type": shown.type, "message": shown.message}
    elif cause.text:
        found["message"] = cause.text
    place = place_of(cause)
    if place is not None:
        found |= {"file": place.file, "line": place.line, "function": place.function}
    return found


def place_of(cause: Candidate) -> Frame | None:
    """Where the program failed, if that is known."""
    frames = tracebacks.crash_frames(cause.crash)
    if cause.traceback is None and frames:
        return next((frame for frame in frames if frame.own), frames[0])
    return cause.traceback.place if cause.traceback else None
