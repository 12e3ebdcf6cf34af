"""`launchpad bundle [JOB]`: a job's record in one file, for colleagues and bug reports."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from typing import Any

import click

from launchpad.doctor import checkup_json
from launchpad.doctor.judge import judge
from launchpad.errors import LaunchpadError, UsageError
from launchpad.job.masking import TextMask
from launchpad.protocol.printable import printable_line
from launchpad.record import bundle, job_store, replay
from launchpad.record.recorded_verdict import in_words, look_at
from launchpad.report import page
from launchpad.runner.checkup import check_up
from launchpad.runner.options import HostOptions


@click.command(
    "bundle",
    short_help="Pack a job's record into one file, for a bug report.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", required=False)
@click.option("-o", "--output", default="job.tar.gz", show_default=True, metavar="FILE", help="The file to write.")
@click.pass_context
def command(ctx: click.Context, job: str | None, output: str) -> int:
    """Pack the record of JOB into one file: verdict, events, output, report, how it was run, and this machine's doctor.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest job. Secrets are masked,
    also in the output, if they are known here: the values of variables whose names sound secret. `launchpad why`,
    `logs`, `report` and `trace` read the file in place of JOB.
    """
    ctx.obj.close()
    folder = replay.find_job(job, os.environ)
    if not output.endswith(bundle.ENDINGS):
        raise UsageError(f"--output {output}: a bundle's name ends with .tar.gz; type {output}.tar.gz")
    running = job_store.state_of(folder) == "running"
    mask = TextMask(os.environ)
    with tempfile.TemporaryDirectory(prefix="launchpad-bundle-") as scratch:
        copied = os.path.join(scratch, os.path.basename(folder))
        try:
            bundle.copy(folder, copied, mask)
            _add(copied, "doctor.json", mask(json.dumps(_doctor(), indent=1)))
            with open(os.path.join(copied, job_store.EVENTS), "rb") as lock:
                if running:  # the copy's job looks alive as long as a lock is held, as by its launchpad
                    fcntl.flock(lock, fcntl.LOCK_EX)
                _add(copied, "why.txt", "".join(f"{line}\n" for line in _why(copied)))
                page.write(os.path.join(copied, "report.html"), copied, os.path.realpath(folder))
            bundle.write(copied, output)
        except OSError as error:
            raise UsageError(f"--output {output}: {error.strerror}; name a file that can be written") from None
    click.echo(os.path.abspath(output))
    if running:
        click.echo("launchpad: the job is still running: its record ends here", err=True)
    return 0


def _add(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _why(folder: str) -> list[str]:
    history, verdict, earlier = look_at(folder)
    return [printable_line(line) for line in in_words(folder, history, verdict, earlier)]


def _doctor() -> dict[str, Any]:
    """What the doctor says of this machine."""
    try:
        seen = check_up((), HostOptions(), None, code=False)
    except LaunchpadError as error:
        return {"failed": str(error)}
    return checkup_json.as_json(seen, judge(seen))
