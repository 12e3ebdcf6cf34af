"""Tells keepers of images what the ranks' forkserver would be, so that they find an image that is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from launchpad.image import place
from launchpad.job.hosts import Nproc
from launchpad.job.spec import JobSpec
from launchpad.protocol.defaults import defaults_for
from launchpad.runner.imports import NOT_FORKED
from launchpad.runner.links import LocalAgent

if TYPE_CHECKING:
    from launchpad.image.keeper_link import ForkRequest


def look_for_image(
    local: LocalAgent,
    spec: JobSpec,
    environ: Mapping[str, str],
    *,
    ranks: Callable[[int], int] | None = None,
    more: bool = False,
) -> None:
    """Have this machine's agent be forked from a kept image, if there is one and it can be.

    `ranks`: how many share so many cores, if not only these; `more`: its guard will be asked for further agents.
    """
    if local.started or not place.exists(environ):
        return
    from launchpad.image import Cold
    from launchpad.image.keeper_link import connect

    local.keeper = local.keeper or connect(environ)
    if local.keeper is None:
        return
    try:
        cores = local.keeper.cores
    except Cold:
        return
    own = spec.nproc if isinstance(spec.nproc, int) else cores
    threads = cores // (own if ranks is None else ranks(cores))
    local.keeper.want(fork_request(spec, environ, threads)._replace(more=more))


def fork_request(spec: JobSpec, environ: Mapping[str, str], threads: int) -> ForkRequest:
    """What the forkserver would be of ranks on this machine that may have so many threads each."""
    from launchpad.image.keeper_link import ForkRequest

    unsound = any({**environ, **spec.environ}.get(name) for name in NOT_FORKED)
    return ForkRequest(
        python=spec.python,
        preload=spec.preload,
        environ=spec.environ,
        defaults=defaults_for(threads),
        forks=may_fork(spec) and not unsound,
    )


def asked_of_hosts(spec: JobSpec, counts: Sequence[Nproc]) -> list[str]:
    """The same for hosts with so many ranks, as their Startup's `asked`."""
    image = {
        "preload": spec.preload,
        "environ": spec.environ,
        "forks": may_fork(spec),
        "never": NOT_FORKED,
    }
    return [json.dumps({"image": {**image, "ranks": count}}) for count in counts]


def may_fork(spec: JobSpec) -> bool:
    """Whether ranks may be forked from an image."""
    return spec.target.kind != "program" and spec.hooks and not spec.executes
