"""`launchpad why [JOB]`: explain from its record how a job ended, or how it is doing."""

from __future__ import annotations

import json
import os

import click

from launchpad.diagnosis.verdict_json import as_json
from launchpad.protocol.printable import printable_line
from launchpad.record import bundle
from launchpad.record.recorded_verdict import in_words, look_at


@click.command(
    "why",
    short_help="Say which rank of a job failed first, and why.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", required=False)
@click.option("--json", "as_json_", is_flag=True, help="Print the verdict as JSON.")
def command(job: str | None, as_json_: bool) -> int:
    """Say which rank of JOB failed first, why, and what happened to the others.

    JOB is an id that `launchpad run` printed or `launchpad jobs` lists, a prefix of one, or a bundle; the default is
    the latest job. The job may still be running, and launchpad itself may have been killed.
    """
    with bundle.opened(job, os.environ) as folder:
        history, verdict, earlier = look_at(folder)
        lines = in_words(folder, history, verdict, earlier)
        logs = bundle.shown(job, folder)
    if as_json_:
        click.echo(json.dumps(as_json(history, verdict, lines, earlier), indent=1))
        return 0
    job_line = f"job {history.planned.job}: {' '.join(history.planned.words)}"
    for line in (job_line, *lines, f"logs: {logs}"):
        click.echo(printable_line(line).encode())
    return 0
