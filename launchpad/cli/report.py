"""`launchpad report [JOB]`: one HTML file about a job, for colleagues and CI."""

from __future__ import annotations

import os

import click

from launchpad.errors import UsageError
from launchpad.record import bundle
from launchpad.report import page


@click.command(
    "report",
    short_help="Write a page about a job, in one HTML file.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", required=False)
@click.option(*("-o", "--output"), default="job.html", show_default=True, metavar="FILE", help="The file to write.")
def command(job: str | None, output: str) -> int:
    """Write a page about JOB: the verdict, a timeline, the output of all ranks, stacks, and how it was run.

    JOB is an id that `launchpad jobs` lists, a prefix of one, or a bundle; the default is the latest job. It may still
    be running. The page is one file that loads nothing from elsewhere.
    """
    with bundle.opened(job, os.environ) as folder:
        if problem := page.write(output, folder, bundle.shown(job, folder)):
            raise UsageError(f"--output {problem}")
    click.echo(os.path.abspath(output))
    return 0
