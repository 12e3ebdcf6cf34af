"""`launchpad stop`: stop a running job, or send it another signal."""

from __future__ import annotations

import click

from launchpad.cli.asking import answer
from launchpad.cli.options import stop_signal
from launchpad.control.client import send_signal


@click.command("stop", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--signal", "signum", type=stop_signal, default="TERM", metavar="SIG", help="Default: TERM.")
def command(job: str, signum: int) -> int:
    """Stop a running job, as if launchpad itself had got the signal.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. INT, TERM and
    HUP stop it; QUIT has it show where its ranks are; others, like USR1, are passed on to the ranks. This doesn't wait
    for the end of the job: `launchpad wait` does.
    """
    click.echo(answer("stop", job, lambda: send_signal(job, signum)), err=True)
    return 0
