"""`launchpad profile`: where the ranks of a running job spend their time, as a file for speedscope."""

from __future__ import annotations

import base64
import json
import os
import zlib

import click

from launchpad.cli.asking import answer
from launchpad.cli.options import positive_seconds
from launchpad.console.message import say_on_stderr
from launchpad.control.client import ask
from launchpad.diagnosis.speedscope import merge
from launchpad.errors import UsageError
from launchpad.job.outcome import ranks_in_words

# The head gives up on whoever has waited for ten minutes.
MOST_SECONDS = 300.0


@click.command("profile", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", default="", required=False)
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only this rank. Default: all.")
@click.option(
    "--seconds", type=positive_seconds, default="10", show_default=True, help="How long to watch; at most 300."
)
@click.option(*("-o", "--output"), default="profile.json", show_default=True, metavar="FILE", help="The file to write.")
def command(job: str, rank: int | None, seconds: float, output: str) -> int:
    """Watch the ranks of a running job, and write where they spend their time.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. FILE is for
    https://www.speedscope.app, with a profile for each rank and each process below it. It needs py-spy on each rank's
    node.
    """
    if seconds > MOST_SECONDS:
        raise UsageError(f"--seconds {seconds:g}: a rank can be watched for {MOST_SECONDS:g} s at most")
    _check(output)
    text = answer("profile", job, lambda: ask(job, "profile", rank=-1 if rank is None else rank, seconds=seconds))
    found = {}
    missing: dict[str, list[int]] = {}
    for number, pid, problem, packed in json.loads(text):
        if problem:
            missing.setdefault(problem, []).append(number)
        else:
            found[number] = pid, json.loads(zlib.decompress(base64.b64decode(packed)))
    reasons = [f"{ranks_in_words(ranks)}: {problem}" for problem, ranks in missing.items()]
    if not found:
        raise UsageError("; ".join(reasons))
    try:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(merge(found, f"job {job}".strip()), file)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}; name a file that can be written") from None
    for reason in reasons:
        say_on_stderr(reason, bad=True)
    click.echo(f"{os.path.abspath(output)}: {ranks_in_words(sorted(found))}; open it in https://www.speedscope.app")
    return 0


def _check(path: str) -> None:
    """Raise UsageError if the file can't be written, before anybody has waited for it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--output {path}: can't be written; name a file in a folder where you may write")
