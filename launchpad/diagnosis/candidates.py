"""Classifies an attempt's failures: independent, secondary to another, or caused by our stopping the rank. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Literal, NamedTuple

from launchpad.diagnosis import nested, reasons, secondary, tracebacks
from launchpad.diagnosis.history import History, RankHistory
from launchpad.diagnosis.secondary import Strength
from launchpad.diagnosis.tracebacks import Traceback
from launchpad.job.outcome import exit_in_words
from launchpad.protocol.events import RankExited
from launchpad.protocol.stacks import where

What = Literal["exception", "exit", "signal", "memory", "mpi", "thread", "start", "lost", "hang"]

# The agent dates an exit when it reaps the process, so exits this close together (ns) can't be ordered.
EXIT_BLUR_NS = 1_000_000

# If a rank dies this soon (ns) after it was told to stop, but not from our signal, its failure is its own.
COINCIDENCE_NS = 1_000_000_000

# How much of a rank's last error output is searched for the reason of its end.
LAST_BYTES = 2048


# Signals on which faulthandler writes a report.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Candidate(NamedTuple):
    """A rank's failure, or the loss of a node."""

    kind: What
    rank: int = -1
    node: int = 0
    time: int = 0
    blur: int = 0  # ns by which the time of an exit is uncertain
    code: int = 0  # the rank's exit code, -n for signal n; of a rank stopped while exiting, what it would have been
    traceback: Traceback | None = None
    text: str = ""  # what it did, for start, lost, mpi and hang; what an exception means, if its words don't say it
    thread: str = ""
    crash: str = ""  # faulthandler's report
    memory: int = 0  # the peak resident set size, in bytes
    finished: bool = False  # its program had already finished
    under_way: bool = False  # it was still handling the exception
    secondary: Strength = ""
    again: bool = False  # its world was then started again alone
    symptom: str = ""  # what makes it a secondary failure: a line of its last output, or what it had caught before

    @property
    def short(self) -> str:
        """The reason, in a few words."""
        if self.symptom or self.traceback is None:
            return tracebacks.plain(self.symptom) or self.text or exit_in_words(self.code)
        return self.traceback.roots[0].title

    @property
    def loss(self) -> str:
        """How it lost another rank, or timed out, in a few words: with the operation, if the exception shows it."""
        if self.traceback is None:
            return self.short
        frames = (secondary.lost_before(self.traceback) or self.traceback).roots[0].frames
        operation = where(frames[::-1], False).waits_in
        return f"in {operation}: {self.short}" if operation else self.short

    def is_like(self, other: Candidate) -> bool:
        """Whether both failed in the same way: at the same place, with the same exception type, signal or exit code."""
        if self.traceback is None or other.traceback is None:
            return self.traceback is other.traceback and (self.kind, self.code) == (other.kind, other.code)
        here, there = self.traceback.place, other.traceback.place
        same = here == there if here is None or there is None else here[:3] == there[:3]
        return same and self.traceback.type == other.traceback.type


class Candidates:
    """The candidates of an attempt, by category."""

    def __init__(self, history: History) -> None:
        self.words = _Words(history)
        self.own: list[Candidate] = []
        self.secondary_failures: list[Candidate] = []
        self.threads: list[Candidate] = []  # in order of time
        self.finished: list[tuple[int, int]] = []  # (time, rank) of those whose program finished
        self.stuck: list[Candidate] = []  # raised, and had not exited when they were stopped
        self.failed_later: list[int] = []  # after we told them to stop
        self.stopped = history.stopped  # ranks


def candidates_in(history: History) -> Candidates:
    """All candidates of the current attempt."""
    found = Candidates(history)
    for node, loss in history.lost.items():
        found.own.append(Candidate("lost", node=node, time=loss.time, text=loss.reason))
    for one in history.ranks.values():
        # By its node's clock, something that happened before the stop may seem to have happened a little after it.
        stop = history.stop_of(one.rank)
        stopping = stop.time + history.doubts.get(one.node, 0) if stop else None
        _classify(one, history, stopping, found)
    found.threads.sort(key=lambda candidate: candidate.time)
    return found


