"""`launchpad why [JOB]`: tell a job's end, or how it stands, from its record."""

from __future__ import annotations

import json
import os

import click

from launchpad.events import Restarted
from launchpad.report import replay, shelf
from launchpad.report.conclusion import as_json
from launchpad.report.story import Story
from launchpad.report.telling import in_short, tell
from launchpad.report.verdict import Verdict, verdict_on


@click.command("why", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("--json", "as_json_", is_flag=True, help="The verdict for machines.")
def command(job: str | None, as_json_: bool) -> int:
    """Say which rank of JOB failed first, why, and what became of the others.

    JOB is an id that `launchpad run` told or `launchpad jobs` lists, or the beginning of one; without it, the
    latest job. It may be running, over, or have lost its launchpad.
    """
    folder = replay.find_job(job, os.environ)
    story, verdict, history = look_at(folder)
    lines = tell(story, verdict, history)
    if as_json_:
        click.echo(json.dumps(as_json(story, verdict, lines, history), indent=1))
        return 0
    job_line = f"job {story.planned.job}: {' '.join(story.planned.words)}"
    for line in (job_line, *lines, f"logs: {os.path.realpath(folder)}"):
        click.echo(line.encode(errors="backslashreplace"))
    return 0


def look_at(folder: str) -> tuple[Story, Verdict, list[str]]:
    """The story of a job on record, the verdict on it, and on each attempt before the last."""
    story, history = Story(), []
    for event in replay.read_events(folder):
        if isinstance(event, Restarted):
            history.append(in_short(story, verdict_on(story)))
        story.on(event)
    verdict = verdict_on(story)
    if story.over is None and not shelf.is_running(folder) and verdict.kind in ("running", "none"):
        verdict = verdict._replace(kind="cut off", exit_code=137)
    return story, verdict, history
