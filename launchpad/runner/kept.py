"""Tells the keeper of images what the ranks' forkserver would be, so that it finds an image that is the same."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launchpad.image import place
from launchpad.job.plan import defaults_for
from launchpad.job.spec import JobSpec
from launchpad.runner import function_target
from launchpad.runner.imports import NOT_FORKED
from launchpad.runner.nodes import LocalAgent


def look_for_image(local: LocalAgent, spec: JobSpec, environ: Mapping[str, str], *, executes: bool) -> None:
    """Have this machine's agent be forked from a kept image, if there is one and it can be.

    `executes`: the user wants the ranks executed.
    """
    if local.started or not place.exists(environ):
        return
    from launchpad.transport.image import ForkRequest, connect
    from launchpad.transport.local import Cold

    local.keeper = local.keeper or connect(environ)
    if local.keeper is None:
        return
    of_python = spec.target.kind != "program" and spec.hooks
    unsound = any({**environ, **spec.environ}.get(name) for name in NOT_FORKED)
    try:
        cores = local.keeper.cores
    except Cold:
        return
    ranks = spec.nproc if isinstance(spec.nproc, int) else cores
    local.keeper.want(
        ForkRequest(
            python=spec.python,
            preload=spec.preload,
            environ=spec.environ,
            defaults=defaults_for(cores, ranks),
            first_on_path=_first_on_path(spec),
            forks=of_python and not executes and not unsound,
        )
    )


def _first_on_path(spec: JobSpec) -> str:
    """What the ranks have as sys.path[0] (rank/program.py)."""
    kind, name = spec.target.kind, spec.target.name
    if kind == "function":
        name = function_target.split(name)[0]  # type: ignore[index]
        kind = "script" if function_target.is_file(name) else "module"
    if kind == "module":
        return spec.cwd
    if kind != "script":
        return ""
    path = os.path.join(spec.cwd, name)
    return os.path.dirname(os.path.realpath(path)) if path.endswith(".py") else path
