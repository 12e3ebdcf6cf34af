"""Tells keepers of images what the ranks' forkserver would be, so that they find an image that is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from launchpad.image import place
from launchpad.job.hosts import Nproc
from launchpad.job.spec import JobSpec
from launchpad.protocol.defaults import defaults_for
from launchpad.runner.imports import NOT_FORKED
from launchpad.runner.links import LocalAgent


def look_for_image(local: LocalAgent, spec: JobSpec, environ: Mapping[str, str], *, executes: bool) -> None:
    """Have this machine's agent be forked from a kept image, if there is one and it can be.

    `executes`: the user wants the ranks executed.
    """
    if local.started or not place.exists(environ):
        return
    from launchpad.image import Cold
    from launchpad.image.keeper_link import ForkRequest, connect

    local.keeper = local.keeper or connect(environ)
    if local.keeper is None:
        return
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
            defaults=defaults_for(cores // ranks),
            forks=_forks(spec, executes) and not unsound,
        )
    )


def asked_of_hosts(spec: JobSpec, counts: Sequence[Nproc], *, executes: bool) -> list[str]:
    """The same for hosts with so many ranks, as their Startup's `asked`."""
    image = {
        "preload": spec.preload,
        "environ": spec.environ,
        "forks": _forks(spec, executes),
        "never": NOT_FORKED,
    }
    return [json.dumps({"image": {**image, "ranks": count}}) for count in counts]


def _forks(spec: JobSpec, executes: bool) -> bool:
    return spec.target.kind != "program" and spec.hooks and not executes
