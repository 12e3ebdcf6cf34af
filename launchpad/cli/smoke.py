"""`launchpad smoke FILE`: run all jobs of a file one after the other, and say how each ended."""

from __future__ import annotations

import click

from launchpad.cli import run
from launchpad.cli.job_file import read_job_file, run_all
from launchpad.cli.options import complete
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
    words = complete(click.Context(run.command, info_name="launchpad run"), list(overrides))
    for name, why in (("--detach", run.ONE_JOB), ("--job", "--job: smoke runs all jobs of the file")):
        if any(word.partition("=")[0] == name for word in words):
            raise UsageError(f"{why}; leave it out")
    return run_all(file, read_job_file(file, run.command), ["--config", file, *words])
