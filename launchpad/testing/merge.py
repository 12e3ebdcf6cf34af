"""Makes one report per phase of what all ranks of a test report. Pure.

The phase has passed if it has on all ranks. Otherwise the report is that of the first rank that failed by itself, with
what the others did below it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from launchpad.diagnosis.secondary import secondary_in
from launchpad.job.outcome import exit_in_words, ranks_in_words
from launchpad.testing.outcome import TIMEOUT, WAITED, RankEnd, TestEnd

Phase = Literal["setup", "call", "teardown"]

_PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")

# Messages are shown up to this length, output of a rank that died up to this many lines.
_MOST_CHARACTERS = 300
_LAST_LINES = 3

_PASSED = "passed"
_PLURALS = (
    ("was ended while it waited", "were ended while they waited"),
    ("was ended", "were ended"),
    ("died while it exited", "died while they exited"),
)
_ENDED = 3  # the weight of a rank that was ended because of another
_XPASS = ("[XPASS(strict)]", "Unexpected success")  # of xfail's mark, of unittest's expectedFailure


class _Told(NamedTuple):
    """How one rank's part went, in short."""

    rank: int
    text: str
    weight: int  # the lowest is shown first: 0 for a failure of its own, more for those that others caused
    phase: int  # in which it ended, or did not pass
    where: str  # "FILE:LINE" of the failure; "" if unknown
    report: pytest.TestReport | None  # the one that has not passed


class Test:
    """What a merged report says about the test itself."""

    __test__ = False

    def __init__(self, template: pytest.TestReport, expected: str | None = None) -> None:
        """`template`: any report on it; `expected`: why it is expected to fail in whatever way, None if it is not."""
        self.template = template
        self.expected = expected

    def report(self, when: Phase, outcome: Literal["passed", "failed", "skipped"]) -> pytest.TestReport:
        """A report of this phase, without details."""
        made = copy.copy(self.template)
        made.when, made.outcome = when, outcome
        made.longrepr, made.sections, made.user_properties = None, [], []
        made.start = made.stop = made.duration = 0.0
        return made

    def failed(self, when: Phase, text: str) -> pytest.TestReport:
        """A report that the phase has failed, with this text. Its first line is the message."""
        made = self.report(when, "failed")
        path, line, _ = self.template.location
        crash = ReprFileLocation(path, (line or 0) + 1, text.splitlines()[0])
        trace = ReprTraceback([ReprEntryNative([f"{line}\n" for line in text.splitlines()])], None, style="native")
        made.longrepr = ExceptionChainRepr([(trace, crash, None)])
        return made


def merged(
    test: Test, end: TestEnd, read: Callable[[dict[str, Any]], pytest.TestReport]
) -> tuple[list[pytest.TestReport], list[pytest.TestReport]]:
    """The reports on set-up and call, with those of subtests in between, and those on teardown.

    `read` turns what pytest has serialised into a report.
    """
    reports = {one.rank: [read(report) for report in one.reports] for one in end.ranks}
    by_phase = {phase: _of_phase(reports, phase) for phase in _PHASES}
    told = _with_the_cause([_told(one, reports[one.rank], end) for one in end.ranks])
    first: list[pytest.TestReport] = []
    for phase in _PHASES[:2]:
        if phase == "call":
            first += _subtests(reports)
        made = _phase(test, phase, by_phase[phase], end, told)
        if made.passed and any(one.stop is not None and one.rank not in by_phase[phase] for one in end.ranks):
            break  # pytest does not report a phase that pytest.exit has cut off, either
        first.append(made)
        if not made.passed:
            break
    cut_off = any(one.failed for one in first) and not by_phase["teardown"]
    return first, [] if cut_off else [_teardown(test, by_phase, end, told)]


def _of_phase(reports: Mapping[int, Sequence[pytest.TestReport]], phase: Phase) -> dict[int, pytest.TestReport]:
    """Each rank's report on this phase."""
    main = {rank: [one for one in several if _is_main(one)] for rank, several in reports.items()}
    return {rank: one for rank, several in main.items() for one in several if one.when == phase}


def _is_main(report: pytest.TestReport) -> bool:
    return type(report) is pytest.TestReport


