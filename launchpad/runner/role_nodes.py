"""Brings up the nodes of a job of several worlds: an agent for each world on each of its hosts, and where they meet."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.head.bringup import BringUp
from launchpad.head.role_planner import RolePlanner, WorldNodes, hold_role_ports
from launchpad.job.plan import NodePlacement, rank_count
from launchpad.job.role_gpus import Wish, share_gpus
from launchpad.job.role_places import Placed, RoleNode
from launchpad.job.spec import JobSpec, RoleSpec
from launchpad.protocol.commands import Probe
from launchpad.protocol.events import AgentReady, NodeFacts
from launchpad.runner.kept import asked_of_hosts
from launchpad.runner.links import LocalAgent
from launchpad.runner.nodes import python_beside
from launchpad.runner.options import HostOptions, RunOptions
from launchpad.runner.role_agents import RoleAgents
from launchpad.runner.role_supplies import RoleSupplies
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.runner.joined_roles import JoinedMachines
    from launchpad.runner.supervise import Tell


def nodes_of(roles: Sequence[RoleSpec], shares: Sequence[Sequence[Placed]]) -> tuple[list[RoleNode], list[WorldNodes]]:
    """The job's nodes, and which of them are each world's. `shares`: of each world."""
    nodes: list[RoleNode] = []
    worlds = []
    for role, own in zip(roles, shares, strict=True):
        worlds.append(WorldNodes(range(len(nodes), len(nodes) + len(own))))
        nodes += [RoleNode(role, share, role.spec.cwd) for share in own]
    return nodes, worlds


def begin_agents(
    local: LocalAgent, nodes: Sequence[RoleNode], hosts: HostOptions, closing: ExitStack, *, leaves: bool
) -> RoleAgents | None:
    """Begin the agents of the nodes on this machine, if there are any. `local`: one of them. Raises NodeError."""
    here = {place: one for place, one in enumerate(nodes) if not one.share.host or one.share.host.here}
    if hosts.enter or hosts.by_srun or not here:
        return None
    return RoleAgents(local, here, closing, leaves=leaves)


def open_role_links(
    nodes: Sequence[RoleNode],
    job: RunOptions,
    local: LocalAgent,
    begun: RoleAgents | None,
    closing: ExitStack,
    *,
    machines: JoinedMachines | None = None,
    exact: Collection[str] = (),
) -> tuple[Sequence[Link], Tell]:
    """A link to an agent for each node, and how to tell nodes the end. Raises NodeError, UsageError.

    `begun`: what `begin_agents` returned. `machines`: the job's, if they have joined. `exact`: the roles that name
    their interpreter, for which no host may use another one.
    """
    if job.hosts.by_srun:
        from launchpad.runner.slurm import SrunNodes

        local.close()
        hosts = [one.share.host for one in nodes if one.share.host]
        started = closing.enter_context(SrunNodes(hosts, job, say_nothing if job.reports.quiet else say_on_stderr))
        return started.wait(), started.tell
    entered = bool(job.hosts.enter)
    known = {place: one.share.host for place, one in enumerate(nodes) if one.share.host}
    far = {place: host for place, host in known.items() if entered or not host.here}
    links: dict[int, Link] = {}
    if machines is not None:
        links |= dict(zip(far, machines.links([host.name for host in far.values()]), strict=True))
    elif far:
        from launchpad.runner.connect import connect_all, enter_words
        from launchpad.transport.ssh.bundle import Startup

        words = enter_words(job.hosts)
        startups = [
            Startup(
                nodes[place].role.spec.python,
                nodes[place].role.role in exact and not job.hosts.sync_env,
                words,
                _asked(nodes, place),
            )
            for place in far
        ]
        found, _ = connect_all(
            list(far.values()), local.link, closing.callback, job.hosts, startups, quiet=job.reports.quiet
        )
        for link in found:
            closing.callback(link.close)
        links |= dict(zip(far, found, strict=True))
    if begun is None:
        local.close()
    else:
        links |= begun.links()
    for place, one in enumerate(nodes):
        links[place].name = one.share.host.name if one.share.host else one.role.name
    return [links[place] for place in range(len(nodes))], say_nothing if machines is None else machines.tell


def _asked(nodes: Sequence[RoleNode], place: int) -> str:
    """The Startup's `asked` for a node: all ranks on its host share the cores there."""
    spec, host = nodes[place].role.spec, nodes[place].share.host
    counts = [one.share.ranks for one in nodes if one.share.host == host]
    numbers = [count for count in counts if isinstance(count, int)]
    ranks = sum(numbers) if len(numbers) == len(counts) else nodes[place].share.ranks
    return asked_of_hosts(spec, [ranks])[0]


def bring_up_roles(
    bringup: BringUp,
    spec: JobSpec,
    nodes: Sequence[RoleNode],
    worlds: Sequence[WorldNodes],
    links: Sequence[Link],
    supplies: RoleSupplies,
    job: RunOptions,
    where: str,
) -> RolePlanner:
    """Greet the agents, give them the `supplies`, share out GPUs and ports, find where each world meets, lay out ranks.

    `where`: the place of the roles in their file. Raises NodeError, UsageError.
    """
    counted = [(one.share.ranks, one.role.spec.python) for one in nodes]
    wants_gpus = any(one.role.gpus is not None for one in nodes)
    silence = job.hosts.silence if any(link.remote for link in links) else 0.0
    ready = bringup.connect(
        links,
        count_gpus=wants_gpus or any(ranks in ("auto", "gpu") for ranks, _ in counted),
        silence=silence,
        accelerators=counted,
    )
    nodes = supplies.give(bringup, nodes, links, quiet=job.reports.quiet)
    beside = [
        python_beside(link, one.role.spec.python, have_launchpads=job.hosts.have_launchpads)
        for one, link in zip(nodes, links, strict=True)
    ]
    nodes = [one._replace(python=one.python or python) for one, python in zip(nodes, beside, strict=True)]
    ready, roles = _with_gpus(bringup, spec, nodes, ready, where)
    spec = spec._replace(roles=tuple(roles))
    bringup.ready = ready
    if any(one.share.host for one in nodes):
        worlds = _meet(bringup, roles, nodes, worlds, links, quiet=job.reports.quiet)
    ports = hold_role_ports(bringup, roles, ready, worlds)
    return RolePlanner(spec, os.urandom(4).hex(), ready, worlds, ports, silence)


