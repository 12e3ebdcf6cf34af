"""Brings up the job's nodes: facts about them, what they are given, and the rendezvous address."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from launchpad.console.message import say_on_stderr
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner, Supplies, hold_ports, read_topologies
from launchpad.job.hosts import Nproc
from launchpad.job.membership import Membership
from launchpad.job.plan import Member, rank_count
from launchpad.job.spec import JobSpec
from launchpad.protocol.commands import RosterChanged
from launchpad.runner.options import HostOptions
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.health import Unwell
    from launchpad.job.hosts import Host
    from launchpad.protocol.events import AgentReady, TopologyRead
    from launchpad.runner.connect import Supplied


def members_of(
    hosts: Sequence[Host], links: Sequence[Link], spec: JobSpec, nproc: Nproc | None, *, by_srun: bool = False
) -> list[Member]:
    """The hosts as members. `nproc` is the value of --nproc. `by_srun`: launchpad itself was started on each."""
    if not hosts:
        return []
    from launchpad.job.hosts import slots_of

    pythons = [python_beside(link, spec.python, have_launchpads=by_srun) for link in links]
    counts = slots_of(hosts, nproc)
    return [Member(host.name, count, python) for host, count, python in zip(hosts, counts, pythons, strict=True)]


def python_beside(link: Link, python: str, *, have_launchpads: bool) -> str:
    """The ranks' interpreter, if it is another one than their agent's; otherwise "".

    An agent that was sent there runs in the ranks'; others run in launchpad's.
    """
    return "" if (link.remote and not have_launchpads) or python == sys.executable else python


def bring_up(
    bringup: BringUp,
    spec: JobSpec,
    members: Sequence[Member],
    links: Sequence[Link],
    supplies: Supplies,
    options: HostOptions,
    membership: Membership | None = None,
    roster: RosterChanged | None = None,
    *,
    quiet: bool,
) -> Planner:
    """Greet the agents, give them the `supplies`, choose the rendezvous of several nodes, lay out the ranks.

    Without `members` the only node is this machine. `roster`: as for BringUp. Raises NodeError, UsageError.
    """
    run_id = spec.world.run_id or os.urandom(4).hex()
    silence = options.silence
    facts = bringup.connect(
        links,
        count_gpus=bool({"auto", "gpu"} & {spec.nproc, *(member.nproc for member in members)}),
        port=spec.world.master_port if len(links) == 1 else 0,
        silence=silence,
        accelerators=[(one.nproc, one.python) for one in members] or [(spec.nproc, spec.python)],
        roster=roster,
    )
    specs = [member.own or spec for member in members] or [spec]
    supplied: Supplied | None = None
    if members:
        from launchpad.runner.connect import supply

        supplied = supply(bringup, spec, members, links, supplies, quiet=quiet)
    left_out = _left_out(bringup, spec, specs, supplied, membership, quiet=quiet)
    specs = [one._replace(gpus="", bind="none") if node in left_out else one for node, one in enumerate(specs)]
    if any(one.gpus for one in specs):
        from launchpad.head.gpu_leases import with_leases

        facts = bringup.ready = with_leases(bringup, facts, specs, bringup.job)
    topologies = _topologies(bringup, specs, facts, quiet=quiet)
    ports = _ports(bringup, spec, members, left_out) if spec.tf_config else []
    if supplied is None:
        return Planner(spec, run_id, facts, silence=silence, topologies=topologies, ports=ports, job=bringup.job)
    from launchpad.runner.connect import make_world

    places, found, master = make_world(
        *(bringup, spec, members, links, supplied),
        [node for node in range(len(members)) if node not in left_out],
        apart=spec.world.meeting is None and not options.by_srun,
        synced=supplies.environment is not None,
        quiet=quiet,
    )
    return Planner(
        *(spec, run_id, facts, places, found, master),
        ports=ports,
        membership=membership,
        supplies=supplies,
        silence=silence,
        topologies=topologies,
        job=bringup.job,
        left_out=left_out,
    )


def _left_out(
    bringup: BringUp,
    spec: JobSpec,
    specs: Sequence[JobSpec],
    supplied: Supplied | None,
    membership: Membership | None,
    *,
    quiet: bool,
) -> dict[int, Unwell]:
    """The nodes that fail the job's health check, if it has one. Raises NodeError if it can't start without them."""
    if spec.health is None:
        return {}
    from launchpad.runner.health import leave_out

    folders = [spec.cwd] if supplied is None else [supplied.folders[node] for node in range(len(specs))]
    return leave_out(bringup, spec.health, specs, folders, membership, quiet=quiet)


def _topologies(
    bringup: BringUp, specs: Sequence[JobSpec], facts: Sequence[AgentReady], *, quiet: bool
) -> list[TopologyRead | None]:
    """What is near what on the nodes, where that matters; a line about those that don't show all of it."""
    topologies = read_topologies(bringup, specs, facts)
    for topology, ready in zip(topologies, facts, strict=True):
        if topology is not None and not topology.complete and not quiet:
            say_on_stderr(f"{ready.hostname} doesn't show which of its CPUs are one core; each counts as a core")
    return topologies


def _ports(
    bringup: BringUp, spec: JobSpec, members: Sequence[Member], left_out: Collection[int]
) -> Sequence[Sequence[int]]:
    """For --tf-config: those that each node holds for its ranks."""
    ready = bringup.ready
    asked = [(member.nproc, member.name) for member in members] or [(spec.nproc, ready[0].hostname)]
    counts = [
        0 if node in left_out else rank_count(nproc, ready[node], name) for node, (nproc, name) in enumerate(asked)
    ]
    return hold_ports(bringup, counts)
