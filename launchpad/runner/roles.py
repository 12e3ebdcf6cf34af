"""Runs a job of several worlds: brings up an agent for each, and has them supervised as one job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.errors import UsageError
from launchpad.head import own_signals
from launchpad.head.bringup import BringUp
from launchpad.job.hosts import ALLOCATION_VARIABLES, MOST_SLOTS, Host, some_of
from launchpad.job.limits import RestartLimit
from launchpad.job.role_places import MORE_SLOTS, MORE_TASKS, RoleNeeds, place_worlds
from launchpad.job.roles import check_roles, replicas_of
from launchpad.job.spec import JobSpec, Ready, RoleSpec
from launchpad.job.world import WorldSpec
from launchpad.runner.connect import read_hosts
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import NodeOptions, RunOptions
from launchpad.runner.role_nodes import begin_agents, bring_up_roles, nodes_of, open_role_links
from launchpad.runner.role_supplies import RoleSupplies
from launchpad.runner.spec import limits_of, make_spec, make_world_spec, working_folder
from launchpad.runner.stoppable import stoppable, told

if TYPE_CHECKING:
    from launchpad.job.plan import Plan
    from launchpad.runner.departure import Departure
    from launchpad.runner.joined_roles import JoinedMachines


class RoleOptions(NamedTuple):
    """A role as a job file describes it."""

    name: str
    options: RunOptions  # the job's, with its own
    service: bool
    ports: tuple[str, ...]
    ready: Ready
    after: tuple[str, ...]
    replicas: int = 1
    hosts: str = ""  # its own; "": a share of the job's
    gpus: int | None = None  # for each rank


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
    check_options(job, where, joins=True)
    if job.nodes.nnodes == "1":
        make_world_spec(job, ())  # reports errors
        return _run(roles, where, _in_allocation(job, roles, where), local, closing, show=show, departure=departure)
    from launchpad.runner.joined_roles import meet

    if show is not None or departure is not None:
        option = "--dry-run" if departure is None else "--detach"
        raise UsageError(f"{where}: {option} can't be combined with nodes that join (--nnodes); leave it out")
    machines = meet(job, local, closing)
    if isinstance(machines, int):
        return machines
    job = job._replace(hosts=job.hosts._replace(joined=True, allocation=machines.hosts(_ranks(roles))))
    return _run(roles, where, job, local, closing, machines)


def _run(
    roles: Sequence[RoleOptions],
    where: str,
    job: RunOptions,
    local: LocalAgent,
    closing: ExitStack,
    machines: JoinedMachines | None = None,
    *,
    show: Callable[[Plan], None] | None = None,
    departure: Departure | None = None,
) -> int:
    """The same, where it is known which nodes there are. `machines`: those that have joined."""
    say = say_nothing if job.reports.quiet else say_on_stderr
    leaves = departure is not None
    with stoppable(say):
        roles = [role._replace(options=role.options._replace(hosts=job.hosts)) for role in roles]
        own = [_read(job, role, where) for role in roles]
        shared = _shared(job, where, own=any(own))
        needs = [
            RoleNeeds(role.name, role.options.nproc, role.replicas, ones) for role, ones in zip(roles, own, strict=True)
        ]
        shares = place_worlds(needs, shared, where, MORE_TASKS if job.hosts.allocation else MORE_SLOTS)
        spec = _spec(job, roles, [ones or shared for ones in own], where)
        nodes, worlds = nodes_of(spec.roles, shares)
        begun = begin_agents(local, nodes, job.hosts, closing, leaves=leaves)
        if show is None:
            from launchpad.runner.supervise import supervise  # takes a while, in which agents come up
        supplies = RoleSupplies(job.hosts, spec.roles, closing)
        exact = {role.name for role in roles if role.options.python is not None}
        links, tell = open_role_links(nodes, job, local, begun, closing, machines=machines, exact=exact)
        if job.reports.verbose and begun is not None and begun.why_cold:
            from launchpad.console.notes import no_kept_image

            say(no_kept_image(begun.why_cold, ""))
        bringup = BringUp()
        bringup.since = begun.importing_since if begun else None
        own_signals.catch(bringup.post, job.signals_to_handle)
    with told(say):
        planner = bring_up_roles(bringup, spec, nodes, worlds, links, supplies, job, where)
    if show is not None:
        from launchpad.runner.explained import explained

        show(explained(planner))
        return 0
    return supervise(bringup, planner, tell, None, job.reports, None, departure=departure)


def _in_allocation(job: RunOptions, roles: Sequence[RoleOptions], where: str) -> RunOptions:
    """The job on the nodes of its batch allocation, if it is in one and names no hosts. Raises UsageError.

    How many ranks each role has is for the role to say.
    """
    named = all(role.hosts for role in roles)
    if ALLOCATION_VARIABLES.isdisjoint(os.environ) or (named and "SLURM_JOB_ID" not in os.environ):
        return job
    from launchpad.runner.allocation import with_allocation

    quiet = job.reports._replace(quiet=job.reports.quiet or named)
    found = with_allocation(job._replace(nproc=None, reports=quiet), os.environ)
    hosts, slots = found.hosts, found.nproc
    if named:  # they may be nodes of the allocation, or others, which are reached over SSH
        nodes = {host.name for host in hosts.allocation if hosts.by_srun}
        known = {host.name for role in roles for host in _read(job, role, where)} <= nodes
        return job._replace(hosts=hosts) if known else job
    if isinstance(slots, int):  # its one node is this machine
        hosts = hosts._replace(allocation=(Host("localhost", slots=slots),))
    return job._replace(hosts=hosts)


def _shared(job: RunOptions, where: str, *, own: bool) -> tuple[Host, ...]:
    """The hosts that the roles without hosts of their own share; none: this machine. Raises UsageError.

    `own`: some have hosts of their own.
    """
    options = job.hosts
    if options.hosts is not None or options.hostfile is not None or options.allocation:
        return read_hosts(options, None)
    if options.keep_running and not own:
        raise UsageError(f"{where}: --keep-running needs hosts for roles; name them with --hosts, or leave it out")
    if options.enter:
        return tuple(host._replace(slots=MOST_SLOTS) for host in read_hosts(options, None))
    return read_hosts(options, None) if options.given and not own else ()


def _read(job: RunOptions, role: RoleOptions, where: str) -> tuple[Host, ...]:
    """The role's own hosts. Raises UsageError."""
    if not role.hosts:
        return ()
    of = job.hosts._replace(hosts=role.hosts, hostfile=None, include="", exclude="")
    try:
        hosts = read_hosts(of, None)
    except UsageError as error:
        raise UsageError(f"{where}.{role.name}, hosts: {str(error).removeprefix('--hosts: ')}") from None
    known = {host.name: host for host in of.allocation}
    if of.have_launchpads and (other := next((host.name for host in hosts if host.name not in known), "")):
        whose = "the job's" if of.joined else "the allocation's"
        nodes = some_of(list(known))
        raise UsageError(f"{where}.{role.name}, hosts: {other} is none of {whose} nodes, which are {nodes}")
    return tuple(host._replace(here=known[host.name].here) for host in hosts) if of.joined else hosts


