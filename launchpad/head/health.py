"""Asks nodes whether they are healthy (--health), and judges what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from launchpad.doctor.gpus import judge_gpus
from launchpad.doctor.hosts import judge_host
from launchpad.doctor.seen import Examination, HostSeen
from launchpad.head.requester import Requester
from launchpad.job.health import HealthCheck
from launchpad.protocol.commands import CheckHealth
from launchpad.protocol.events import HealthChecked
from launchpad.protocol.health import SUBJECTS, facts_of
from launchpad.protocol.printable import printable

# How much longer the agent may take to answer than the check does.
_MORE_SECONDS = 30.0


class Unwell(NamedTuple):
    """Why a node is left out."""

    reason: str  # what became of its check
    lines: tuple[str, ...] = ()  # the last that it said

    def __str__(self) -> str:
        said = "".join(f"\n  {line}" for line in self.lines)
        return f"its health check {self.reason}{', and said:' if said else ''}{said}"

    @property
    def short(self) -> str:
        """The same on one line."""
        return f"its health check {self.reason}{': ' if self.lines else ''}{''.join(self.lines[-1:])}"


def check_request(health: HealthCheck, cwd: str, environ: Mapping[str, str]) -> CheckHealth:
    """What to ask a node whose ranks run in this folder, with these variables."""
    return CheckHealth(list(health.words), cwd, dict(environ), health.seconds)


def examine(requester: Requester, requests: Mapping[int, CheckHealth]) -> tuple[dict[int, Unwell], list[int]]:
    """Have nodes check themselves. Returns why some are not healthy, and which lack the command. Raises NodeError."""
    seconds = max((request.seconds for request in requests.values()), default=0.0) + _MORE_SECONDS
    answers = dict(zip(sorted(requests), requester.ask(requests, HealthChecked, seconds), strict=True))
    unwell: dict[int, Unwell] = {}
    for node, answer in answers.items():
        try:
            why = judged(answer)
        except ValueError:
            why = Unwell("gave an answer that makes no sense")
        if why is not None:
            unwell[node] = why
    return unwell, [node for node, answer in answers.items() if answer.missing]


def judged(answer: HealthChecked) -> Unwell | None:
    """What is wrong with the node, if anything is. Raises ValueError if this is no answer."""
    if answer.problem:
        return Unwell(answer.problem, tuple(answer.lines))
    facts: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for subject, fields, problem in answer.answers:
        if problem:
            problems[subject] = problem
            continue
        if subject not in SUBJECTS:
            raise ValueError(subject)
        facts[subject] = facts_of(subject, fields)
    seen = HostSeen("", facts=facts, problems=problems)
    findings = [*judge_host(0, seen), *judge_gpus(Examination([seen]))]
    bad = [printable(finding.text) for finding in findings if finding.level == "bad"]
    return Unwell("(launchpad doctor) has failed", tuple(bad)) if bad else None