def _told(one: RankEnd, reports: Sequence[pytest.TestReport], end: TestEnd) -> _Told:
    """The rank's part in short: its first phase that has not passed, or how it ended."""
    main = [report for report in reports if _is_main(report)]
    bad = next((report for report in main if not report.passed and not _is_only_teardown(report)), None)
    phase = next((index for index, name in enumerate(_PHASES) if all(each.when != name for each in main)), 2)
    if bad is not None:
        phase = _PHASES.index(bad.when)
        text, where = _message(bad), _where(bad)
        if bad.skipped and not hasattr(bad, "wasxfail"):
            return _Told(one.rank, f"skipped ({text})", 1, phase, where, bad)
        strength = secondary_in(str(bad.longreprtext))
        return _Told(one.rank, text, 2 if strength in ("peer", "late") else 0, phase, where, bad)
    if one.broken:
        return _Told(one.rank, f"pytest failed: {one.broken.strip().splitlines()[-1]}", 0, phase, "", None)
    if one.reason:
        # MPI_Abort may return, and the rank then goes on until it is ended.
        return _Told(one.rank, one.reason, 0, min(phase, _PHASES.index("call")), "", None)
    if one.ended == TIMEOUT:
        return _Told(one.rank, f"did not end within {end.limit:g} s", 0, phase, "", None)
    if one.done and not one.died():
        return _Told(one.rank, _PASSED, 9, phase, "", None)
    if one.ended == WAITED:
        return _Told(one.rank, "was ended while it waited", _ENDED, phase, "", None)
    if one.ended or end.interrupted:
        return _Told(one.rank, "was ended", _ENDED, phase, "", None)
    died = "died while it exited" if one.done else "died"
    return _Told(one.rank, f"{died}: {exit_in_words(one.code)}", 0, phase, "", None)


def _with_the_cause(told: Sequence[_Told]) -> list[_Told]:
    """Ranks that were ended early fail the phase in which another failed, though they may not have come to it."""
    cause = min(told, key=lambda one: (one.weight, one.rank))
    return [one._replace(phase=cause.phase) if one.weight == _ENDED else one for one in told]


def _is_only_teardown(report: pytest.TestReport) -> bool:
    return report.when == "teardown"


def _phase(
    test: Test, phase: Phase, reports: Mapping[int, pytest.TestReport], end: TestEnd, told: Sequence[_Told]
) -> pytest.TestReport:
    index = _PHASES.index(phase)
    here = [one for one in told if one.text != _PASSED and one.phase == index]
    if not here:
        made = test.report(phase, "passed")
        if any(hasattr(one, "wasxfail") for one in reports.values()):  # XPASS, which is no failure unless it is strict
            made.wasxfail = next(one.wasxfail for one in reports.values() if hasattr(one, "wasxfail"))
        return _completed(made, reports, end, told)
    expected = [one for one in here if one.report is not None and hasattr(one.report, "wasxfail")]
    unexpected = [one for one in here if not _is_expected(one, test.expected, among=expected)]
    if expected and not unexpected:
        assert expected[0].report is not None
        return _completed(copy.copy(expected[0].report), reports, end, told)
    if test.expected is not None and all(one.report is None for one in unexpected):
        made = test.report(phase, "skipped")
        made.wasxfail = test.expected
        made.longrepr = _in_words(told)
        return _completed(made, reports, end, told)
    skipped = [one for one in here if one not in expected and one.report is not None and one.report.skipped]
    if len(skipped) == len(end.ranks):
        assert skipped[0].report is not None
        return _completed(copy.copy(skipped[0].report), reports, end, told)
    main = min(unexpected or here, key=lambda one: (one.weight, one.rank))
    if main in skipped:
        made = test.failed(phase, f"{_in_words(told)}: a test is skipped on all of its ranks, or on none")
    elif main.report is None:
        made = test.failed(phase, _without_report(main, told, end))
    else:
        made = copy.copy(main.report)
        _add(made, told, main, end)
    return _completed(made, reports, end, told)


def _is_expected(one: _Told, expected: str | None, among: Sequence[_Told]) -> bool:
    """Whether it is no failure that one rank of an xfail test ended like this."""
    if one in among:
        return True
    if not among:
        return False
    if one.report is not None:
        return str(one.report.longrepr).startswith(_XPASS)  # others have failed as expected, and so has the test
    return expected is not None or one.weight > 0


def _teardown(
    test: Test, by_phase: Mapping[Phase, Mapping[int, pytest.TestReport]], end: TestEnd, told: Sequence[_Told]
) -> pytest.TestReport:
    reports = by_phase["teardown"]
    bad = [rank for rank in sorted(reports) if not reports[rank].passed]
    if bad:
        made = copy.copy(reports[bad[0]])
        if len(end.ranks) > 1:
            rest = [_Told(one.rank, _PASSED, 9, 2, "", None) for one in end.ranks if one.rank not in bad]
            rest += [_Told(rank, _message(reports[rank]), 0, 2, _where(reports[rank]), reports[rank]) for rank in bad]
            _add(made, rest, next(one for one in rest if one.rank == bad[0]), end)
        return _completed(made, reports, end)
    late = [one for one in told if one.text != _PASSED and one.phase == 2]
    if late:
        main = min(late, key=lambda one: (one.weight, one.rank))
        return _completed(test.failed("teardown", _without_report(main, told, end)), reports, end, told)
    left = [f"rank {one.rank} left {' and '.join(one.left)}" for one in end.ranks if one.left]
    left += [f"a rank left {' and '.join(end.left)}"] if end.left else []
    if left:
        text = f"{'; '.join(left)}: ended now; a test or its fixtures must end what they start"
        return _completed(test.failed("teardown", text), reports, end)
    return _completed(test.report("teardown", "passed"), reports, end)


