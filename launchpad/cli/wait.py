"""`launchpad wait`: wait for the end of jobs."""

from __future__ import annotations

import os
import time

import click

from launchpad.console.message import say_on_stderr
from launchpad.diagnosis.verdict_text import CUT_OFF
from launchpad.job.outcome import NODE_LOST
from launchpad.record import held_hosts, replay
from launchpad.record.recorded_verdict import look_at

# How often a job is looked at, in seconds.
LOOK_SECONDS = 0.25


@click.command("wait", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def command(jobs: tuple[str, ...]) -> int:
    """Wait until the JOBs have ended.

    JOB is an id that `launchpad run --detach` printed or `launchpad jobs` lists, or a prefix of one. The exit code is
    that of the first JOB on the command line that failed, or 0.
    """
    folders = [replay.find_job(job, os.environ) for job in jobs]
    codes = [wait_for(folder) for folder in folders]
    return next((code for code in codes if code != 0), 0)


def wait_for(folder: str) -> int:
    """Wait until the job has ended; its exit code. If its launchpad was killed, says so."""
    while replay.is_running(folder):
        time.sleep(LOOK_SECONDS)
    history, verdict, _ = look_at(folder)
    if history.over:
        return history.over.code
    name = os.path.basename(folder)
    say_on_stderr(f"job {name}: {CUT_OFF}", bad=True)
    if goes_on := held_hosts.headless(folder):
        say_on_stderr(f"it is {goes_on}")
    return verdict.exit_code or NODE_LOST