def _host_of(one: RoleNode, ready: AgentReady) -> str:
    return one.share.host.name if one.share.host else ready.hostname


def _with_gpus(
    bringup: BringUp,
    spec: JobSpec,
    nodes: Sequence[RoleNode],
    ready: list[AgentReady],
    where: str,
) -> tuple[list[AgentReady], list[RoleSpec]]:
    """The facts of the nodes with the GPUs that their ranks see, and roles that say so."""
    roles = list(spec.roles)
    if not spec.gpus and all(role.gpus is None for role in roles):
        return ready, roles
    from launchpad.head.gpu_leases import with_leases

    hosts = [_host_of(one, facts) for one, facts in zip(nodes, ready, strict=True)]
    first = {host: hosts.index(host) for host in hosts}  # the agent that leases the job's GPUs there
    leasing = [spec if first[host] == node else spec._replace(gpus="") for node, host in enumerate(hosts)]
    ready = with_leases(bringup, ready, leasing, bringup.job)
    devices = {host: _devices(ready[node]) for host, node in first.items()}
    wishes = [
        Wish(one.role.name, host, rank_count(one.share.ranks, facts, one.role.name), one.role.gpus)
        for one, host, facts in zip(nodes, hosts, ready, strict=True)
    ]
    for node, (host, shared) in enumerate(zip(hosts, share_gpus(wishes, devices, where), strict=True)):
        if shared is not None or spec.gpus:
            seen = devices[host] if shared is None else shared
            ready[node] = ready[node]._replace(gpus=len(seen), visible_devices=",".join(seen))
    for place, role in enumerate(roles):
        if role.gpus is not None:  # the plan tells its ranks
            roles[place] = role._replace(spec=role.spec._replace(gpus=str(role.gpus)))
    return ready, roles


def _devices(ready: AgentReady) -> list[str]:
    """A node's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if ready.visible_devices is not None:
        return [name.strip() for name in ready.visible_devices.split(",") if name.strip()]
    return [str(number) for number in range(max(0, ready.gpus))]


def _meet(
    bringup: BringUp, roles: Sequence[RoleSpec], nodes: Sequence[RoleNode], worlds: Sequence[WorldNodes],
    links: Sequence[Link], *, quiet: bool,
) -> list[WorldNodes]:  # fmt: skip
    """Probe all nodes, and find an address of each world that the hosts of all others reach."""
    from launchpad.head.node_facts import address_at, find_master

    names = [_host_of(one, ready) for one, ready in zip(nodes, bringup.ready, strict=True)]
    facts = _probe(bringup, roles, nodes, worlds, names, quiet=quiet)
    first = {name: names.index(name) for name in names}
    known: dict[str, str] = {}  # by host: its address that all others reach
    found = []
    for world in worlds:
        own = list(world.nodes)
        host, here = names[own[0]], {names[node] for node in own}
        others = [] if host in known else [node for name, node in first.items() if name not in here]
        prefer = "" if links[own[0]].remote else _seen(links)
        addresses = facts[own[0]].addresses
        master, interfaces = find_master(bringup, [*own, *others], addresses, known.get(host, ""), 0, prefer)
        known[host] = master.address
        places = [
            NodePlacement(
                *(names[node], nodes[node].share.ranks, facts[node].python, nodes[node].cwd),
                interfaces[node] if len(own) > 1 else "",
                address=address_at(interfaces[node], facts[node], master),
            )
            for node in own
        ]
        found.append(WorldNodes(own, places, master))
    return found


def _probe(
    bringup: BringUp, roles: Sequence[RoleSpec], nodes: Sequence[RoleNode], worlds: Sequence[WorldNodes],
    names: Sequence[str], *, quiet: bool,
) -> list[NodeFacts]:  # fmt: skip
    """The facts of all nodes. Raises NodeError if one can't run its role. `names`: of their hosts."""
    from launchpad.head.node_facts import PROBE_SECONDS, check_nodes, clock_note

    probes = {}
    for node, one in enumerate(nodes):
        spec = one.role.spec
        probes[node] = Probe(one.cwd, spec.torch, one.python, dict(spec.environ), list(spec.target.needs))
    facts: list[NodeFacts] = bringup.ask(probes, NodeFacts, PROBE_SECONDS)
    for world, role in zip(worlds, roles, strict=True):
        check_nodes([names[node] for node in world.nodes], [facts[node] for node in world.nodes], torch=role.spec.torch)
    for _ in range(2):  # the first answer may be late: it waits for the probe
        bringup.measure_clocks()
    for name in dict.fromkeys(names):
        node = names.index(name)
        ready = bringup.nodes.in_our_time(node, bringup.ready[node])
        if not quiet and (note := clock_note(name, ready, time.time(), time.monotonic_ns())):
            say_on_stderr(note)
    return facts


def _seen(links: Sequence[Link]) -> str:
    """The address by which a host sees this machine."""
    return next(filter(None, (getattr(one, "own_address", "") for one in links if one.remote)), "")
