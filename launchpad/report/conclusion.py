"""verdict.json: the verdict for machines. Pure.

kind        failure | early | waited | held | start | lost | timeout | stall | signal | console | peer |
            running | cut off | none
exit_code   launchpad's
rank, node, host, pid, time (seconds since 1970), after (seconds since the ranks' start)   of the cause; null for none
how         exception | exit | signal | memory | mpi | thread | start | lost | hang
code        the rank's exit code, -n for signal n
type, message, file, line, function   of the exception, or of the crash: in the program's own code where it stands there
close, early, alike, stopped, failed_too   ranks
victims     [{"rank", "why"}]; early: first_victim, whose exception, code and place these are
history     a line for each attempt before
text        what was shown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.report import accounts
from launchpad.report.accounts import Frame
from launchpad.report.story import Story
from launchpad.report.suspects import Suspect
from launchpad.report.telling import wall
from launchpad.report.verdict import Verdict


def as_json(story: Story, verdict: Verdict, lines: list[str], history: Sequence[str] = ()) -> dict[str, Any]:
    """The whole of it."""
    cause = verdict.cause
    found: dict[str, Any] = {
        "job": story.planned.job,
        "kind": verdict.kind,
        "exit_code": verdict.exit_code,
        **dict.fromkeys("rank node host pid time after how code type message file line function".split()),
        "attempt": story.attempt,
        "close": list(verdict.close),
        "early": list(verdict.early),
        "alike": list(verdict.alike),
        "victims": [{"rank": one.rank, "why": one.why} for one in verdict.victims],
        "stopped": list(verdict.stopped),
        "failed_too": list(verdict.failed_too),
        "lost": [story.node_name(node) for node in verdict.lost],
        "running": list(verdict.running),
        "history": list(history),
        "text": lines,
    }
    if cause is None:
        return found
    found |= {
        "node": cause.node,
        "host": story.node_name(cause.node),
        "time": wall(story, cause.time),
        "after": (cause.time - story.started) / 1e9 if story.started else None,
        "how": cause.kind,
    }
    if cause.rank >= 0:
        found |= {"rank": cause.rank, "pid": story.of(cause.rank).pid, "code": cause.code}
    if verdict.early:
        found |= {
            "rank": verdict.early[0],
            "pid": story.of(verdict.early[0]).pid,
            "code": 0,
            "first_victim": cause.rank,
        }
    if cause.account is not None:
        found |= {"type": cause.account.type, "message": cause.account.message}
    elif cause.text:
        found["message"] = cause.text
    place = place_of(cause)
    if place is not None:
        found |= {"file": place.file, "line": place.line, "function": place.function}
    return found


def place_of(cause: Suspect) -> Frame | None:
    """Where in the program it failed, if that is known."""
    frames = accounts.crash_frames(cause.crash)
    if cause.account is None and frames:
        return next((frame for frame in frames if frame.own), frames[0])
    return cause.account.place if cause.account else None
