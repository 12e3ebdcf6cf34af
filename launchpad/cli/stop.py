"""`launchpad stop`: stop a running job, or send it another signal."""

from __future__ import annotations

import click

from launchpad.cli.options import stop_signal
from launchpad.cli.stacks import elsewhere
from launchpad.errors import UsageError


@click.command("stop", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--signal", "signum", type=stop_signal, default="TERM", metavar="SIG", help="Default: TERM.")
def command(job: str, signum: int) -> int:
    """Stop a running job, as if launchpad itself had got the signal.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. INT, TERM and
    HUP stop it; QUIT has it show where its ranks are; others, like USR1, are passed on to the ranks. This doesn't wait
    for the end of the job: `launchpad wait` does.
    """
    from launchpad.head.control import send_signal

    try:
        text = send_signal(job, signum)
    except UsageError as error:
        raise UsageError(f"{error}{elsewhere(job, 'stop')}") from None
    if not text:
        raise UsageError("the job ended before it could answer")
    click.echo(text, err=True)
    return 0
