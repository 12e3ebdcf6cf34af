"""Judges a recorded job: `launchpad why`, `launchpad jobs` and the report."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.history import History
from launchpad.diagnosis.time_spent import time_spent
from launchpad.diagnosis.verdict import Verdict
from launchpad.diagnosis.verdict_text import CUT_OFF, describe
from launchpad.record import attempts, job_store, replay

Look = tuple[History, Verdict, list[str]]


def look_at(folder: str) -> Look:
    """The history of a recorded job, the verdict on it, and a summary of each earlier attempt."""
    passed = attempts.passed(folder)
    diagnosis = diagnosis_after(passed)
    for event in replay.read_events(folder, passed):
        diagnosis.on(event)
    return concluded(folder, diagnosis)


def diagnosis_after(passed: attempts.Passed) -> Diagnosis:
    """What is known before the events that `replay.read_events` reads."""
    diagnosis = Diagnosis()
    for event in passed.events:
        diagnosis.history.on(event)
    diagnosis.earlier += passed.earlier
    return diagnosis


def concluded(folder: str, diagnosis: Diagnosis) -> Look:
    """The same as `look_at`, when the events have been read."""
    history, verdict = diagnosis.history, diagnosis.verdict()
    if history.over is None and verdict.kind in ("running", "none"):
        match job_store.state_of(folder):
            case "over":
                verdict = verdict._replace(kind="cut off")
            case "unknown":
                verdict = verdict._replace(kind="unknown")
    return history, verdict, diagnosis.earlier


def in_words(folder: str, history: History, verdict: Verdict, earlier: Sequence[str]) -> list[str]:
    """The verdict, line by line; of a job that went well, what it spent its time on."""
    lines = describe(history, verdict, earlier)
    if verdict.kind != "cut off" and history.over is None and job_store.state_of(folder) == "over":
        lines.append(CUT_OFF)
    spent = time_spent(history) if verdict.kind == "none" else ""
    return [*lines, *filter(None, (spent, history.slow()))]
