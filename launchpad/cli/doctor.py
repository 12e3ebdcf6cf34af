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
    seen = check_up(read_hosts(options, None), options, python)
    findings = judge(seen)
    if as_json:
        click.echo(json.dumps(_as_json(seen, findings), indent=1))
        return 3 if level_of(findings) == "bad" else 0
    found = list(checkup_table.rows(seen, findings))
    if can_draw(STDOUT, os.environ):
        click.echo(drawn(checkup_table.table(found), STDOUT, os.environ), nl=False)
    else:
        for line in checkup_table.lines(found):
            click.echo(line)
    click.echo(f"{hidden(seen)}; {seen.seconds:.1f} s", err=True)
    return 3 if level_of(findings) == "bad" else 0


def _as_json(seen: Any, findings: list[Any]) -> dict[str, Any]:
    names = [host.shown for host in seen.hosts]
    return {
        "hosts": [
            {
                "name": host.shown,
                "failure": host.failure,
                "clock": host.skew,
                "facts": {subject: _fields(one) for subject, one in host.facts.items()},
                "problems": host.problems,
            }
            for host in seen.hosts
        ],
        "paths": [
            {
                "from": names[start],
                "to": names[to],
                **{name: value for name, value in path._asdict().items() if name != "peer"},
                "rate": seen.rates.get((start, to)),
            }
            for (start, to), path in sorted(seen.paths.items())
        ],
        "all_reduce": {"seconds": seen.reduced, "failed": seen.not_reduced},
        "findings": [{**one._asdict(), "hosts": [names[place] for place in one.hosts]} for one in findings],
        "seconds": round(seen.seconds, 3),
    }


def _fields(value: Any) -> Any:
    """Named tuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: _fields(one) for name, one in value._asdict().items()}
    if isinstance(value, list):
        return [_fields(one) for one in value]
    return value


take_host_options(command, run.command, "Check these hosts, over SSH unless it is localhost.", "python")
