"""What a running job answers to a command, and where to type that if the job runs on another host."""

from __future__ import annotations

import os
from collections.abc import Callable

from launchpad.console.debugger_sink import REFUSED
from launchpad.errors import UsageError
from launchpad.protocol.printable import printable_lines
from launchpad.record import held_hosts, job_store, replay


def answer(command: str, job: str, ask: Callable[[], str]) -> str:
    """The answer to `ask`. Raises UsageError: there is no such job here, it refused, or it ended before."""
    try:
        text = ask()
    except UsageError as error:
        raise UsageError(f"{error}{_headless(job) or _elsewhere(job, command)}") from None
    if not text:
        raise UsageError("the job ended before it could answer")
    if text.startswith(REFUSED):
        raise UsageError(text.removeprefix(REFUSED))
    return "\n".join(printable_lines(text))


def _headless(job: str) -> str:
    """A hint at a job that goes on, though its launchpad is gone."""
    try:
        found = held_hosts.headless(replay.find_job(job or None, os.environ))
    except UsageError:
        return ""
    return f"; job {found.job} is {found}" if found else ""


def _elsewhere(job: str, command: str) -> str:
    """A hint at the host on which the job runs, if that is another one."""
    try:
        folder = replay.find_job(job or None, os.environ)
        planned = replay.first_event(folder)
    except UsageError:
        return ""
    if planned is None or planned.host in ("", os.uname().nodename) or job_store.state_of(folder) == "over":
        return ""
    return f"; job {planned.job} was started on {planned.host}: run launchpad {command} there"