def _without_report(main: _Told, told: Sequence[_Told], end: TestEnd) -> str:
    """The text on a rank that could not report: it died, or hung."""
    lines = [_in_words(told, main)]
    one = end.ranks[main.rank]
    if one.broken:
        lines.append(one.broken)
    elif one.crash:
        lines += ["where it was:", *(f"    {line}" for line in one.crash)]
    elif not one.ended:
        last = [line for _, text in one.output for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        lines += ["its last words:", *(f"    {line}" for line in last)] if last else []
    lines += [end.stacks] if end.stacks else []
    return "\n".join(lines)


def _add(report: pytest.TestReport, told: Sequence[_Told], main: _Told, end: TestEnd) -> None:
    """Add to a rank's own report what the other ranks did."""
    if len(told) < 2:
        return
    words = _in_words(told, main)
    details = "\n".join([words, *([end.stacks] if end.stacks else [])])
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", details, "-")
        if longrepr.reprcrash is not None:
            longrepr.reprcrash.message = words
            if getattr(longrepr, "chain", None):
                trace, crash, description = longrepr.chain[-1]
                longrepr.chain[-1] = (trace, longrepr.reprcrash if crash else crash, description)
    elif any(one.text != main.text for one in told):
        report.longrepr = f"{longrepr}\n{details}"


def _in_words(told: Sequence[_Told], main: _Told | None = None) -> str:
    """What each rank did: "rank 2: assert 3 == 4; ranks 0-1, 3 passed"."""
    groups: dict[str, list[int]] = {}
    for one in sorted(told, key=lambda one: (one is not main, one.weight, one.rank)):
        aside = main is not None and one.where and one.text != main.text
        groups.setdefault(f"{one.text} ({one.where})" if aside else one.text, []).append(one.rank)
    parts = []
    for text, ranks in groups.items():
        everyone = "both ranks" if len(told) == 2 else f"all {len(told)} ranks"
        name = everyone if len(ranks) == len(told) > 1 else ranks_in_words(ranks)
        is_verb = text.startswith((_PASSED, "died", "did not", "was ended", "skipped", "called", "exited", "sent"))
        words = text
        for singular, plural in _PLURALS if len(ranks) > 1 else ():
            if text.startswith(singular):
                words = text.replace(singular, plural, 1)
                break
        parts.append(f"{name} {words}" if is_verb else f"{name}: {words}")
    return "; ".join(parts)


def _message(report: pytest.TestReport) -> str:
    """The failure in one line."""
    if hasattr(report, "wasxfail"):
        return f"failed as expected ({report.wasxfail})" if report.wasxfail else "failed as expected"
    if isinstance(report.longrepr, tuple):
        text = str(report.longrepr[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(crash.message) if crash is not None else str(report.longrepr)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "failed")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


def _where(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{os.path.basename(crash.path)}:{crash.lineno}" if crash is not None else ""


def _completed(
    made: pytest.TestReport, reports: Mapping[int, pytest.TestReport], end: TestEnd, told: Sequence[_Told] = ()
) -> pytest.TestReport:
    """Add what all ranks have to say: times, captured output, properties."""
    made.duration = max((one.duration for one in reports.values()), default=0.0)
    made.start = min((one.start for one in reports.values()), default=0.0)
    made.stop = max((one.stop for one in reports.values()), default=0.0)
    made.user_properties = []
    for one in reports.values():
        made.user_properties += [each for each in one.user_properties if each not in made.user_properties]
    captured: dict[tuple[str, str], list[int]] = {}
    for rank, one in reports.items():
        for name, text in one.sections:
            captured.setdefault((name, text), []).append(rank)
    for rank in [one.rank for one in told if _PHASES[one.phase] == made.when]:
        for name, text in end.ranks[rank].output:
            captured.setdefault((f"Captured {name} {made.when}", text), []).append(rank)
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in captured))}
    made.sections = [
        (f"{name} ({ranks_in_words(ranks)})" if len(end.ranks) > 1 else name, text)
        for (name, text), ranks in sorted(captured.items(), key=lambda each: (order[each[0][0]], min(each[1])))
    ]
    return made


def _subtests(reports: Mapping[int, Sequence[pytest.TestReport]]) -> list[pytest.TestReport]:
    """The reports on subtests: one for each, that of the first rank on which it did not pass."""
    found: dict[str, list[tuple[int, pytest.TestReport]]] = {}
    for rank, several in reports.items():
        for one in several:
            if not _is_main(one):
                found.setdefault(f"{one.when} {getattr(one, 'context', '')}", []).append((rank, one))
    made = []
    for same in found.values():
        told = [
            _Told(rank, _PASSED if one.passed else _message(one), 9 if one.passed else 0, 1, _where(one), one)
            for rank, one in same
        ]
        main = min(told, key=lambda one: (one.weight, one.rank))
        assert main.report is not None
        report = copy.copy(main.report)
        if not report.passed:
            _add(report, told, main, TestEnd())
        made.append(report)
    return made
