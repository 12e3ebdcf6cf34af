"""Chooses the CPUs of each rank of a node, and the memory that it prefers (--bind). Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise
from operator import attrgetter

from launchpad.errors import UsageError
from launchpad.job.spec import Bind
from launchpad.named import NamedTuple
from launchpad.protocol import cpulist
from launchpad.protocol.events import TopologyRead


class Binding(NamedTuple):
    """Where a rank runs."""

    cpus: tuple[int, ...]
    memory: tuple[int, ...]  # the NUMA nodes whose memory it prefers; none: as the kernel chooses


class _Core(NamedTuple):
    node: int
    socket: int
    cache: int
    cpus: tuple[int, ...]


def bind_ranks(bind: Bind, topology: TopologyRead, count: int, name: str) -> tuple[Binding, ...]:
    """The binding of each of `count` ranks of the node `name`, in their order. Raises UsageError if it can't be met.

    Each rank has a home: a core of the NUMA node of its GPU (the one with the number of the local rank, as torchrun has
    it; if there are fewer GPUs, they are shared in turn), or of the nearest node with CPUs. Without GPUs, the homes are
    spread evenly over all cores. If there are more ranks than cores, some have the same home.
    """
    cores = _cores(topology)
    if not cores:
        raise UsageError(f"--bind {bind}: the agent on {name} found no CPUs to bind ranks to; use --bind none")
    homes = _homes(topology, cores, count)
    if bind == "exclusive":
        sets = _shares(homes, cores, name)
    elif bind == "core-complex":
        sets = _complexes(homes, cores)
    elif bind == "core":
        sets = [home.cpus for home in homes]
    else:
        same = attrgetter("socket" if bind == "socket" else "node")
        of = {key: _cpus(core for core in cores if same(core) == key) for key in set(map(same, homes))}
        sets = [of[same(home)] for home in homes]
    node_of = {cpu: core.node for core in cores for cpu in core.cpus}
    return tuple(Binding(cpus, _memory(topology, {node_of[cpu] for cpu in cpus})) for cpus in sets)


def threads(bindings: Collection[Binding]) -> int:
    """How many threads each rank may have without sharing a CPU with those of others."""
    ranks_on = Counter(binding.cpus for binding in bindings)  # two sets of CPUs are equal, or have none in common
    return max(1, min(len(cpus) // ranks for cpus, ranks in ranks_on.items()))


def in_words(cpus: str, memory: str) -> str:
    """A binding for the user, from the lists of its CPUs and memory nodes."""
    if not cpus:
        return "not bound"
    where = f"NUMA node{'s' if memory and not memory.isdecimal() else ''} {memory}" if memory else "any NUMA node"
    return f"CPU{'' if cpus.isdecimal() else 's'} {cpus}, memory of {where}"


def written(binding: Binding | None) -> tuple[str, str]:
    """The lists of its CPUs and memory nodes; empty if the rank is not bound."""
    return (cpulist.written(binding.cpus), cpulist.written(binding.memory)) if binding else ("", "")


def _cores(topology: TopologyRead) -> list[_Core]:
    """The cores with those of their CPUs that may be used, in the order of NUMA nodes and CPUs."""
    found: dict[tuple[int, int], _Core] = {}
    for cpu, core, socket, cache, node in sorted(row for row in topology.cpus if len(row) == 5):
        one = found.get((node, core)) or _Core(node, socket, cache, ())
        found[node, core] = one._replace(cpus=(*one.cpus, cpu))
    return sorted(found.values(), key=lambda core: (core.node, core.cpus))


def _homes(topology: TopologyRead, cores: Sequence[_Core], count: int) -> list[_Core]:
    homes = [cores[rank * len(cores) // count] for rank in range(count)]
    at: dict[int, list[int]] = {}  # the ranks with a GPU at a NUMA node
    for rank in range(count):
        gpu = topology.gpus[rank % len(topology.gpus)] if topology.gpus else -1
        if gpu >= 0:
            at.setdefault(_nearest(topology, gpu, {core.node for core in cores}), []).append(rank)
    for node, ranks in at.items():
        here = [core for core in cores if core.node == node]
        for place, rank in enumerate(ranks):
            homes[rank] = here[place * len(here) // len(ranks)]
    return homes


def _shares(homes: Sequence[_Core], cores: Sequence[_Core], name: str) -> list[tuple[int, ...]]:
    """The cores of each NUMA node, divided among the ranks there; the first of them get what is left over."""
    shares: dict[int, list[tuple[int, ...]]] = {}
    for node, ranks in Counter(home.node for home in homes).items():
        here = [core for core in cores if core.node == node]
        size, over = divmod(len(here), ranks)
        if not size:
            have = "1 core" if len(here) == 1 else f"{len(here)} cores"
            raise UsageError(
                f"--bind exclusive: {ranks} ranks of {name} belong to NUMA node {node}, of which they may use {have}; "
                "start fewer ranks there, or let them share it with --bind numa"
            )
        ends = [rank * size + min(rank, over) for rank in range(ranks + 1)]
        shares[node] = [_cpus(here[first:last]) for first, last in pairwise(ends)]
    return [shares[home.node].pop(0) for home in homes]


def _complexes(homes: Sequence[_Core], cores: Sequence[_Core]) -> list[tuple[int, ...]]:
    """The groups of cores of each NUMA node that share a cache, the largest first, for the ranks there in turn."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    for (node, _), group in groupby(sorted(cores, key=attrgetter("node", "cache")), key=attrgetter("node", "cache")):
        groups.setdefault(node, []).append(_cpus(group))
    for found in groups.values():
        found.sort(key=lambda cpus: (-len(cpus), cpus))
    taken: Counter[int] = Counter()
    sets = []
    for home in homes:
        here = groups[home.node]
        sets.append(here[taken[home.node] % len(here)])
        taken[home.node] += 1
    return sets


def _cpus(cores: Iterable[_Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _memory(topology: TopologyRead, nodes: Collection[int]) -> tuple[int, ...]:
    """The memory that is nearest to these NUMA nodes."""
    if not topology.memory:
        return ()
    return tuple(sorted({_nearest(topology, node, topology.memory) for node in nodes}))


def _nearest(topology: TopologyRead, node: int, among: Collection[int]) -> int:
    """The one of these NUMA nodes that is nearest to a node; itself, if it is among them."""
    if node in among:
        return node
    far = dict(zip(topology.nodes, topology.distances, strict=False)).get(node, [])
    distance = dict(zip(topology.nodes, far, strict=False))
    return min(among, key=lambda other: (distance.get(other, 1 << 31), other))
