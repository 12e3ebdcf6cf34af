"""`launchpad launch`: what `python -m torch.distributed.launch` is beside torchrun."""

from __future__ import annotations

import copy
from typing import Any

import click
from click.core import ParameterSource

from launchpad.cli import run
from launchpad.errors import UsageError

_HELP = """Like `launchpad run`, for commands of torch.distributed.launch: each rank gets --local-rank=N too.

It comes before the arguments of TARGET. With --use-env there is none, and this is the same as `launchpad run`.
"""


@click.pass_context
def _launch(ctx: click.Context, /, **options: Any) -> int:
    if ctx.get_parameter_source("use_env") is ParameterSource.DEFAULT:
        if options["config"] is not None:
            raise UsageError("--config: launchpad launch takes TARGET from the command line; use launchpad run")
        if options["no_python"]:
            raise UsageError("--no-python: a program that isn't Python gets no --local-rank; add --use-env")
        name, *args = options["target"] or [""]
        options["target"] = (name, "--local-rank=${local_rank}", *args) if name else ()
    return int(ctx.invoke(run.command.callback or _launch, **options))


command = copy.copy(run.command)
command.name, command.callback = "launch", _launch
command.help, command.short_help, command.epilog = _HELP, "torch.distributed.launch: also gives --local-rank.", None
