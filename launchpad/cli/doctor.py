"""`launchpad doctor`: find out whether these machines can run a job together, and if not, what to type."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from launchpad.cli import run
from launchpad.cli.options import take_host_options
from launchpad.console import checkup_table
from launchpad.console.terminal import can_draw, drawn
from launchpad.doctor import checkup_json
from launchpad.doctor.judge import hidden, judge, level_of
from launchpad.protocol.events import STDOUT
from launchpad.runner.checkup import check_up
from launchpad.runner.connect import read_hosts
from launchpad.runner.options import HostOptions

_EPILOG = """\b
Examples:
  launchpad doctor                   this machine
  launchpad doctor -H a,b,c          these hosts, and every path between them
  launchpad doctor --hostfile hosts --json
  launchpad doctor -H a,b --sync-env  whether they can be given this environment

\b
Exit code: 0 if a job can run there, whatever else there is to say; 3 if
anything is bad; 2 bad input.
"""


@click.command(
    "doctor",
    short_help="Check whether hosts can run a job together.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings, and all facts.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, python: str | None, **named: Any) -> int:
    """Check hosts, or this machine: names, network, clocks, versions, limits, memory, disks, GPUs, code.

    All hosts are checked at the same time. Nothing is installed there or left behind, and root is not needed. Each line
    says what is wrong where, and what to type.
    """
    ctx.obj.close()
    options = HostOptions(**named)
    seen = check_up(read_hosts(options, None), options, python, torch=not options.sync_env)
    findings = judge(seen)
    if as_json:
        click.echo(json.dumps(checkup_json.as_json(seen, findings), indent=1))
        return 3 if level_of(findings) == "bad" else 0
    found = list(checkup_table.rows(seen, findings))
    if can_draw(STDOUT, os.environ):
        click.echo(drawn(checkup_table.table(found), STDOUT, os.environ), nl=False)
    else:
        for line in checkup_table.lines(found):
            click.echo(line)
    click.echo(f"{hidden(seen)}; {seen.seconds:.1f} s", err=True)
    return 3 if level_of(findings) == "bad" else 0


take_host_options(command, run.command, "Check these hosts, over SSH unless it is localhost.", "python", "sync_env")
