"""Reads all that the report shows of a job from its record, and its events only once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict
from launchpad.record import attempts, circumstances, files, replay
from launchpad.record.recorded_verdict import concluded, diagnosis_after, in_words
from launchpad.report.output import PackedOutput, lines_per_second, pack
from launchpad.report.timeline import Timeline, TimelineBuilder
from launchpad.report.used import used


@dataclass(frozen=True)
class Recorded:
    """All that the page shows."""

    place: str  # of the record
    history: History
    verdict: Verdict
    lines: Sequence[str]  # the verdict in words
    timeline: Timeline
    output: PackedOutput
    stacks: Mapping[str, str]  # by the name of their file
    run_with: Mapping[str, Any]
    passed: int  # so many attempts are told in the job's row only
    apart: float  # seconds between the samples that the curves show, if they don't show all; 0 otherwise


def read(folder: str, shown: str = "") -> Recorded:
    """Read a job's record. Raises UsageError if that can't be done.

    `shown`: where the page says that the record is, if not in the folder.
    """
    passed = attempts.passed(folder)
    diagnosis = diagnosis_after(passed)
    building = TimelineBuilder(diagnosis, passed)
    for event in replay.read_events(folder, passed):
        building.on(event)
    history, verdict, earlier = concluded(folder, diagnosis)
    output = pack(folder, passed)
    curves, apart = used(folder, len(history.ranks), building.begins)
    return Recorded(
        shown or os.path.realpath(folder),
        history,
        verdict,
        in_words(folder, history, verdict, earlier),
        building.done([*curves, *lines_per_second(output)]),
        output,
        _stack_files(folder),
        circumstances.read(folder),
        len(passed.attempts),
        apart,
    )


def _stack_files(folder: str) -> dict[str, str]:
    names = [name for _, name in files.numbered(folder, "stacks_*.txt")]
    return {name: files.read(folder, name).decode(errors="replace") for name in names}
