"""`launchpad stop`: stop a running job, or send it another signal."""

from __future__ import annotations

import os
import signal

import click

from launchpad.cli.asking import answer
from launchpad.cli.options import stop_signal
from launchpad.control.client import ask, send_signal
from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.job.hosts import some_of
from launchpad.job.outcome import STOPPING
from launchpad.record import held_hosts, replay


@click.command("stop", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--signal", "signum", type=stop_signal, default="TERM", metavar="SIG", help="Default: TERM.")
@click.option("--role", default="", metavar="ROLE", help="Stop only this role, or replica of one.")
def command(job: str, signum: int, role: str) -> int:
    """Stop a running job, as if launchpad itself had got the signal.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. INT, TERM and
    HUP stop it; QUIT has it show where its ranks are; others, like USR1, are passed on to the ranks. This doesn't wait
    for the end of the job: `launchpad wait` does. With --role, that role has then ended well, and the others run on.
    """
    if role:
        if signum != signal.SIGTERM:
            raise UsageError("--role stops a role with its own stop signal; leave --signal out")
        click.echo(answer("stop", job, lambda: ask(job, "stop", role=role)), err=True)
        return 0
    try:
        text = answer("stop", job, lambda: send_signal(job, signum))
    except UsageError:
        if signum not in STOPPING or not (folder := _orphaned(job)):
            raise
        text = _end_orphans(folder)
    click.echo(text, err=True)
    return 0


def _orphaned(job: str) -> str:
    """The record of the job, if its launchpad is gone and its ranks may go on; else ""."""
    try:
        folder = replay.find_job(job or None, os.environ)
    except UsageError:
        return ""
    return folder if held_hosts.headless(folder) else ""


def _end_orphans(folder: str) -> str:
    from launchpad.runner.orphans import end_orphans

    name = os.path.basename(folder)
    done = end_orphans(folder)
    if done.failed:
        raise NodeError(failed_hosts(done.failed, len([*done.ended, *done.gone, *done.failed]), ""))
    ended = f"ended its ranks on {some_of(done.ended)}" if done.ended else "its ranks have ended, too"
    return f"the launchpad of job {name} is gone; {ended}"