def _classify(one: RankHistory, history: History, stopping: int | None, found: Candidates) -> None:
    code = one.exited.code if one.exited else 0
    main = None
    finished = False
    for raised in one.raised:
        traceback = tracebacks.from_event(raised.traceback)
        if traceback is None or (one.pid and raised.pid != one.pid):  # a child process raised it; the rank went on
            continue
        candidate = Candidate(
            "exception", one.rank, one.node, raised.time, code=code, traceback=traceback, crash=_crash(one, code)
        )
        if raised.thread:
            if stopping is None or raised.time <= stopping:
                found.threads.append(candidate._replace(kind="thread", thread=raised.thread))
        elif traceback.type == "SystemExit" and traceback.message == "0":
            found.finished.append((raised.time, one.rank))
            finished = True
        else:
            main = candidate
    if one.not_started:
        found.own.append(Candidate("start", one.rank, one.node, one.not_started.time, text=one.not_started.reason))
        return
    if one.failed:
        failed = Candidate("mpi", one.rank, one.node, one.failed.time, code=one.failed.code, text=one.failed.reason)
        found.own.append(failed._replace(traceback=main.traceback if main else None))
        return
    if one.exited is None:
        if main is not None and main.traceback is not None and main.traceback.kind != "SystemExit":
            found.stuck.append(_explained(main, one, found))
        return
    if code == 0:
        if stopping is None or one.exited.time <= stopping:
            found.finished.append((one.exited.time, one.rank))
        return
    if main is not None and stopping is not None and main.time > stopping:
        if code > 0 and not _is_secondary(main):
            found.failed_later.append(one.rank)
        return
    if main is not None and code < 0 and _sent(history, -code):  # it was exiting when we stopped it
        if not _stopped_for_failure(one, history):
            found.stuck.append(_explained(main, one, found))
            return
        main = main._replace(code=meant_code(main))
    if main is not None:
        _add(_explained(main, one, found), found)
        return
    _add_exit(one, history, stopping, found, finished)


def _add_exit(one: RankHistory, history: History, stopping: int | None, found: Candidates, finished: bool) -> None:
    assert one.exited is not None
    end = one.exited
    if _stopped_by_us(one, end, history, found):
        return
    if stopping is not None and end.time > stopping:
        coincidence = end.time <= stopping + COINCIDENCE_NS
        foreign = end.code < 0 and not _sent(history, -end.code)
        not_by_us = end.memory_killed or history.passed_on(end.code, one.node) or foreign
        if not (coincidence and not_by_us and _stopped_for_failure(one, history)):
            if end.code > 0 or not_by_us:
                found.failed_later.append(one.rank)
            return
    tail = tracebacks.without_prefixes(one.errors[-LAST_BYTES:])
    traceback = _recorded(one.recorded)
    if traceback is None and end.code > 0:
        traceback = tracebacks.ending(one.errors, end.code)
    kind: What = "memory" if end.memory_killed else "signal" if end.code < 0 else "exit"
    if traceback is not None and kind == "exit":
        kind = "exception"
    symptom = ""
    if traceback is None and end.code not in (-signal.SIGKILL, -signal.SIGSEGV):
        symptom = secondary.symptom_in(tail)
    candidate = Candidate(
        kind,
        one.rank,
        one.node,
        end.time,
        blur=EXIT_BLUR_NS,
        code=end.code,
        traceback=traceback,
        crash=_crash(one, end.code) or (one.errors if "Fatal Python error:" in tail else ""),
        memory=end.memory,
        finished=finished,
        secondary=secondary.secondary_in(symptom) if symptom else "",
        symptom=symptom,
    )
    _add(_explained(candidate, one, found), found)


def _crash(one: RankHistory, code: int) -> str:
    """The rank's crash report, unless it is that of a child which the rank survived: they write into one file."""
    return one.crash if -code in _CRASHES or code - 128 in _CRASHES else ""


def _explained(candidate: Candidate, one: RankHistory, found: Candidates) -> Candidate:
    """The candidate with what the rank's last output adds to it: what failed inside it, and what it lost before."""
    traceback = candidate.traceback
    if candidate.kind not in ("exception", "exit"):
        return candidate
    errors, output = one.errors, one.output
    inside = nested.cause_inside(traceback, errors, output)
    if inside is not None:
        return candidate._replace(kind="exception", traceback=inside, secondary="", symptom="")
    if traceback is None:
        return candidate
    traceback = _with_last_words(traceback, one, found.words)
    candidate = candidate._replace(traceback=traceback)
    if child := _killed_for_memory(traceback, one):
        return candidate._replace(text=child)
    if traceback.kind == "SystemExit" and traceback.before is None:
        last = tracebacks.ending(errors, 0)
        lost = secondary.secondary_kind(last) if last is not None else ""
        if last and lost:
            return candidate._replace(secondary=lost, symptom=last.roots[0].title)
        said = secondary.symptom_in(tracebacks.without_prefixes(errors[-LAST_BYTES:]))
        if secondary.secondary_in(said) in ("peer", "late"):  # it went on, but not for long
            return candidate._replace(secondary="kept", symptom=said)
        return candidate
    return candidate._replace(text=reasons.plain_reason(traceback, one))


