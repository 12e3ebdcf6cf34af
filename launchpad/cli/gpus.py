"""`launchpad gpus`: show the GPUs of hosts, who uses them, and who has leased them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from launchpad.cli import run
from launchpad.cli.options import take_host_options
from launchpad.errors import NodeError
from launchpad.protocol.gpus import SeenGpu
from launchpad.protocol.printable import printable
from launchpad.runner.connect import read_hosts
from launchpad.runner.gpus import look
from launchpad.runner.options import HostOptions

_EPILOG = """\b
Examples:
  launchpad gpus                                the GPUs of this machine
  launchpad gpus -H a,b                         those of two hosts
  launchpad run -H a,b --gpus free:2 train.py   lease two that nobody uses, on each
"""


@click.command(
    "gpus",
    short_help="Show GPUs, and who uses them.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command(**named: Any) -> int:
    """Show the NVIDIA GPUs and MIG slices of this machine or of hosts, who uses them, and which job has leased them.

    A job leases GPUs with `launchpad run --gpus`, until it ends.
    """
    options = HostOptions(**named)
    found, problem = look(options, read_hosts(options, None) if options.given else ())
    if found:
        _show(found)
    if problem:
        raise NodeError(problem)
    return 0


def _show(gpus: Sequence[tuple[str, SeenGpu]]) -> None:
    rows = [("host", "gpu", "uuid", "model", "memory", "used by", "leased by")]
    for host, one in gpus:
        memory = f"{one.used >> 20}/{one.total >> 20} MiB"
        used = ", ".join(map(printable, one.users)) + ("memory errors" if one.faulty and not one.users else "")
        rows.append((host, str(one.number), printable(one.uuid), printable(one.name), memory, used, _lease(one)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip())


def _lease(one: SeenGpu) -> str:
    if one.lease is None:
        return ""
    user, job, since = one.lease
    when = f" since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}" if since else ""
    return printable(f"{user}: {job}{when}" if job else user)


take_host_options(command, run.command, "Of these hosts, over SSH unless it is localhost. Default: this machine.")
