"""Whether to start a job again that has failed: not if nothing suggests that the next attempt goes better. Pure.

- A lost node, and a rank killed from outside or by the OOM killer, are always worth a restart.
- If no rank of the first attempt got past its start, because of its arguments or of an import, none ever will.
- A failure of another kind or at another place than the one before is worth a restart. So is the same one if there was
  progress in between; two in a row without are taken as proof that there will be a third.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal, NamedTuple

from launchpad.diagnosis import tracebacks
from launchpad.diagnosis.candidates import Candidate, candidates_in
from launchpad.diagnosis.history import History, RankHistory
from launchpad.diagnosis.tracebacks import Traceback
from launchpad.diagnosis.verdict import Verdict
from launchpad.diagnosis.verdict_json import place_of

# A failure this long (ns) after the ranks' start is not one at the start. Without --progress, it also counts as
# progress: a restart in vain costs less than a night in which nothing runs, and --max-restarts limits it.
EARLY_NS = 600_000_000_000

# What a process does to itself, or what the kernel does to it because of what it did. Others send the other signals.
_OWN_SIGNALS = {
    *(signal.SIGABRT, signal.SIGALRM, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE, signal.SIGPROF),
    *(signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP, signal.SIGVTALRM, signal.SIGXCPU, signal.SIGXFSZ),
}

# Exit codes of a shell whose command was ended by a signal from outside, and of programs that handle it.
_SIGNALLED_CODES = {128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}

_USAGE_CODE = 2  # argparse's, click's and getopt users' exit code

_INSISTS = "not restarted (--restart always would)"

StartError = Literal["", "usage", "code", "import", "syntax"]

_WHY: dict[StartError, str] = {
    "usage": "the program rejected its arguments, and would do so every time",
    "code": f"all ranks exited with {_USAGE_CODE}, which means wrong usage",
    "import": "an import failed at the start, and would fail every time",
    "syntax": "the program has a syntax error",
}


class Signature(NamedTuple):
    """What two failures have in common if they are the same: all of this. Digits in texts don't count."""

    kind: str
    code: int
    exceptions: tuple[tuple[str, str], ...]  # (type, message): the one that ended the rank, and its roots
    place: tuple[str, int]  # file and line
    text: str  # without an exception: what the rank did, or else its last line of error output


def refusal(
    history: History, verdict: Verdict, before: Signature | None, new_files: bool | None, progress: Sequence[str] = ()
) -> str:
    """Why the ranks must not start again after this attempt, as a sentence; "" if they may.

    `before` is the signature of the attempt before. `new_files`: whether files that match the patterns `progress` have
    been written in this attempt; None if there are no patterns.
    """
    signature = signature_of(history, verdict)
    if signature is None:
        return ""
    if why := _WHY.get(_start_error(history, verdict)):
        return f"{why}; {_INSISTS}"
    if signature != before:
        return ""
    if new_files or (new_files is None and not _is_early(history, verdict)):
        return ""
    and_no = f", and no file that matches {' or '.join(progress)} is new" if progress else ""
    return f"it fails the same way each time{and_no}; {_INSISTS}"


def signature_of(history: History, verdict: Verdict) -> Signature | None:
    """The signature of the current attempt's failure; None if it came from outside, or is unknown."""
    cause = verdict.cause
    if cause is None or verdict.lost or any(map(_is_from_outside, (cause, *candidates_in(history).own))):
        return None
    traceback = cause.traceback
    exceptions: tuple[Traceback, ...] = (traceback, *traceback.roots) if traceback else ()
    place = place_of(cause)
    text = cause.text or _last_line(history.of(cause.rank))
    return Signature(
        f"{verdict.kind} {cause.kind}",
        cause.code,
        tuple((one.type, _without_digits(one.message)) for one in exceptions),
        (place.file, place.line) if place else ("", 0),
        "" if exceptions else _without_digits(text),
    )


def _is_from_outside(one: Candidate) -> bool:
    if one.kind in ("lost", "memory"):
        return True
    if one.traceback is not None and one.traceback.kind != "SystemExit":
        return any(root.type == "KeyboardInterrupt" for root in one.traceback.roots)
    return one.code in _SIGNALLED_CODES or (one.code < 0 and -one.code not in _OWN_SIGNALS)


def _is_early(history: History, verdict: Verdict) -> bool:
    assert verdict.cause is not None
    return verdict.cause.time - history.started < EARLY_NS


def _without_digits(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "0", text)


def _last_line(one: RankHistory) -> str:
    return next((line for line in reversed(tracebacks.lines_of(one.errors)) if line.strip()), "")


def _start_error(history: History, verdict: Verdict) -> StartError:
    """What kept all ranks of the first attempt from getting past their start.

    A rank that we stopped can't tell, but on each node there must be one that can. That is not enough for a mere exit
    code, which may mean something else.
    """
    if history.attempt or not _is_early(history, verdict):
        return ""  # an earlier attempt got further, or this one did
    found: list[StartError] = []
    nodes = set()
    stopped = frozenset(history.stop.ranks if history.stop else ())
    for one in history.ranks.values():
        error = _start_error_of(one)
        if error:
            found.append(error)
            nodes.add(one.node)
        elif not (one.rank in stopped and _was_stopped(one, history)):
            return ""
    if not found or nodes != {one.node for one in history.ranks.values()}:
        return ""
    if "code" in found and len(found) < len(history.ranks):
        return ""
    return found[0]


def _start_error_of(one: RankHistory) -> StartError:
    traceback = _exception_of(one)
    code = one.exited.code if one.exited else 0
    if traceback is not None:
        match traceback.kind:
            case "ImportError" | "ModuleNotFoundError":
                return "import"
            case "SyntaxError" | "IndentationError" | "TabError":
                return "syntax"
            case "SystemExit":
                code = int(traceback.message) if traceback.message.isdecimal() else 1
            case _:
                return ""
    elif code == 1 and re.match(r"(Syntax|Indentation|Tab)Error: ", _last_line(one)):
        return "syntax"  # Python shows that of a script without the header of a traceback
    if code != _USAGE_CODE:
        return ""
    if re.search(r"^usage:", one.errors, re.IGNORECASE | re.MULTILINE):
        return "usage"
    return "code" if traceback is not None else ""


def _exception_of(one: RankHistory) -> Traceback | None:
    """What ended the rank's main thread, or else its cause; what it was handling before doesn't matter."""
    events = [event for event in one.raised if not event.thread and event.pid == one.pid]
    if events:
        found = tracebacks.from_event(events[-1].traceback)
    elif one.exited and one.exited.code > 0:
        found = tracebacks.ending(one.errors, one.exited.code)
    else:
        return None
    while found is not None and found.before is not None and found.is_cause:
        found = found.before
    return found


def _was_stopped(one: RankHistory, history: History) -> bool:
    if one.exited is None or _exception_of(one):
        return False
    return any(one.exited.code == -signum for _, signum in history.sent)
