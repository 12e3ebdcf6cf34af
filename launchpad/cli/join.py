"""`launchpad join`: offer this machine to a job whose head runs elsewhere."""

from __future__ import annotations

import click

from launchpad.cli.options import GroupedCommand, rank_count
from launchpad.runner.joined import offer_machine
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import NodeOptions

_EPILOG = """\b
Example, on the first node and on each of the others:
  launchpad run --nnodes 4 --rdzv-backend c10d --rdzv-endpoint a --rdzv-id 42 train.py
  launchpad join a --rdzv-id 42
"""


@click.command("join", cls=GroupedCommand, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("endpoint", metavar="HOST[:PORT],…")
@click.option("--slots", type=rank_count, metavar="N|auto|cpu|gpu", help="Ranks here. Default: as on the head.")
@click.option("--rdzv-id", default="none", metavar="ID", help="The job's id.")
@click.option("--rdzv-secret-file", metavar="FILE", help="A file with the job's secret. Or set LAUNCHPAD_SECRET.")
@click.option("--rdzv-conf", default="", metavar="K=V,…", help="join_timeout: seconds to wait for the head (600).")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but why the job failed.")
@click.pass_obj
def command(
    local: LocalAgent,
    endpoint: str,
    slots: int | str | None,
    rdzv_id: str,
    rdzv_secret_file: str | None,
    rdzv_conf: str,
    quiet: bool,
) -> int:
    """Offer this machine to the job whose head is at HOST: ranks run here as the head's command line says.

    The head is `launchpad run --nnodes N --rdzv-endpoint HOST`. It may be started later; its job's exit code is ours.
    If HOST has several addresses of which only some are reachable, list them.
    """
    nodes = NodeOptions(rdzv_id=rdzv_id, rdzv_secret_file=rdzv_secret_file, rdzv_conf=rdzv_conf)
    return offer_machine(endpoint, slots, nodes, local, quiet=quiet)
