"""`launchpad why [JOB]`: explain from its record how a job ended, or how it is doing."""

from __future__ import annotations

import json
import os

import click

from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict, verdict_on
from launchpad.diagnosis.verdict_json import as_json
from launchpad.diagnosis.verdict_text import CUT_OFF, describe, summarize
from launchpad.protocol.events import Restarted
from launchpad.record import job_store, replay


@click.command(
    "why",
    short_help="Say which rank of a job failed first, and why.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", required=False)
@click.option("--json", "as_json_", is_flag=True, help="Print the verdict as JSON.")
def command(job: str | None, as_json_: bool) -> int:
    """Say which rank of JOB failed first, why, and what happened to the others.

    JOB is an id that `launchpad run` printed or `launchpad jobs` lists, or a prefix of one; the default is the
    latest job. The job may still be running, and launchpad itself may have been killed.
    """
    folder = replay.find_job(job, os.environ)
    history, verdict, earlier = look_at(folder)
    lines = describe(history, verdict, earlier)
    if verdict.kind != "cut off" and history.over is None and job_store.state_of(folder) == "over":
        lines.append(CUT_OFF)
    if as_json_:
        click.echo(json.dumps(as_json(history, verdict, lines, earlier), indent=1))
        return 0
    job_line = f"job {history.planned.job}: {' '.join(history.planned.words)}"
    for line in (job_line, *lines, f"logs: {os.path.realpath(folder)}"):
        click.echo(line.encode(errors="backslashreplace"))
    return 0


def look_at(folder: str) -> tuple[History, Verdict, list[str]]:
    """The history of a recorded job, the verdict on it, and a summary of each earlier attempt."""
    history, earlier = History(), []
    for event in replay.read_events(folder):
        if isinstance(event, Restarted):
            earlier.append(summarize(history, verdict_on(history)))
        history.on(event)
    verdict = verdict_on(history)
    if history.over is None and verdict.kind in ("running", "none"):
        match job_store.state_of(folder):
            case "over":
                verdict = verdict._replace(kind="cut off")
            case "unknown":
                verdict = verdict._replace(kind="unknown")
    return history, verdict, earlier
