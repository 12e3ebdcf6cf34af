"""`launchpad trace [JOB]`: the timeline of a job, for Perfetto."""

from __future__ import annotations

import json
import os

import click

from launchpad.errors import UsageError
from launchpad.record import bundle
from launchpad.report import recorded
from launchpad.report.trace import trace_of


@click.command(
    "trace",
    short_help="Write the timeline of a job, for Perfetto.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", required=False)
@click.option(*("-o", "--output"), default="trace.json", show_default=True, metavar="FILE", help="The file to write.")
def command(job: str | None, output: str) -> int:
    """Write the timeline of JOB as a trace for https://ui.perfetto.dev.

    JOB is an id that `launchpad jobs` lists, a prefix of one, or a bundle; the default is the latest job.
    """
    with bundle.opened(job, os.environ) as folder:
        timeline = recorded.read(folder).timeline
        name = f"job {os.path.basename(folder)}"
    try:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(trace_of(timeline, name), file)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}; name a file that can be written") from None
    click.echo(f"{os.path.abspath(output)}; open it in https://ui.perfetto.dev")
    return 0
