"""`launchpad restart`: start a role of a running job again."""

from __future__ import annotations

import click

from launchpad.cli.asking import answer
from launchpad.control.client import ask


@click.command("restart", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("role")
@click.argument("job", default="", required=False)
def command(role: str, job: str) -> int:
    """Start the ranks of ROLE again, while all others of the running job run on.

    ROLE is a role, or one of its replicas, rollout.1. Its ranks get their stop signal and their grace first. JOB is an
    id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one.
    """
    click.echo(answer("restart", job, lambda: ask(job, "restart", role=role)), err=True)
    return 0
