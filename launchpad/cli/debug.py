"""`launchpad debug`: have a debugger listen in a rank of a running job."""

from __future__ import annotations

import click

from launchpad.cli.asking import answer
from launchpad.cli.options import rank_and_port
from launchpad.control.client import ask
from launchpad.errors import UsageError


@click.command("debug", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("words", nargs=-1, metavar="[JOB] RANK[:PORT]")
def command(words: tuple[str, ...]) -> int:
    """Attach a debugger to a rank of a running job.

    Debugpy begins to listen in the rank, and this says how to attach VS Code or another client to it, at PORT of this
    machine's loopback address (default: a free one). The rank goes on until the client stops it. JOB is an id that
    `launchpad jobs` lists, or a prefix of one; the default is the latest running one. To debug a rank from its
    beginning, start the job with --debug.
    """
    if not 1 <= len(words) <= 2:
        raise UsageError("say which rank: launchpad debug [JOB] RANK")
    job = words[0] if len(words) == 2 else ""
    try:
        rank, port = rank_and_port(words[-1])
    except click.BadParameter as error:
        raise UsageError(error.message) from None
    click.echo(answer("debug", job, lambda: ask(job, "debug", rank=rank, port=port)))
    return 0