def _ranks(roles: Sequence[RoleOptions]) -> int:
    """How many ranks share the job's hosts."""
    sharing = [(role.options.nproc, role.replicas) for role in roles if not role.hosts]
    return sum(replicas * (nproc if isinstance(nproc, int) else 1) for nproc, replicas in sharing)


def check_options(job: RunOptions, where: str, *, joins: bool = False) -> None:
    """Raise UsageError for what a job of several worlds can't be given. `joins`: nodes may join it."""
    nodes = job.nodes
    wrong = {
        "--spares": job.hosts.spares,
        "--nnodes, --master-… or --rdzv-…": not joins and nodes != NodeOptions(),
        "--master-addr or --master-port": nodes.nnodes == "1" and (nodes.master_addr or nodes.master_port) is not None,
        "--health": bool(job.health),
        "--tf-config": job.tf_config,
        "--bind": job.binds != "none",
        "a ':'": bool(job.programs),
        "--check": job.check,
    }
    if named := next((option for option, is_given in wrong.items() if is_given), ""):
        raise UsageError(f"{where}: {named} can't be combined with roles; leave it out")


def _spec(job: RunOptions, roles: Sequence[RoleOptions], hosts: Sequence[Sequence[Host]], where: str) -> JobSpec:
    """The job, with a spec for each role; `hosts`: those that each may run on. Raises UsageError."""
    start = working_folder(None)
    made = []
    try:
        for role, ones in zip(roles, hosts, strict=True):
            os.chdir(start)
            try:
                spec = make_spec(role.options, ones, WorldSpec())
            except UsageError as error:
                raise UsageError(f"{where}.{role.name}: {error}") from None
            made.append(
                RoleSpec(role.name, spec, role.service, role.ports, role.ready, role.after, 0, role.replicas, role.gpus)
            )
    finally:
        os.chdir(start)
    check_roles(made, where)
    first, limits = made[0].spec, limits_of(job)._replace(max_restarts=RestartLimit())  # each world has its own
    return first._replace(roles=tuple(replicas_of(made)), cwd=start, preload=(), limits=limits, torch=False)
