"""`launchpad smoke FILE`: run all jobs of a file one after the other, and say how each ended."""

from __future__ import annotations

import click

from launchpad.cli import run
from launchpad.cli.job_file import read_job_file, run_all
from launchpad.errors import UsageError


@click.command(
    "smoke",
    short_help="Run the jobs of a file, one after the other.",
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
)
@click.argument("file")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF run]...")
def command(file: str, overrides: tuple[str, ...]) -> int:
    """Run the jobs of FILE (TOML) one after the other: the smoke test of a CI run.

    Options of `launchpad run` override those of the file. The exit code is that of the first failed job, or 0.
    """
    if "--detach" in overrides:
        raise UsageError(f"{run.ONE_JOB}; leave it out")
    names = list(read_job_file(file, run.command))
    return run_all(names, ["--config", file, *overrides])
