"""`launchpad clean`: show what `--sync` and `--sync-env` have left on hosts, and remove it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from launchpad.cli import run
from launchpad.cli.options import take_host_options
from launchpad.errors import NodeError, UsageError
from launchpad.protocol.printable import printable
from launchpad.runner.cleaning import KeptFolder, clean
from launchpad.runner.connect import read_hosts
from launchpad.runner.options import HostOptions

_EPILOG = """\b
Examples:
  launchpad clean -H a,b                        show what is kept on two hosts
  launchpad clean -H a,b 'env-*'                remove all environments there
  launchpad clean -H a,b copy-project-1c22f6dcf277
"""


@click.command(
    "clean",
    short_help="Show and remove what is kept on hosts.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("names", nargs=-1, metavar="[NAME…]")
def command(names: tuple[str, ...], **named: Any) -> int:
    """Show the copies and environments that --sync and --sync-env keep on hosts, or remove those with these names.

    A NAME may have wildcards: '*' removes all. What a job uses stays. The next job that needs one sends it again.
    """
    options = HostOptions(**named)
    done = clean(options, read_hosts(options, None) if options.given else (), names)
    if not names:
        _show(done.left)
    for one in done.removed:
        click.echo(f"{one.host}: removed {printable(one.name)}, {_size(one.own)}")
    if done.problem:
        raise NodeError(done.problem)
    if names and not done.removed:
        raise UsageError(f"nothing is kept under the name {' or '.join(names)}; launchpad clean shows the names")
    return 0


def _show(folders: Sequence[KeptFolder]) -> None:
    if not folders:
        click.echo("nothing is kept", err=True)
        return
    rows = [("host", "name", "size", "own", "last used", "of")]
    for one in folders:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        origin = one.origin or ("" if one.name.startswith("copy-") else "not whole")
        rows.append((one.host, printable(one.name), _size(one.size), _size(one.own), used, printable(origin)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for host, name, size, own, used, origin in rows:
        sizes = f"{size:>{widths[2]}}  {own:>{widths[3]}}"
        click.echo(f"{host:<{widths[0]}}  {name:<{widths[1]}}  {sizes}  {used:<{widths[4]}}  {origin}".rstrip())


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


take_host_options(command, run.command, "On these hosts, over SSH unless it is localhost. Default: this machine.")
