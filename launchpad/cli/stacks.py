"""`launchpad stacks`: show where the ranks of a running job are."""

from __future__ import annotations

import os

import click

from launchpad.errors import UsageError
from launchpad.record import job_store, replay


@click.command("stacks", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--full", is_flag=True, help="Show every thread of every rank.")
@click.option("--native", is_flag=True, help="Include native frames; needs py-spy.")
def command(job: str, full: bool, native: bool) -> int:
    """Show where the ranks of a running job are.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. The job keeps
    running. Ranks at the same place are grouped, outliers first.
    """
    from launchpad.head.control import ask

    try:
        text = ask(job, "stacks", native=native, full=full or native)
    except UsageError as error:
        raise UsageError(f"{error}{elsewhere(job, 'stacks')}") from None
    if not text:
        raise UsageError("the job ended before it could answer")
    click.echo(text)
    return 0


def elsewhere(job: str, command: str) -> str:
    """A hint at the host on which the job runs, if that is another one."""
    try:
        folder = replay.find_job(job or None, os.environ)
    except UsageError:
        return ""
    planned = replay.first_event(folder)
    if planned is None or planned.host in ("", os.uname().nodename) or job_store.state_of(folder) == "over":
        return ""
    return f"; job {planned.job} was started on {planned.host}: run launchpad {command} there"
