"""Runs a job of several worlds: brings up an agent for each, and has them supervised as one job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from launchpad.console.message import say_on_stderr
from launchpad.errors import UsageError
from launchpad.head import own_signals
from launchpad.head.bringup import BringUp
from launchpad.head.role_planner import RolePlanner, hold_role_ports
from launchpad.job.limits import RestartLimit
from launchpad.job.roles import check_roles, replicas_of
from launchpad.job.spec import JobSpec, Ready, Role
from launchpad.job.world import WorldSpec
from launchpad.runner.kept import look_for_image
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import HostOptions, NodeOptions, RunOptions
from launchpad.runner.spec import limits_of, make_spec
from launchpad.runner.stoppable import stoppable

if TYPE_CHECKING:
    from launchpad.job.plan import Plan
    from launchpad.runner.departure import Departure


class RoleOptions(NamedTuple):
    """A role as a job file describes it."""

    name: str
    options: RunOptions  # the job's, with its own
    service: bool
    ports: tuple[str, ...]
    ready: Ready
    after: tuple[str, ...]
    replicas: int = 1


def run_roles(
    roles: Sequence[RoleOptions],
    where: str,
    job: RunOptions,
    local: LocalAgent,
    closing: ExitStack,
    *,
    show: Callable[[Plan], None] | None = None,
    departure: Departure | None = None,
) -> int:
    """Run the job and return its exit code. Raises LaunchpadError if it can't start.

    `where`: the place of the roles in their file, for messages; the other parameters are those of `run_job`.
    """
    _check(job, where)
    spec = _spec(job, roles, where)
    quiet = job.reports.quiet
    with stoppable(_say_nothing if quiet else say_on_stderr):
        agents = [local, *(LocalAgent(leaves=departure is not None) for _ in spec.roles[1:])]
        for agent, role in zip(agents, spec.roles, strict=True):
            if agent is not local:
                closing.callback(agent.close)
            look_for_image(agent, role.spec, os.environ, executes=not role.spec.preload)
            agent.begin()
        links = [agent.link() for agent in agents]
        for link, role in zip(links, spec.roles, strict=True):
            link.name = role.name
        bringup = BringUp()
        own_signals.catch(bringup.post, job.signals_to_handle)
    counted = [(role.spec.nproc, role.spec.python) for role in spec.roles]
    ready = bringup.connect(
        links, count_gpus=any(nproc in ("auto", "gpu") for nproc, _ in counted), accelerators=counted
    )
    ports = hold_role_ports(bringup, spec.roles, ready)
    planner = RolePlanner(spec, os.urandom(4).hex(), ready, ports)
    if show is not None:
        show(planner.plan)
        return 0

    from launchpad.runner.supervise import supervise

    return supervise(bringup, planner, _say_nothing, None, job.reports, None, departure=departure)


def _check(job: RunOptions, where: str) -> None:
    """Raise UsageError for what a job of several worlds can't be given."""
    hosts = job.hosts._replace(heartbeat_timeout=HostOptions().heartbeat_timeout)
    wrong = {
        "--hosts and its options": hosts != HostOptions(),
        "--nnodes, --master-… and --rdzv-…": job.nodes != NodeOptions(),
        "--backend mpi": job.backend == "mpi",
        "--tf-config": job.tf_config,
        "--bind": job.binds != "none",
        "a ':'": bool(job.programs),
        "--check": job.check,
    }
    if named := next((option for option, is_given in wrong.items() if is_given), ""):
        raise UsageError(f"{where}: {named} can't be combined with roles; leave it out")


def _spec(job: RunOptions, roles: Sequence[RoleOptions], where: str) -> JobSpec:
    """The job, with a spec for each role. Raises UsageError."""
    start = os.getcwd()
    made = []
    try:
        for role in roles:
            os.chdir(start)
            try:
                spec = make_spec(role.options, (), WorldSpec())
            except UsageError as error:
                raise UsageError(f"{where}.{role.name}: {error}") from None
            made.append(Role(role.name, spec, role.service, role.ports, role.ready, role.after, replicas=role.replicas))
    finally:
        os.chdir(start)
    check_roles(made, where)
    first, limits = made[0].spec, limits_of(job)._replace(max_restarts=RestartLimit())  # each world has its own
    return first._replace(roles=tuple(replicas_of(made)), cwd=start, preload=(), limits=limits, torch=False)


def _say_nothing(*_: object) -> None:
    """Used if there is nobody to tell."""
