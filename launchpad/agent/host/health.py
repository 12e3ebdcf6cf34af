"""Checks whether this node is healthy (--health): by the user's command, or by the quick part of launchpad doctor."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from ... import linux
from ...protocol.commands import CheckHealth
from ...protocol.events import HealthChecked
from ...protocol.printable import printable
from .child import NOT_FOUND, ChildEnded, PartWithChildren, Task, execute

# Of what the command has written.
_LINES, _LINE = 5, 200

# What the quick part of doctor has to say, as JSON.
_MOST_ANSWERS = 1 << 20


class HealthChecker(PartWithChildren):
    """Carries out CheckHealth."""

    def on(self, command: CheckHealth) -> None:
        """Begin the check."""
        environ = {**os.environ, **command.environ}
        judge: Callable[[ChildEnded, float], HealthChecked]
        if command.words:
            work = functools.partial(execute, command.words, command.cwd, environ)
            judge, task = by_command, Task(work, command.seconds, _LINES * _LINE * 4)
        else:
            work = functools.partial(_look, environ)
            judge, task = by_doctor, Task(work, command.seconds, _MOST_ANSWERS, errors=False)

        def report(ended: ChildEnded) -> None:
            self._hub.outbox.say(judge(ended, command.seconds))

        try:
            self.begin(task, report)
        except OSError as error:
            self._hub.outbox.say(_checked(f"could not be started: {error.strerror}"))


def _look(environ: dict[str, str]) -> None:
    """In a child: write what the quick part of doctor sees of this host."""
    from ..checkup.quick import LOOKS, seen

    answers = []
    for subject, look in LOOKS.items():
        facts, problem = seen(look, {"environ": environ})
        answers.append([subject, facts, printable(problem)])
    linux.write_all(1, json.dumps(answers).encode())


def by_doctor(ended: ChildEnded, seconds: float) -> HealthChecked:
    """What it has seen, for the head to judge."""
    try:
        answers = json.loads(ended.output) if ended.code == 0 else []
    except ValueError:
        answers = []
    return _checked("" if answers else _how(ended, seconds) or "saw nothing", answers=[tuple(one) for one in answers])


def by_command(ended: ChildEnded, seconds: float) -> HealthChecked:
    """Healthy if it has exited with 0, or isn't there."""
    if ended.code in (0, NOT_FOUND):
        return _checked("", missing=ended.code == NOT_FOUND)
    lines = [printable(line.rstrip())[:_LINE] for line in ended.output.decode(errors="replace").splitlines()]
    return _checked(_how(ended, seconds), lines=[line for line in lines if line.strip()][-_LINES:])


def _how(ended: ChildEnded, seconds: float) -> str:
    if ended.code is None:
        return f"did not end within {seconds:g} s, and was killed"
    if ended.code < 0:
        return f"was killed by {signal.Signals(-ended.code).name}"
    return f"ended with exit code {ended.code}" if ended.code else ""


def _checked(problem: str, *, missing: bool = False, lines: Collection[str] = (), answers: Any = ()) -> HealthChecked:
    return HealthChecked(time.monotonic_ns(), problem, missing, list(lines), list(answers))
