"""`launchpad run`: start N ranks of a program and supervise them until they exit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from launchpad.cli.options import GroupedCommand
from launchpad.cli.run_options import run_options
from launchpad.console import prefix
from launchpad.console.message import say_on_stderr
from launchpad.errors import UsageError
from launchpad.job.hosts import ALLOCATION_VARIABLES
from launchpad.runner.job import run_job
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import HostOptions, NodeOptions, ReportOptions, RunOptions

if TYPE_CHECKING:
    from launchpad.job.plan import Plan

Part = TypeVar("Part", HostOptions, NodeOptions, ReportOptions)

# Options that say what to do with the job, rather than what it is.
_NOT_OF_A_JOB = {"config", "detach", "dry_run", "as_json"}

# Those of torchrun that a user would miss.
_NO_EFFECT = ("event-log-handler", "logs-specs")

ONE_JOB = "--detach starts one job, and those of a file run one after the other"

_EPILOG = """\b
Examples:
  launchpad run --nproc 4 train.py --lr 0.1        a script
  launchpad run -n gpu -m package.train            a module, one rank per GPU
  launchpad run -n 2 -- ./prog --flag              any program
  launchpad run -n 4 --log-dir logs -r 1:3 t.py    rank 1 to files only
  launchpad run -n 4 train.py:run                  a function: run(rank, size)
  launchpad run -H a:4,b:4 train.py                on two hosts, over SSH
  launchpad run -n 1 a.py : -n 4 b.py              two programs in one world
  launchpad run -n 4 --detach train.py             in the background: launchpad attach
  launchpad run -n 4 --dry-run train.py            what would be run

\b
Exit code: 0 if every rank exited with 0; else the first failed rank's own, or
128+n for signal n; 2 wrong usage or bad input; 3 a host can't be used; 4 a node
was lost; 124 --timeout or --stall-timeout; 130, 143, 129 ended by Ctrl-C, TERM,
HUP; 141 standard output was closed.
"""


@click.command(
    "run",
    cls=GroupedCommand,
    short_help="Start N ranks of a program, and supervise them.",
    epilog=_EPILOG,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    options_metavar="[OPTIONS]",
)
@run_options
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="TARGET [ARGS]...")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Start N ranks of TARGET: a script.py, a module (-m), any program on PATH, or a function (file.py:NAME).

    Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …). If one fails, launchpad ends
    the others and says which one it was and why. Everything after TARGET is passed to TARGET.
    """
    roles: Any = None
    if options["config"] is not None:
        from launchpad.cli import job_file

        found = job_file.read_job_file(options["config"], ctx.command)
        if options["job"] is None and list(found) != [""]:
            if options["detach"]:
                raise UsageError(f"{ONE_JOB}; add --job NAME")
            ctx.obj.close()  # each job starts its own agent
            return job_file.run_all(options["config"], found, ctx.meta["args"])
        job = options["job"] or ""
        options = job_file.with_job(ctx, found, job)
        roles = found[job].get("roles")
    elif options["job"] is not None:
        raise UsageError(f"--job {options['job']} names a job in a file; add --config FILE")
    if not options["quiet"]:
        _say_what_has_no_effect(ctx, options)
    _check_dry_run(options)

    def show(plan: Plan) -> None:
        from launchpad.cli.job_file import sources
        from launchpad.console import dry_run

        dry_run.show(plan, sources(ctx, options["config"]), as_json=options["as_json"])

    wanted = typed(options)
    if ":" in ctx.params["target"] and ctx.command is command:
        from launchpad.cli.programs import read_programs

        first, others = read_programs(ctx.command, wanted.target)
        wanted = wanted._replace(target=first, programs=others)
    run = run_job
    if roles is not None:
        from launchpad.cli.roles import read_roles
        from launchpad.runner.roles import run_roles

        where = f"{options['config']}: jobs.{options['job']}.roles"
        run = partial(run_roles, read_roles(roles, wanted, ctx.command, where), where)
    # --nnodes 1 means this machine.
    elif ctx.get_parameter_source("nnodes") is ParameterSource.DEFAULT or ":" in options["nnodes"]:
        wanted = on_allocation(wanted)
    with ExitStack() as closing:
        if options["dry_run"] or not options["detach"]:
            return run(wanted, ctx.obj, closing, show=show if options["dry_run"] else None)
        from launchpad.runner.departure import Departed, depart

        ctx.obj.close()
        departure = depart()
        if isinstance(departure, Departed):
            if departure.job:
                click.echo(departure.job)
            return departure.code
        local = LocalAgent(leaves=True)
        closing.callback(local.close)
        return run(wanted, local, closing, departure=departure)


def _check_dry_run(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that don't go with --dry-run, or without it."""
    if options["as_json"] and not options["dry_run"]:
        raise UsageError("--json only works with --dry-run; add --dry-run, or leave --json out")
    for name in ("sync", "sync_env"):
        if options["dry_run"] and options[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--dry-run changes nothing, but {option} writes to the hosts; leave one of them out")


def _say_what_has_no_effect(ctx: click.Context, options: Mapping[str, Any]) -> None:
    for option in _NO_EFFECT:
        if ctx.get_parameter_source(option.replace("-", "_")) is not ParameterSource.DEFAULT:
            say_on_stderr(f"--{option} has no effect: plug-ins for torchrun are not loaded")
    for name in prefix.unknown_macros(options["log_line_prefix_template"]):
        say_on_stderr(
            f"{prefix.OPTION}: there is no macro {name}, so it is shown as it is; there are "
            + " ".join(f"${{{macro}}}" for macro in prefix.MACROS)
        )


def typed(options: Mapping[str, Any]) -> RunOptions:
    """The parsed command line as RunOptions."""
    left = dict(options)
    if isinstance(nproc := left.get("nproc"), str) and nproc.startswith("gpu:"):
        if left["gpus"]:
            raise UsageError(f"--nproc {nproc} and --gpus {left['gpus']} both choose GPUs; leave one of them out")
        from launchpad.job.gpus import parse_gpus

        gpus = nproc.removeprefix("gpu:")
        parse_gpus(f"{gpus},", "--nproc gpu:")
        left["nproc"], left["gpus"] = "gpu", f"{gpus},"

    def take(kind: type[Part]) -> Part:
        return kind(**{name: left.pop(name) for name in kind._fields if name in left})

    hosts, nodes, reports = take(HostOptions), take(NodeOptions), take(ReportOptions)
    own = {name: left.pop(name) for name in RunOptions._fields if name in left}
    unknown = left.keys() - _NOT_OF_A_JOB
    assert not unknown, f"no field of RunOptions: {unknown}"
    return RunOptions(**own, hosts=hosts, nodes=nodes, reports=reports)


def on_allocation(options: RunOptions) -> RunOptions:
    """The options with the nodes of a batch allocation as hosts, in one, if they don't say where to run."""
    if ALLOCATION_VARIABLES.isdisjoint(os.environ):
        return options
    from launchpad.runner.allocation import with_allocation

    return with_allocation(options, os.environ)
