"""`launchpad warm`: keep an image of torch in memory, from which later runs start at once."""

from __future__ import annotations

import json
from typing import Any

import click

from launchpad.cli.options import positive_seconds
from launchpad.errors import UsageError

_EPILOG = """\b
Examples:
  launchpad warm                                keep torch for 30 minutes after the last run
  launchpad warm --for 8h --preload transformers
  launchpad warm --status
  launchpad warm --stop
"""


@click.command(
    "warm",
    short_help="Keep torch in memory: later runs start at once.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--for",
    "seconds",
    type=positive_seconds,
    default="30m",
    metavar="TIME",
    help="End it when it was not used for this long. Default: 30m.",
)
@click.option("--preload", metavar="MODULE,…", help="Import these too.")
@click.option("--python", metavar="PATH", help="The ranks' interpreter, as for launchpad run.")
@click.option("--status", is_flag=True, help="Show what is kept, and why the last run did not use it.")
@click.option("--stop", is_flag=True, help="End it.")
@click.option("--json", "as_json", is_flag=True, help="With --status: print JSON.")
def command(seconds: float, preload: str | None, python: str | None, status: bool, stop: bool, as_json: bool) -> int:
    """Import torch once and keep the process: runs on this machine are forked from it, where that is sound.

    launchpad run, smoke, bench and launchpad.run use it by themselves, and start cold where the result could differ.
    """
    from launchpad.runner import warming

    if status and stop:
        raise UsageError("--status shows what is kept and --stop ends it; leave one of them out")
    if as_json and not status:
        raise UsageError("--json only works with --status; add it, or leave --json out")
    if stop:
        click.echo("ended" if warming.stop() else "nothing is kept")
        return 0
    if not status:
        warming.warm(seconds, preload, python)
    found = warming.status()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return 0
    for line in _lines(found):
        click.echo(line)
    return 0


def _lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["nothing is kept; launchpad warm keeps an image of torch"]
    lines = []
    for image in found["images"]:
        what = ", ".join(name for name in image["preload"] if name != "torch.distributed") or "plain Python"
        threads = f", OMP_NUM_THREADS={image['threads']}" if image["preload"] and image["threads"] else ""
        lines.append(
            f"{what}{threads}: {image['state']}, pid {image['pid']}, {image['age']:.0f} s old, "
            f"{image['memory'] / 1e6:.0f} MB, used {image['uses']} times, {image['jobs']} running; {image['python']}"
        )
    if found["last_cold"]:
        lines.append(f"the last run did not use it: {found['last_cold']}")
    left = found["idle_ends"]
    lines.append(f"ends {'with --stop, or ' if left is None else ''}{_when(left)}")
    return lines


def _when(left: float | None) -> str:
    if left is None:
        return "some time after the jobs that run from it"
    return f"in {left / 60:.0f} min without a run" if left >= 120 else f"in {left:.0f} s without a run"
