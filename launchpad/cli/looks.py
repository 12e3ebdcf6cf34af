"""Asks a running job what its ranks do and use."""

from __future__ import annotations

import json

from launchpad.cli.asking import answer
from launchpad.control.client import NoAnswer, ask
from launchpad.diagnosis.activity import JobLook
from launchpad.errors import UsageError


def first_look(job: str) -> JobLook:
    """The job as it is now. Raises UsageError if there is none, or not here."""
    return JobLook(*json.loads(answer("top", job, lambda: ask(job, "sample"))))


def next_look(job: str) -> JobLook | None:
    """The job as it is now; None if it has ended. Raises UsageError if it doesn't answer."""
    try:
        text = ask(job, "sample")
    except NoAnswer:
        raise
    except UsageError:
        return None
    return JobLook(*json.loads(text)) if text else None
