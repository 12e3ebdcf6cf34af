"""`launchpad stacks`: where the ranks of a running job are."""

from __future__ import annotations

import click

from launchpad.errors import UsageError


@click.command("stacks", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--full", is_flag=True, help="Every thread of every rank.")
@click.option("--native", is_flag=True, help="The frames of native code too, by py-spy, where it is installed.")
def command(job: str, full: bool, native: bool) -> int:
    """Show where the ranks of a running job are: JOB is its id, or how that begins; without it, the latest job's.

    The job goes on. Ranks that are at the same place are told of together, those that differ from the others first.
    """
    from launchpad.head.control import ask

    text = ask(job, native=native, full=full or native)
    if not text:
        raise UsageError("the job ended before it could answer")
    click.echo(text)
    return 0