# In place of a rank.
_SEVERAL = -1


class _Words:
    """The lines that ranks have written where no command failed: they are no command's, as ranks run one program."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._writers: dict[str, dict[str, int]] = {}  # by exception, then by line: its rank, or _SEVERAL

    def of_others(self, kind: str, rank: int) -> Callable[[str], bool]:
        """Whether a line is one of those, written by another rank, in whose stderr there is no such exception."""
        if kind not in self._writers:
            writers = self._writers[kind] = {}
            for one in self._history.ranks.values():
                for line in _lines(one) if kind not in one.errors else ():
                    writers[line] = _SEVERAL if line in writers else one.rank
        known = self._writers[kind]
        return lambda line: known.get(line, rank) != rank


def _lines(one: RankHistory) -> set[str]:
    return {line.strip() for line in (one.errors + one.output).splitlines()}


def _with_last_words(traceback: Traceback, one: RankHistory, words: _Words) -> Traceback:
    """The exception that a command failed, with what stood last in the stream of the rank that the command wrote to."""
    root = traceback.roots[0]
    if not root.shared:
        return traceback
    said = one.errors if root.shared == "stderr" else one.output
    lines = tuple(tracebacks.last_lines_before(said, root, words.of_others(root.kind, one.rank)))
    return traceback.with_root(root._replace(shared_lines=lines))


def _killed_for_memory(traceback: Traceback, one: RankHistory) -> str:
    """That the kernel killed a child of the rank because memory ran out, unless it failed because of another rank."""
    if not (traceback.killed_child and one.exited and one.exited.oom_kills):
        return ""
    if secondary.secondary_kind(traceback) not in ("", "weak"):
        return ""
    return f"its child process {traceback.killed_child} was killed by {reasons.OOM_KILLER}"


def _stopped_by_us(one: RankHistory, end: RankExited, history: History, found: Candidates) -> bool:
    """Whether it was running when we stopped the ranks, and died of a signal that we sent.

    By its node's clock it may seem to have died a little before.
    """
    stop = history.stop_of(one.rank)
    if stop is None or one.rank not in found.stopped or end.time <= stop.time - history.doubts.get(one.node, 0):
        return False
    return end.code < 0 and _sent(history, -end.code)


def _add(candidate: Candidate, found: Candidates) -> None:
    strength = candidate.secondary
    if candidate.traceback and not candidate.text:
        strength = strength or secondary.secondary_kind(candidate.traceback)
    if strength == "kept" and candidate.traceback and (lost := secondary.lost_before(candidate.traceback)):
        candidate = candidate._replace(symptom=lost.roots[0].title)
    if strength:
        found.secondary_failures.append(candidate._replace(secondary=strength))
    else:
        found.own.append(candidate)


def meant_code(candidate: Candidate) -> int:
    """The exit code with which Python would have left after the exception: SystemExit's own, or 1."""
    traceback = candidate.traceback
    if traceback is not None and traceback.type == "SystemExit" and traceback.message.isdecimal():
        return int(traceback.message) & 0xFF
    return 1


def _is_secondary(candidate: Candidate) -> bool:
    return bool(candidate.traceback and secondary.secondary_kind(candidate.traceback))


def _sent(history: History, signum: int) -> bool:
    return any(one == signum for _, one in history.sent)


def _stopped_for_failure(one: RankHistory, history: History) -> bool:
    stop = history.stop_of(one.rank)
    return stop is not None and stop.cause == "failure"


def _recorded(error: str) -> Traceback | None:
    """The contents of an error file, as torch's @record writes it; None if there is nothing in it.

    {"message": {"message": "Type: text", "extraInfo": {"py_callstack": "…", "timestamp": "…"}}}, or with a plain
    string for the outer "message".
    """
    try:
        message = json.loads(error)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    text = message
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        found = tracebacks.from_text(stack) if isinstance(stack, str) else None
        if found is not None:
            return found
        text = stack or message.get("message")
    if not isinstance(text, str) or not text.strip():
        return None
    kind, colon, rest = text.partition(": ")
    return Traceback(kind, rest) if colon and kind.isidentifier() else Traceback("", text)
