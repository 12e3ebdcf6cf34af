"""Reads which CPUs ranks may use, and which of them are near each other, memory and GPUs.

From sysfs, and of GPUs what their drivers show in /proc. What our affinity and cgroup keep from us is left out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping

from ... import linux
from ...protocol import cpulist
from ...protocol.commands import ReadTopology
from ...protocol.events import TopologyRead
from ...rank import affinity
from ..part import AgentPart
from . import procfs, resources

_UNKNOWN = -1


class HostTopology(AgentPart):
    """Answers the head's ReadTopology."""

    def on(self, command: ReadTopology) -> None:
        """Report what there is."""
        self._hub.outbox.say(read_topology({**os.environ, **command.environ}))


def read_topology(environ: Mapping[str, str], root: str = "") -> TopologyRead:
    """The topology. `environ`: the ranks' variables; `root`: a folder that stands for /."""
    nodes, node_of, distances = _numa(f"{root}/sys/devices/system/node")
    cpus, complete = _cpus(f"{root}/sys/devices/system/cpu", sorted(os.sched_getaffinity(0)), node_of)
    return TopologyRead(
        time=time.monotonic_ns(),
        cpus=cpus,
        nodes=nodes,
        distances=distances,
        memory=_memory(f"{root}/sys/devices/system/node"),
        gpus=_visible(_gpus(root), environ),
        complete=complete,
    )


def _numa(folder: str) -> tuple[list[int], dict[int, int], list[list[int]]]:
    """The NUMA nodes, the node of each CPU, and the distances from each node to each. Without NUMA there is one."""
    nodes = sorted(int(name[4:]) for name in _listed(folder) if re.fullmatch(r"node\d+", name))
    if not nodes:
        return [0], {}, [[10]]
    node_of = {cpu: node for node in nodes for cpu in _numbers(f"{folder}/node{node}/cpulist")}
    rows = (linux.text_of(f"{folder}/node{node}/distance").split() for node in nodes)
    return nodes, node_of, [[int(word) for word in row] for row in rows]


def _memory(folder: str) -> list[int]:
    """The NUMA nodes whose memory ranks may use; none if they can't prefer any."""
    if not affinity.may_prefer_memory():
        return []
    allowed = set(cpulist.parse(procfs.status("self").get("Mems_allowed_list", "")))
    return sorted(allowed.intersection(_numbers(f"{folder}/has_memory")))


def _cpus(
    folder: str, usable: Collection[int], node_of: Mapping[int, int]
) -> tuple[list[tuple[int, int, int, int, int]], bool]:
    """TopologyRead's `cpus` and `complete`. Each core, and each group of cores, is read once."""
    core_of: dict[int, tuple[int, int]] = {}  # core and socket
    cache_of: dict[int, int] = {}
    complete = True
    for cpu in usable:
        if cpu not in core_of:
            place = f"{folder}/cpu{cpu}/topology"
            siblings = _numbers(f"{place}/thread_siblings_list")
            complete = complete and bool(siblings)
            core = min(siblings, default=cpu), next(iter(_numbers(f"{place}/physical_package_id")), _UNKNOWN)
            core_of |= dict.fromkeys([cpu, *siblings], core)
        if cpu not in cache_of:
            sharers = _sharing_last_cache(f"{folder}/cpu{cpu}/cache")
            cache_of |= dict.fromkeys([cpu, *sharers], min(sharers, default=_UNKNOWN))
    return [(cpu, *core_of[cpu], cache_of[cpu], node_of.get(cpu, 0)) for cpu in usable], complete


def _sharing_last_cache(folder: str) -> list[int]:
    """The CPUs that share the last level of a CPU's caches."""
    last, sharers = 0, list[int]()
    for name in _listed(folder):
        level = next(iter(_numbers(f"{folder}/{name}/level")), 0)
        if level > last and linux.text_of(f"{folder}/{name}/type").strip() in ("Unified", "Data"):
            last, sharers = level, _numbers(f"{folder}/{name}/shared_cpu_list")
    return sharers


# GPUs: [UUID, NUMA node] of each, in the order of the driver's numbers.


def _gpus(root: str) -> list[tuple[str, int]]:
    return list(_nvidia(root)) or list(_amd(root))


def _nvidia(root: str) -> Iterator[tuple[str, int]]:
    """CUDA numbers the GPUs of a kind by their PCI addresses. A container may have the devices of only some of them."""
    folder = f"{root}/proc/driver/nvidia/gpus"
    for address in sorted(_listed(folder)):
        text = linux.text_of(f"{folder}/{address}/information")
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.M)
        if minor and os.path.exists(f"{root}/dev/nvidia{minor[1]}"):
            uuid = re.search(r"^GPU UUID:\s*(\S+)", text, re.M)
            yield uuid[1] if uuid else "", _pci_node(root, address)


def _amd(root: str) -> Iterator[tuple[str, int]]:
    """The kernel driver's topology also lists CPUs, with no SIMD units."""
    folder = f"{root}/sys/class/kfd/kfd/topology/nodes"
    for name in sorted(filter(str.isdecimal, _listed(folder)), key=int):
        words = dict(re.findall(r"^(\w+) (\d+)$", linux.text_of(f"{folder}/{name}/properties"), re.M))
        if words.get("simd_count", "0") != "0":
            domain, place = int(words.get("domain", "0")), int(words.get("location_id", "0"))
            address = f"{domain:04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"
            yield "", _pci_node(root, address)


def _pci_node(root: str, address: str) -> int:
    try:
        return max(_UNKNOWN, int(linux.text_of(f"{root}/sys/bus/pci/devices/{address}/numa_node")))
    except ValueError:
        return _UNKNOWN


def _visible(installed: list[tuple[str, int]], environ: Mapping[str, str]) -> list[int]:
    """The NUMA nodes of the GPUs that ranks see, in the order in which they see them."""
    listed = resources.visible_devices(environ)
    if listed is None:
        return [node for _, node in installed]
    found = []
    for entry in resources.devices_in(listed, len(installed)):
        if entry.isdecimal():
            found.append(installed[int(entry)][1])
            continue
        nodes = {node for uuid, node in installed if uuid.startswith(entry.removeprefix("MIG-").split("/")[0])}
        nodes = nodes or {node for _, node in installed}  # a part of a GPU (MIG), whose name doesn't say of which
        found.append(nodes.pop() if len(nodes) == 1 else _UNKNOWN)
    return found


# Files.


def _numbers(path: str) -> list[int]:
    try:
        return cpulist.parse(linux.text_of(path))
    except ValueError:
        return []


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
