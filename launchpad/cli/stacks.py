"""`launchpad stacks`: show where the ranks of a running job are."""

from __future__ import annotations

import click

from launchpad.cli.asking import answer
from launchpad.control.client import ask


@click.command("stacks", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--role", default="", metavar="ROLE", help="Only this role, or replica of one.")
@click.option("--full", is_flag=True, help="Show every thread of every rank.")
@click.option("--native", is_flag=True, help="Include native frames; needs py-spy.")
def command(job: str, role: str, full: bool, native: bool) -> int:
    """Show where the ranks of a running job are.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. The job keeps
    running. Ranks at the same place are grouped, outliers first.
    """
    click.echo(answer("stacks", job, lambda: ask(job, "stacks", native=native, full=full or native, role=role)))
    return 0
